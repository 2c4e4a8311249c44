"""How a callback presses on gates: adding the gradient of a penalty to the one of any loss."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from dg_lightning.penalties import mean_rate
from dg_lightning.protocol import GateLike, release
from dg_lightning.recorded import Recorded
from dg_lightning.slots import Slots, slots_of
from dg_lightning.step_hooks import use_hooks

from ._agreement import mean_over_ranks, shards_parameters
from ._logit_pull import LogitPull
from ._ways import Pull, Way, ways_to

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
        self._penalised: list[Tensor] = []
        self._found: dict[str, Way] = {}
        self._missing = 0  # gates that it has not passed by yet, in this batch
        self._slots: tuple[weakref.ref[Any], list[Slots]] | None = None
        self._constants: dict[str, tuple[list[float], Tensor]] = {}
        self._logits = LogitPull(list(gates.values()))
        self._recorded = Recorded()
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
        `act_later`.
        """
        if self.later is None:
            self.later = self._can_act_later(trainer, pl_module)
            if self.later is not None:
                use_hooks(callback, *(late, early) if self.later else (early, late))

    def _can_act_later(self, trainer: Any, pl_module: pl.LightningModule) -> bool | None:
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if self.of != "p" or self.unit_costs or scaled or not pl_module.automatic_optimization:
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
        done, parts = self._penalised, trainer.accumulate_grad_batches
        # Kept until the next time: the graph of a static gate is small.
        self._penalised = values = [gate.probability for gate in self._logits.gates]
        scales = []
        for index, slots in enumerate(self.slots(trainer)):
            value = values[index]
            old = bool(done) and value is done[index]  # the gate has not run again
            fresh = value is not None and value.requires_grad and not old
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
        ways = self._ways_to_fresh_values(pl_module, loss)
        if not ways:
            return None
        fresh = {name: self._value(name) for name in ways}
        self._penalised += fresh.values()
        shares = self._shares(loss.device) if self.unit_costs else {}
        values = [self._value(name) for name in self.gates]
        compute = partial(self._rates_and_pulls, trainer, gradient_of, shares, reduce)
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if scaled or trainer.world_size > 1 or any(value is None for value in values):
            rates, pulls = compute(*values)
        else:
            rates, pulls = self._recorded(compute, [*shares.values(), *reads], values)
        scale_of = self._scales(trainer, pl_module, fresh, weight)
        beside = []
        for name, value in fresh.items():
            if ways[name] == "by":
                self._pull(value, pulls[name], scale_of[name])
            else:
                beside.append(name)
        if beside:
            zero = Pull.apply(
                [pulls[name] * scale_of[name] for name in beside], *(fresh[name] for name in beside)
            )  # type: ignore[no-untyped-call]
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
    ) -> tuple[Tensor, dict[str, Tensor]]:
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
        pulls = dict(zip(self.gates, gradient.unbind(), strict=True))
        return rates, {n: pull * shares[n] if n in shares else pull for n, pull in pulls.items()}

    def _value(self, name: str) -> Any:
        """Return p or g of a gate's last forward pass."""
        gate = self.gates[name]
        return gate.probability if self.of == "p" else gate.gate

    def _ways_to_fresh_values(self, pl_module: pl.LightningModule, loss: Tensor) -> dict[str, Way]:
        """Find the gates that this loss is made of and that have had no penalty for it yet."""
        done = self._penalised
        fresh = {
            name: value
            for name in self.gates
            if (value := self._value(name)) is not None
            and value.requires_grad
            and not (done and any(value is other for other in done))
        }
        if not pl_module.automatic_optimization:
            ways = dict(zip(fresh, ways_to(loss, list(fresh.values())), strict=True))
            # Gates that another loss is made of have their penalty with that one.
            return {name: way for name, way in ways.items() if way != "no"}
        if not fresh and not self._penalised:
            self._check_graph()
        # One loss a batch, made in the same way every time: it is looked through once.
        new = {name: value for name, value in fresh.items() if name not in self._found}
        if new:
            self._found |= dict(zip(new, ways_to(loss, list(new.values())), strict=True))
        return {name: self._found[name] for name in fresh}

    def _pull(self, value: Tensor, pull: Tensor, scale: float) -> None:
        """Add to the gradient of a value, when the backward pass comes by for the first time."""

        def add(gradient: Tensor) -> Tensor:
            handle.remove()
            self._missing -= 1
            return gradient.add(pull, alpha=scale)

        handle = value.register_hook(add)
        self._missing += 1

    def _scales(
        self, trainer: Any, pl_module: pl.LightningModule, values: dict[str, Tensor], weight: float
    ) -> dict[str, float]:
        """Return the weight of one entry of p: its part of the rate, with the gate's factors."""
        # With accumulation, a batch is a part of what the optimizer sees.
        parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        scales = {}
        for name, slots in zip(self.gates, self.slots(trainer), strict=True):
            if name in values:
                value = values[name]
                entries = value.numel() // (value.shape[-1] if name in self.unit_costs else 1)
                scales[name] = weight * slots.factor / (entries * parts)
        return scales

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
        missing = self._missing
        self.forget()
        if missing:
            raise RuntimeError(
                "The gradient of the loss did not come by the gates of this batch, so the penalty "
                "could not act: let every training step use them, or none."
            )

    def forget(self) -> None:
        """Let go of the graph of the last forward pass."""
        release(self.gates.values())
        self._penalised, self._missing = [], 0

    def __getstate__(self) -> dict[str, Any]:
        # A graph can be neither copied nor pickled, and slots belong to one Trainer.
        return {**self.__dict__, "_penalised": [], "_slots": None}

    def _shares(self, device: torch.device) -> dict[str, Tensor]:
        return {
            name: self.constant(f"costs of {name}", [cost / sum(costs) for cost in costs], device)
            for name, costs in self.unit_costs.items()
        }

    def _check_graph(self) -> None:
        modules = [gate for gate in self.gates.values() if isinstance(gate, nn.Module)]
        ran = any(gate.probability is not None for gate in self.gates.values())
        if ran and any(p.requires_grad for module in modules for p in module.parameters()):
            raise RuntimeError(
                "The penalty found no graph behind the gates' last forward pass and could not act: "
                "run passes under no_grad before the one of the loss, and checkpoint activations "
                "with use_reentrant=False."
            )
