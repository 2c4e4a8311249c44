"""Adds a penalty on gates to the loss that Lightning is about to differentiate."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from dg_lightning.budget import mean_rate, scale_gradient
from dg_lightning.gates import GateLike, SharedState, detach_graph, shared_state

from ._agreement import mean_over_ranks

__all__ = ["PenaltyTerm", "refuse_two_penalties"]


class PenaltyTerm:
    """Computes the rates of gates and adds a penalty on them to a loss, once per forward pass.

    Args:
        gates: The gates by name.
        of: Whether rates are means of p or of g.
        unit_costs: Costs of the blocks of a gate, by name; its rate is then a weighted mean.
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
        self._constants: dict[str, tuple[list[float], Tensor]] = {}
        # Values of p or g in this batch: those in the current term, those whose penalty was added
        # to a loss, and those whose penalty has been differentiated.
        self._current: set[Tensor] = set()
        self._added: set[Tensor] = set()
        self._penalized: set[Tensor] = set()

    def shared(self, trainer: Any) -> list[SharedState]:
        """Return what callbacks share about each gate."""
        return [shared_state(trainer, gate) for gate in self.gates.values()]

    def rates(
        self, trainer: Any, pl_module: pl.LightningModule, loss: Tensor, *, over_ranks: bool = True
    ) -> Tensor | None:
        """Return the rate of each gate, differentiable for the forward passes of this loss.

        Each gate's gradient is multiplied by its factor (`SharedState.factor`). None if every
        forward pass has had its penalty.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            loss: The loss, as `on_before_backward` gets it.
            over_ranks: Whether to average over processes. Gradients stay local, because DDP
                averages them.
        """
        if loss.numel() != 1:
            raise ValueError(
                f"A penalty on gates needs a scalar loss, got shape {tuple(loss.shape)}."
            )
        values = [g.probability if self.of == "p" else g.gate for g in self.gates.values()]
        fresh = {v for v in values if v is not None and v.requires_grad} - self._penalized
        if pl_module.automatic_optimization:
            if not fresh:
                self._refuse_missing_graph()
        elif fresh:  # with several losses, a gate is penalised with the one that depends on it
            nodes = _graph_of(loss)
            for value, gate in zip(values, self.gates.values(), strict=True):
                made = (v.grad_fn for v in (gate.probability, gate.gate) if v is not None)
                if value is not None and nodes.isdisjoint(made):
                    fresh.discard(value)
        if not fresh:
            return None
        self._current = fresh
        each = []
        for name, value, shared in zip(self.gates, values, self.shared(trainer), strict=True):
            rate = self._rate(name, value if value is None or value in fresh else value.detach())
            each.append(rate if shared.factor == 1 else scale_gradient(rate, shared.factor))
        rates = torch.stack(each).to(loss.device)
        if over_ranks and trainer.world_size > 1:
            here = rates.detach()
            rates = rates + (mean_over_ranks(trainer, here) - here)
        return rates

    def _rate(self, name: str, value: Tensor | None) -> Tensor:
        if value is None:  # a gate that has not run yet counts as open
            return torch.ones_like(self.gates[name].threshold)
        costs = self.unit_costs.get(name)
        shares = None if costs is None else self.constant(name, costs, value) / sum(costs)
        return mean_rate(value, shares)

    def constant(self, name: str, values: list[float], like: Tensor) -> Tensor:
        """Return values as a tensor, copied only when they change: a copy waits for the device."""
        known = self._constants.get(name)
        if known is None or known[0] != values or known[1].device != like.device:
            known = self._constants[name] = (values, like.new_tensor(values))
        return known[1]

    def add(self, trainer: Any, pl_module: pl.LightningModule, loss: Tensor, term: Tensor) -> None:
        """Add a penalty on `rates` to a loss in place; the value of the loss does not change."""
        if pl_module.automatic_optimization:
            term = term / trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:  # the loss is scaled already
            term = scaler.scale(term)
        zero = term - term.detach()
        zero.register_hook(partial(self._pass_once, self._current))
        self._added |= self._current
        try:
            # The loss keeps its value, which its last operation may have saved for backward.
            with _unsafe_preserve_version_counter(loss):
                loss.add_(zero)
        except RuntimeError as error:
            if "view" not in str(error):
                raise
            raise ValueError(
                "A penalty on gates cannot be added to a loss that is one of several views of a "
                "tensor, as in a loop over its entries: call backward on `loss.clone()`."
            ) from error

    def _pass_once(self, values: set[Tensor], gradient: Tensor) -> Tensor:
        """Pass the gradient of a penalty once, even if its loss is differentiated repeatedly."""
        if values <= self._penalized:
            return torch.zeros_like(gradient)
        self._penalized |= values
        return gradient

    def end_batch(self) -> None:
        """Check that the penalty has acted, and detach the gates from their graph."""
        missed = not self._added <= self._penalized
        self.detach()
        if missed:
            raise RuntimeError(
                "The gradient of the loss did not come by the gates of this batch, so the penalty "
                "could not act: let every training step use them, or none."
            )

    def detach(self) -> None:
        """Detach the gates from the graph of the last forward pass."""
        detach_graph(self.gates.values())
        self._current, self._added, self._penalized = set(), set(), set()

    def __getstate__(self) -> dict[str, Any]:
        # Tensors with a graph can be neither copied nor pickled.
        return {**self.__dict__, "_current": set(), "_added": set(), "_penalized": set()}

    def _refuse_missing_graph(self) -> None:
        modules = [gate for gate in self.gates.values() if isinstance(gate, nn.Module)]
        ran = any(gate.probability is not None for gate in self.gates.values())
        if ran and any(p.requires_grad for module in modules for p in module.parameters()):
            raise RuntimeError(
                "The penalty found no graph behind the gates' last forward pass and could not act: "
                "run passes under no_grad before the one of the loss, and checkpoint activations "
                "with use_reentrant=False."
            )


def refuse_two_penalties(callback: Any, trainer: Any) -> None:
    """Refuse a second owner of a penalty's weight, and a second penalty with the same keys."""
    for other in trainer.callbacks:
        if other is callback or not isinstance(getattr(other, "term", None), PenaltyTerm):
            continue
        names = f"{type(callback).__name__} and {type(other).__name__}"
        shared = [name for name in callback.term.gates if name in other.term.gates]
        if shared and (hasattr(callback, "budget") or hasattr(other, "budget")):
            raise ValueError(
                f"{names} both press on {shared[0]}: the weight of a penalty has one owner; remove "
                "one, or part them by `layers`."
            )
        if callback.name == other.name:
            had = "no `name`" if callback.name is None else f"the name {callback.name!r}"
            raise ValueError(
                f"{names} have {had}: give each a `name` of its own, which tells their logged keys "
                "apart."
            )


def _graph_of(loss: Tensor) -> set[Any]:
    """Return the nodes of the graph of a loss."""
    nodes: set[Any] = set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending += [before for before, _ in node.next_functions]
    return nodes
