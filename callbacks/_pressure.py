"""How a callback presses on gates: adding the gradient of a penalty to the one of any loss."""

import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from typing_extensions import override

from dg_lightning.penalties import last_value, mean_rates
from dg_lightning.protocol import GateLike, release
from dg_lightning.slots import Slots, slots_of

from ._ranks import mean_over_ranks

__all__ = ["Pressure", "logs_now"]


def logs_now(trainer: Any) -> bool:
    """Tell whether what is logged in this batch is seen: logging costs more than computing."""
    return trainer.fit_loop.batch_idx <= 0 or bool(trainer._logger_connector.should_update_logs)


class _Pull(torch.autograd.Function):
    """A zero whose gradient by the entries of each value is given."""

    @staticmethod
    @override
    def forward(ctx: Any, pulls: list[Tensor], *values: Tensor) -> Tensor:
        ctx.pulls = pulls
        ctx.shapes = [value.shape for value in values]
        return values[0].new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        pulls = zip(ctx.pulls, ctx.shapes, strict=True)
        return (None, *((pull * grad_outputs[0]).expand(shape) for pull, shape in pulls))


def _is_between(loss: Tensor, values: list[Tensor]) -> bool:
    """Tell whether the gradient of a loss passes through every one of these values.

    It does not where gates are cut off from the loss, and where a compiled net hands out p as an
    output beside the one that the loss is made of.
    """
    wanted = {(value.grad_fn, value.output_nr) for value in values}
    seen, ahead = set(), [(loss.grad_fn, loss.output_nr)]
    while ahead and wanted:
        edge = ahead.pop()
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        wanted.discard(edge)
        ahead += edge[0].next_functions
    return not wanted


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
        self._direct: bool | None = None  # whether the gradient of the loss passes by the gates
        self._missing = 0  # gates that it has not passed by yet, in this batch
        self._slots: tuple[weakref.ref[Any], list[Slots]] | None = None
        self._constants: dict[str, tuple[list[float], Tensor]] = {}

    def slots(self, trainer: Any) -> list[Slots]:
        """Return the slots of the gates."""
        if self._slots is None or self._slots[0]() is not trainer:
            found = [slots_of(trainer, gate) for gate in self.gates.values()]
            self._slots = (weakref.ref(trainer), found)
        return self._slots[1]

    def act(
        self,
        trainer: Any,
        pl_module: pl.LightningModule,
        loss: Tensor,
        gradient_of: Callable[[Tensor], Tensor],
        *,
        weight: float = 1.0,
        reduce: bool = True,
    ) -> Tensor | None:
        """Add to the gradient of the loss; return the rates, or None if it was done already.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            loss: The loss, as `on_before_backward` has it.
            gradient_of: The derivative of the penalty by the rates, from the rates.
            weight: What it is multiplied by.
            reduce: Whether the rates are to be those of all processes; DDP averages gradients.
        """
        values = [last_value(name, gate, self.of) for name, gate in self.gates.items()]
        if len(values) == len(self._penalised) and all(map(operator.is_, values, self._penalised)):
            return None  # another loss of a forward pass that has had its penalty
        self._check(values, loss)
        self._penalised = values
        with torch.no_grad():
            shares = self._shares(values[0]) if self.unit_costs else {}
            rates = mean_rates(self.gates, self.of, shares)
            if reduce:
                rates = mean_over_ranks(trainer, rates)
            gradient = gradient_of(rates)
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None:
                gradient = scaler.scale(gradient)
            pulls = [
                pull if name not in shares else pull * shares[name]
                for name, pull in zip(self.gates, gradient.unbind(), strict=True)
            ]
        by_entry = self._by_entry(trainer, pl_module, values)
        if self._direct is None:
            self._direct = _is_between(loss, values)
        if self._direct:
            for value, pull, scale in zip(values, pulls, by_entry, strict=True):
                self._pull(value, pull, weight * scale)
        else:
            pulls = [pull * (weight * scale) for pull, scale in zip(pulls, by_entry, strict=True)]
            zero = _Pull.apply(pulls, *values)  # type: ignore[no-untyped-call]
            # Only a gradient is added: the value, which the last operation of the loss may need for
            # its own backward pass, stays as it is, and so does its version.
            with _unsafe_preserve_version_counter(loss):
                loss.add_(zero)
        return rates

    def _pull(self, value: Tensor, pull: Tensor, scale: float) -> None:
        """Add to the gradient of a value, when the backward pass comes by for the first time."""

        def add(gradient: Tensor) -> Tensor:
            handle.remove()
            self._missing -= 1
            return gradient.add(pull, alpha=scale)

        handle = value.register_hook(add)
        self._missing += 1

    def _by_entry(
        self, trainer: Any, pl_module: pl.LightningModule, values: list[Tensor]
    ) -> list[float]:
        """Return the part of a rate that one entry of p is, with the factors of the gates."""
        # With accumulation, a batch is a part of what the optimizer sees.
        parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        entries = [
            value.numel() // value.shape[-1] if name in self.unit_costs else value.numel()
            for name, value in zip(self.gates, values, strict=True)
        ]
        factors = [slots.factor for slots in self.slots(trainer)]
        return [f / (n * parts) for f, n in zip(factors, entries, strict=True)]

    def constant(self, name: str, values: list[float], like: Tensor) -> Tensor:
        """Return values as a tensor, which is made anew only when they have changed."""
        kept = self._constants.get(name)
        if kept is None or kept[0] != values or kept[1].device != like.device:
            made = torch.tensor(values, dtype=like.dtype, device=like.device)
            self._constants[name] = kept = (values, made)
        return kept[1]

    def let_go(self) -> None:
        """Let go of the graph of the last forward pass."""
        release(self.gates.values())
        self._penalised = []
        if self._missing:
            self._missing = 0
            raise RuntimeError(
                "The gradient of the loss did not come by the gates of this batch, so the penalty "
                "could not act: let every training step use them, or none."
            )

    def _shares(self, like: Tensor) -> dict[str, Tensor]:
        return {
            name: self.constant(f"costs of {name}", [cost / sum(costs) for cost in costs], like)
            for name, costs in self.unit_costs.items()
        }

    def _check(self, values: list[Tensor], loss: Tensor) -> None:
        if not any(value.requires_grad for value in values) and any(
            parameter.requires_grad
            for gate in self.gates.values()
            if isinstance(gate, nn.Module)
            for parameter in gate.parameters()
        ):
            raise RuntimeError(
                "The penalty found no graph behind the gates' last forward pass and could not act: "
                "run passes under no_grad before the one of the loss, and checkpoint activations "
                "with use_reentrant=False."
            )
        if loss.numel() != 1:
            raise ValueError(
                f"A penalty on gates needs a scalar loss, got shape {tuple(loss.shape)}."
            )
