"""Add a penalty on gates to the loss, right before the backward pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from typing_extensions import override

from dg_lightning.budget import mean_rate, scale_gradient
from dg_lightning.gates import GateLike, SharedState, detach_graph, shared_state
from dg_lightning.training import DeviceScalars, is_replayed

from ._shared import check_single_penalty, check_step_counting, mean_over_ranks


@dataclass
class _Batch:
    """Tracks the p (or g) that gates record within one batch."""

    before: list[Tensor | None] = field(default_factory=list)  # values recorded before the batch
    current: set[Tensor] = field(default_factory=set)  # tensors behind the latest rates
    added: set[Tensor] = field(default_factory=set)  # tensors whose penalty was added to a loss
    penalized: set[Tensor] = field(default_factory=set)  # tensors that got a penalty gradient


class PenaltyTerm:
    """Adds a penalty on gate rates to a loss, once per forward pass.

    Args:
        gates: The gates by name.
        rate: Whether rates are means of p or of g.
        unit_costs: Costs of a gate's blocks, by gate name. They weight the mean over the blocks.
    """

    def __init__(
        self,
        gates: Mapping[str, GateLike],
        rate: Literal["p", "g"] = "p",
        unit_costs: Mapping[str, list[float]] | None = None,
    ) -> None:
        self.gates = gates
        self.rate: Literal["p", "g"] = rate
        self.unit_costs = {
            name: DeviceScalars([cost / sum(costs) for cost in costs])
            for name, costs in (unit_costs or {}).items()
        }
        self.factors = DeviceScalars()  # gradient factor of each gate
        self.usage: Tensor | None = None  # last penalised usage
        self.in_backward = False  # whether Lightning is differentiating a loss
        self._handles: list[Any] = []
        self._batch = _Batch()

    @torch.no_grad()
    def record_usage(self, usage: Tensor) -> None:
        """Store a forward pass's usage in place, so that it can be logged when the batch ends."""
        if self.usage is None or self.usage.device != usage.device:
            self.usage = usage.detach().clone()
        else:
            self.usage.copy_(usage)

    def prepare(self, trainer: Any) -> bool:
        """Set the gradient factors and return whether any of them is not 1."""
        factors = [shared.factor for shared in self.shared(trainer)]
        self.factors.set(factors)
        return any(factor != 1 for factor in factors)

    def shared(self, trainer: Any) -> list[SharedState]:
        """Return the shared state of each gate."""
        return [shared_state(trainer, gate) for gate in self.gates.values()]

    def rates(
        self,
        trainer: Any,
        pl_module: pl.LightningModule,
        loss: Tensor,
        *,
        over_ranks: bool = True,
        required: bool = True,
    ) -> Tensor | None:
        """Return the rate of each gate, differentiable through this loss's forward passes.

        Each gate's gradient is multiplied by its `SharedState.factor`. Return None if every forward
        pass has already been penalised.

        Args:
            trainer: The Trainer.
            pl_module: The Trainer's LightningModule.
            loss: The loss that `on_before_backward` receives.
            over_ranks: Whether to average over processes. Gradients stay local because DDP
                averages them.
            required: Whether to raise RuntimeError if a gate ran without a graph.
        """
        if loss.numel() != 1:
            raise ValueError(
                f"A penalty on gates needs a scalar loss, got shape {tuple(loss.shape)}."
            )
        values = self._values()
        fresh = {v for v in values if v is not None and v.requires_grad} - self._batch.penalized
        # Gates that did not run in this batch, as in stochastic depth, get no penalty.
        blind: list[str] = []
        if required and pl_module.automatic_optimization:
            blind = self._without_graph(values)
        if fresh and not pl_module.automatic_optimization:
            # With several losses, penalise each gate in the loss that depends on it.
            nodes = graph_of(loss)
            for value, gate in zip(values, self.gates.values(), strict=True):
                made = (v.grad_fn for v in (gate.probability, gate.gate) if v is not None)
                if value is not None and nodes.isdisjoint(made):
                    fresh.discard(value)
        self._batch.current = fresh
        live = [v if v is None or v in fresh else v.detach() for v in values]
        each = [self._rate(name, value) for name, value in zip(self.gates, live, strict=True)]
        rates = torch.stack(each).to(loss.device)
        if self.prepare(trainer):
            rates = scale_gradient(rates, self.factors.on(rates))
        if over_ranks and trainer.world_size > 1:  # every rank must take part
            here = torch.cat([rates.detach(), rates.new_tensor([float(bool(blind))])])
            mean = mean_over_ranks(trainer, here)
            rates = rates + (mean - here)[:-1]
            if mean[-1] > 0 and not blind:
                blind = ["a gate on another process"]  # all ranks must raise
        if blind:
            raise RuntimeError(
                f"The penalty cannot act on {', '.join(blind)}: the last forward pass recorded no "
                "graph. Run no_grad passes before the one that computes the loss, set "
                "use_reentrant=False for activation checkpointing, or choose other `layers`."
            )
        return rates if fresh else None

    @torch.no_grad()
    def last_rates(self) -> Tensor:
        """Return the rate of each gate in its last forward pass, without a graph."""
        values = zip(self.gates, self._values(), strict=True)
        return torch.stack([self._rate(name, value) for name, value in values])

    def _values(self) -> list[Tensor | None]:
        """Return the last p or g that each gate recorded."""
        return [g.probability if self.rate == "p" else g.gate for g in self.gates.values()]

    def _without_graph(self, values: list[Tensor | None]) -> list[str]:
        """Return the names of trainable gates that ran in this batch without a graph."""
        found = []
        known = self._batch.before or [None] * len(values)
        for (name, gate), value, old in zip(self.gates.items(), values, known, strict=True):
            ran_blind = value is not None and value is not old and not value.requires_grad
            if ran_blind and isinstance(gate, nn.Module):
                found += [name] if any(p.requires_grad for p in gate.parameters()) else []
        return found

    def _rate(self, name: str, value: Tensor | None) -> Tensor:
        if value is None:  # a gate that has not run yet counts as open
            return torch.ones_like(self.gates[name].threshold)
        costs = self.unit_costs.get(name)
        return mean_rate(value, None if costs is None else costs.on(value))

    def add(self, trainer: Any, pl_module: pl.LightningModule, loss: Tensor, term: Tensor) -> None:
        """Add the gradient of a penalty to a loss in place, without changing its value."""
        hook = partial(self._pass_once, self._batch.current)
        self._batch.added |= self._batch.current
        add_gradient(trainer, pl_module, loss, term, hook)

    def _pass_once(self, values: set[Tensor], gradient: Tensor) -> Tensor:
        """Pass on the penalty's gradient only once, even if backward runs repeatedly."""
        if values <= self._batch.penalized:
            return torch.zeros_like(gradient)
        self._batch.penalized |= values
        return gradient

    def watch_backward(self, pl_module: pl.LightningModule) -> None:
        """Reject `loss.backward()` in manual optimization, because it bypasses callbacks."""
        self.stop_watching()
        if pl_module.automatic_optimization:
            return
        modules = [gate for gate in self.gates.values() if isinstance(gate, nn.Module)]
        for parameter in {p for module in modules for p in module.parameters()}:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._check_manual_backward)
                self._handles.append(hook)

    def stop_watching(self) -> None:
        """Remove the hooks that `watch_backward` registered."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _check_manual_backward(self, parameter: Tensor) -> None:
        if not self.in_backward:
            raise RuntimeError(
                "`loss.backward()` bypasses Lightning and the penalty on gates: call "
                "`self.manual_backward(loss)`."
            )

    def begin_batch(self) -> None:
        """Start a batch, and remember what the gates recorded before it."""
        self._batch = _Batch(self._values())

    def end_batch(self) -> None:
        """Check that the penalty had an effect, and detach the gates from their graph."""
        missed = not self._batch.added <= self._batch.penalized
        self.detach()
        if missed:
            raise RuntimeError(
                "No gradient of the loss reached the gates in this batch, so the penalty had no "
                "effect: either every training step must use the gates, or none may."
            )

    def detach(self) -> None:
        """Detach the gates from the graph of the last forward pass."""
        detach_graph(self.gates.values())
        self._batch = _Batch()

    def __getstate__(self) -> dict[str, Any]:
        # Hook handles and tensors with a graph can be neither copied nor pickled.
        return {**self.__dict__, "_batch": _Batch(), "_handles": []}


class Penalty(pl.Callback, ABC):
    """Base class of callbacks that add a `PenaltyTerm` to the loss."""

    term: PenaltyTerm

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_single_penalty(self, trainer)
        check_step_counting(self, trainer, pl_module)
        self.term.watch_backward(pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.term.begin_batch()

    @abstractmethod
    def prepare_step(self, trainer: pl.Trainer) -> Hashable:
        """Update the penalty's inputs and return the graph key (see `CapturedSteps`)."""

    @abstractmethod
    def add_penalty(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Add the penalty to the loss."""

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self.term.in_backward = True
        if not is_replayed(pl_module):
            self.prepare_step(trainer)
            self.add_penalty(trainer, pl_module, loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.term.in_backward = False

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self.term.end_batch()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.term.detach()
        self.term.stop_watching()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.term.stop_watching()


def add_gradient(
    trainer: Any,
    pl_module: pl.LightningModule,
    loss: Tensor,
    term: Tensor,
    hook: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Add the gradient of a term to a loss in place, without changing its value.

    The term is scaled as Lightning scales the loss.

    Args:
        trainer: The Trainer.
        pl_module: The Trainer's LightningModule.
        loss: The loss that `on_before_backward` receives.
        term: The term.
        hook: Function that gets the gradient of the term and may replace it.
    """
    if pl_module.automatic_optimization:
        term = term / trainer.accumulate_grad_batches
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:  # the loss is already scaled
        term = scaler.scale(term)
    zero = term - term.detach()
    if hook is not None:
        zero.register_hook(hook)
    try:
        # The operation that computed the loss may have saved it for backward. Adding 0 keeps it
        # valid.
        with _unsafe_preserve_version_counter(loss):
            loss.add_(zero)
    except RuntimeError as error:
        if "view" not in str(error):
            raise
        raise ValueError(
            "A term cannot be added in place to a loss that is one of several views of a tensor, "
            "such as an entry in a loop over it: call backward on `loss.clone()`."
        ) from error


def graph_of(loss: Tensor) -> set[Any]:
    """Return all nodes in a loss's autograd graph."""
    nodes: set[Any] = set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending += [before for before, _ in node.next_functions]
    return nodes
