"""How a callback presses on gates: adding the gradient of a penalty to the one of any loss."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from dg_lightning.gates.decision import node_of, pull_at
from dg_lightning.penalties import mean_rate
from dg_lightning.protocol import GateLike, release
from dg_lightning.recorded import Recorded
from dg_lightning.slots import Slots, slots_of
from dg_lightning.step_hooks import use_hooks

from ._agreement import mean_over_ranks, shards_parameters
from ._logit_pull import LogitPull
from ._ways import Hook, Pull, Way, ways_to

__all__ = ["Pressure"]


class Pressure:
    """Adds the gradient of a penalty on the rates of some gates to a loss, once a forward pass.

    Every operation here is paid in every step, so there are few, and none waits for the device.

    Args:
        gates: The gates to press on, by name.
        of: Whether rates are of p or of g.
        unit_costs: What each block of a gate costs, for means that are weighted by it.
    """

    def __init__(
        self,
        gates: Mapping[str, GateLike],
        of: Literal["p", "g"] = "p",
        unit_costs: Mapping[str, list[float]] | None = None,
    ) -> None:
        self.gates = gates
        self.of: Literal["p", "g"] = of
        self.unit_costs = dict(unit_costs or {})
        # By the number of a gate: the value that has had its penalty, which is not kept alive here,
        # and how the gradient of the loss gets there.
        self._penalised: dict[int, weakref.ref[Tensor]] = {}
        self._found: dict[int, Way] = {}
        self._waiting: list[Any] = []  # where it was left what to add, to see that it was
        self._slots: tuple[weakref.ref[Any], list[Slots]] | None = None
        self._constants: dict[str, tuple[list[float], Tensor]] = {}
        self._logits = LogitPull(list(gates.values()))
        self._recorded = Recorded()
        self._records = False  # whether what it computes is the same in every step, and here alone
        # Whether it acts behind the backward pass; None until gates have run.
        self.later: bool | None = None

    def slots(self, trainer: Any) -> list[Slots]:
        """Return the slots of the gates."""
        if self._slots is None or self._slots[0]() is not trainer:
            found = [slots_of(trainer, gate) for gate in self.gates.values()]
            self._slots = (weakref.ref(trainer), found)
        return self._slots[1]

    def choose(
        self,
        trainer: Any,
        pl_module: pl.LightningModule,
        callback: pl.Callback,
        early: Sequence[str],
        late: Sequence[str],
    ) -> None:
        """Choose in the first batch that runs the gates at which hooks a callback acts.

        Call it at the first of the early ones, which `act`; of the late ones, one calls
        `act_later`. A module may let go of graphs itself when a batch ends (`releases_gates`).
        """
        if self.later is None:
            scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
            self._records = not scaled and trainer.world_size == 1
            self.later = False if scaled else self._can_act_later(trainer, pl_module)
            if self.later is not None:
                use_hooks(callback, *(late, early) if self.later else (early, late))
            if self.later is False and getattr(pl_module, "releases_gates", False):
                use_hooks(callback, [], [hook for hook in early if hook == "on_train_batch_end"])

    def _can_act_later(self, trainer: Any, pl_module: pl.LightningModule) -> bool | None:
        if self.of != "p" or self.unit_costs or not pl_module.automatic_optimization:
            return False
        fit = [LogitPull.fits(gate) for gate in self.gates.values()]
        if False in fit or shards_parameters(trainer, pl_module):
            return False
        return None if None in fit else True

    def act_later(
        self,
        trainer: Any,
        gradient_of: Callable[[Tensor], Tensor],
        reads: Sequence[Tensor],
        *,
        weight: float = 1.0,
        wants_rates: bool = True,
    ) -> Tensor | None:
        """Add to the gradients of the logits; return the rates if they are wanted.

        `reads` are the tensors that `gradient_of` reads; for the rest see `act`. Static gates are
        the same on all processes.
        """
        parts = trainer.accumulate_grad_batches
        scales = []
        for index, slots in enumerate(self.slots(trainer)):
            fresh = self._claim(index, self._logits.gates[index].probability)
            scales.append(weight * slots.factor / parts if fresh else None)
        if all(scale is None for scale in scales):
            self._check_graph()
            return None
        if any(scales):
            self._logits.add(gradient_of, reads, [scale or 0.0 for scale in scales])
        return self._logits.rates() if wants_rates else None

    def act(
        self,
        trainer: Any,
        pl_module: pl.LightningModule,
        loss: Tensor,
        gradient_of: Callable[[Tensor], Tensor],
        reads: Sequence[Tensor],
        *,
        weight: float = 1.0,
        reduce: bool = True,
    ) -> Tensor | None:
        """Add to the gradient of the loss; return the rates, or None if it was done already.

        The rates are written over in the next step.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            loss: The loss, as `on_before_backward` has it.
            gradient_of: The derivative of the penalty by the rates, from the rates.
            reads: The tensors that it reads.
            weight: What it is multiplied by.
            reduce: Whether the rates are to be those of all processes; DDP averages gradients.
        """
        if loss.numel() != 1:
            raise ValueError(
                f"A penalty on gates needs a scalar loss, got shape {tuple(loss.shape)}."
            )
        gates = self.gates.values()
        values: list[Any] = [g.probability if self.of == "p" else g.gate for g in gates]
        fresh = [index for index, value in enumerate(values) if self._claim(index, value)]
        ways = self._ways(pl_module, loss, values, fresh)
        if not fresh:
            return None
        shares = self._shares(loss.device) if self.unit_costs else {}
        compute = partial(self._rates_and_pulls, trainer, gradient_of, shares, reduce)
        if not self._records or any(value is None for value in values):
            rates, pulls = compute(*values)
        else:
            rates, pulls = self._recorded(compute, [*shares.values(), *reads], values)
        # With accumulation, a batch is a part of what the optimizer sees.
        parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        slots, beside = self.slots(trainer), []
        for index in fresh:
            value, pull, way = values[index], pulls[index], ways[index]
            entries = value.numel() // pull.numel()
            scale = weight * slots[index].factor / (entries * parts)
            node = None if way == "no" else node_of(value)
            if node is not None:
                pull_at(node, pull, scale)
                self._waiting.append(node)
            elif way == "by":
                self._waiting.append(Hook(value, pull, scale))
            else:
                beside.append((value, pull * scale))
        if beside:
            zero = Pull.apply([pull for _, pull in beside], *(value for value, _ in beside))  # type: ignore[no-untyped-call]
            # Only a gradient is added: the value, which the last operation of the loss may need for
            # its own backward pass, stays as it is, and so does its version.
            with _unsafe_preserve_version_counter(loss):
                loss.add_(zero)
        return rates

    @torch.no_grad()
    def _rates_and_pulls(
        self,
        trainer: Any,
        gradient_of: Callable[[Tensor], Tensor],
        shares: dict[str, Tensor],
        reduce: bool,
        *values: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the rates, and the derivative by the rate of each gate or of its blocks."""
        rates = torch.stack(
            [
                # What has not run yet counts as open.
                gate.threshold.new_ones(()) if value is None else mean_rate(value, shares.get(name))
                for (name, gate), value in zip(self.gates.items(), values, strict=True)
            ]
        )
        if reduce:
            rates = mean_over_ranks(trainer, rates)
        gradient = gradient_of(rates)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            gradient = scaler.scale(gradient)
        pulls = zip(self.gates, gradient.unbind(), strict=True)
        return rates, [pull * shares[name] if name in shares else pull for name, pull in pulls]

    def _claim(self, index: int, value: Tensor | None) -> bool:
        """Tell whether the value of a gate has not had its penalty yet; now it has."""
        if value is None or not value.requires_grad:
            return False
        last = self._penalised.get(index)
        if last is not None and last() is value:
            return False
        self._penalised[index] = weakref.ref(value)
        return True

    def _ways(
        self, pl_module: pl.LightningModule, loss: Tensor, values: list[Any], fresh: list[int]
    ) -> dict[int, Way]:
        """Find how the gradient of a loss gets to fresh values; take out those of another loss."""
        found = self._found
        if pl_module.automatic_optimization:
            self._check_that_it_acted()  # in the batch before
            if not fresh:
                self._check_graph()
            # One loss a batch, made in the same way every time: it is looked through once.
            new = [index for index in fresh if index not in found]
        else:
            new = fresh
        if new:
            ways = ways_to(loss, [values[index] for index in new])
            found.update(zip(new, ways, strict=True))
        if not pl_module.automatic_optimization:
            for index in [index for index in fresh if found[index] == "no"]:
                fresh.remove(index)  # it has its penalty with the loss that it is a part of
                del self._penalised[index]
        return found

    def constant(self, name: str, values: list[float], device: torch.device) -> Tensor:
        """Return values as a tensor, which stays where it is when they change."""
        kept = self._constants.get(name)
        if kept is None or kept[1].device != device:
            made = torch.tensor(values, dtype=torch.float32, device=device)
            self._constants[name] = kept = (values, made)
        elif kept[0] != values:
            kept[1].copy_(torch.tensor(values))
            self._constants[name] = kept = (values, kept[1])
        return kept[1]

    def let_go(self) -> None:
        """Let go of the graph of the last forward pass, and see that the penalty has acted."""
        try:
            self._check_that_it_acted()
        finally:
            self.forget()

    def forget(self) -> None:
        """Let go of the graph of the last forward pass."""
        release(self.gates.values())
        self._penalised, self._waiting = {}, []

    def __getstate__(self) -> dict[str, Any]:
        # A graph can be neither copied nor pickled, and slots belong to one Trainer.
        return {**self.__dict__, "_penalised": {}, "_waiting": [], "_slots": None}

    def _shares(self, device: torch.device) -> dict[str, Tensor]:
        return {
            name: self.constant(f"costs of {name}", [cost / sum(costs) for cost in costs], device)
            for name, costs in self.unit_costs.items()
        }

    def _check_that_it_acted(self) -> None:
        waiting, self._waiting = self._waiting, []
        if any(place.pulls for place in waiting):
            raise RuntimeError(
                "The gradient of the loss did not come by the gates of this batch, so the penalty "
                "could not act: let every training step use them, or none."
            )

    def _check_graph(self) -> None:
        modules = [gate for gate in self.gates.values() if isinstance(gate, nn.Module)]
        ran = any(gate.probability is not None for gate in self.gates.values())
        if ran and any(p.requires_grad for module in modules for p in module.parameters()):
            raise RuntimeError(
                "The penalty found no graph behind the gates' last forward pass and could not act: "
                "run passes under no_grad before the one of the loss, and checkpoint activations "
                "with use_reentrant=False."
            )
