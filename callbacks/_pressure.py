"""How a callback presses on gates: adding the gradient of a penalty to the one of any loss."""

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

__all__ = ["Pressure", "logs_now"]


def logs_now(trainer: Any) -> bool:
    """Tell whether what is logged in this batch is seen: logging costs more than computing."""
    return trainer.fit_loop.batch_idx <= 0 or bool(trainer._logger_connector.should_update_logs)


class _Pull(torch.autograd.Function):
    """A zero whose gradient by the entries of each value is given."""

    @staticmethod
    @override
    def forward(ctx: Any, by_entry: Tensor, shares: list[Tensor | None], *values: Tensor) -> Tensor:
        ctx.save_for_backward(by_entry)
        ctx.shares = shares
        ctx.shapes = [value.shape for value in values]
        return by_entry.new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (by_entry,) = ctx.saved_tensors
        pulls = (by_entry * grad_outputs[0]).unbind()
        shaped = [
            (pull if share is None else pull * share).expand(shape)
            for pull, share, shape in zip(pulls, ctx.shares, ctx.shapes, strict=True)
        ]
        return (None, None, *shaped)


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
        self._constants: dict[str, tuple[list[float], Tensor]] = {}

    def slots(self, trainer: Any) -> list[Slots]:
        """Return the slots of the gates."""
        return [slots_of(trainer, gate) for gate in self.gates.values()]

    def act(
        self,
        trainer: Any,
        pl_module: pl.LightningModule,
        loss: Tensor,
        gradient_of: Callable[[Tensor], Tensor],
        *,
        reduce: bool = True,
    ) -> Tensor | None:
        """Add to the gradient of the loss; return the rates, or None if it was done already.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            loss: The loss, as `on_before_backward` has it.
            gradient_of: The derivative of the penalty by the rates, from the rates.
            reduce: Whether the rates are to be those of all processes; DDP averages gradients.
        """
        values = [last_value(name, gate, self.of) for name, gate in self.gates.items()]
        if len(values) == len(self._penalised) and all(
            a is b for a, b in zip(values, self._penalised, strict=True)
        ):
            return None  # another loss of a forward pass that has had its penalty
        self._check(values, loss)
        self._penalised = values
        with torch.no_grad():
            shares = self._shares(values[0])
            rates = mean_rates(self.gates, self.of, shares)
            if reduce and trainer.world_size > 1:
                rates = trainer.strategy.reduce(rates, reduce_op="mean")
            gradient = gradient_of(rates) * self._by_entry(trainer, pl_module, values)
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None:
                gradient = scaler.scale(gradient)
        pull = _Pull.apply(gradient, [shares.get(name) for name in self.gates], *values)  # type: ignore[no-untyped-call]
        # Only a gradient is added: the value, which the last operation of the loss may need for its
        # own backward pass, stays as it is, and so does its version.
        with _unsafe_preserve_version_counter(loss):
            loss.add_(pull)
        return rates

    def _by_entry(
        self, trainer: Any, pl_module: pl.LightningModule, values: list[Tensor]
    ) -> Tensor:
        """Return the part of a rate that one entry of p is, with the factors of the gates."""
        # With accumulation, a batch is a part of what the optimizer sees.
        parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        entries = [
            value.numel() // value.shape[-1] if name in self.unit_costs else value.numel()
            for name, value in zip(self.gates, values, strict=True)
        ]
        factors = [slots.factor for slots in self.slots(trainer)]
        by_entry = [f / (n * parts) for f, n in zip(factors, entries, strict=True)]
        return self.constant("by entry", by_entry, values[0])

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
