"""Run a few training steps on copies, and record what happens."""

import copy
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.callbacks import SET, BudgetController, GatePenalty, MagnitudePruning, RigL
from dg_lightning.compute.whole_net import FlopRecorder, WholeNet
from dg_lightning.gates import gate_layers, shared_state
from dg_lightning.schedules import Clock, Schedule

# Trainer arguments that a check sets or omits.
_OF_A_RUN = frozenset({
    "barebones", "callbacks", "default_root_dir", "devices", "enable_checkpointing",
    "enable_model_summary", "enable_progress_bar", "fast_dev_run", "limit_val_batches", "logger",
    "min_epochs", "min_steps", "num_nodes", "num_sanity_val_steps", "profiler", "strategy",
})  # fmt: skip
_LEFT_OUT = (BatchSizeFinder, Checkpoint, LearningRateFinder, ModelSummary, ProgressBar)


def is_ours(callback: Any) -> bool:
    """Return True for callbacks of this package and their subclasses."""
    return any(k.__module__.startswith("dg_lightning.callbacks.") for k in type(callback).__mro__)


def targets(callback: Any) -> dict[str, Any]:
    """Return the gates or layers that a callback of this package acts on, by name."""
    if hasattr(callback, "term"):
        return dict(callback.term.gates)
    if hasattr(callback, "connections"):
        return {name: sparse.layer for name, sparse in callback.connections.items()}
    return dict(vars(callback).get("_gates") or vars(callback).get("_routers") or {})


def without_io_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks that do not save checkpoints, print or tune settings."""
    return [callback for callback in callbacks if not isinstance(callback, _LEFT_OUT)]


def shorten_schedules(callbacks: Sequence[Any]) -> None:
    """Make callbacks act within the first steps."""
    for callback in callbacks:
        if isinstance(callback, GatePenalty):
            most = max(callback.weight.start, callback.weight.end)
            callback.weight = Schedule(most, most)
        elif isinstance(callback, BudgetController):
            callback.begin = 0
        elif isinstance(callback, MagnitudePruning):
            callback.begin, callback.until = 1, None
        elif isinstance(callback, RigL | SET):
            callback.schedule = replace(callback.schedule, every_n_steps=2)


class Copies:
    """Copies of a model and its callbacks that preserve the references between them.

    Args:
        model: The model.
        callbacks: The callbacks of its Trainer.
        without_ours: Whether to omit the callbacks of this package.
    """

    def __init__(
        self, model: pl.LightningModule, callbacks: Sequence[Any], without_ours: bool = False
    ) -> None:
        some = [c for c in without_io_callbacks(callbacks) if not (without_ours and is_ours(c))]
        self.model, self.callbacks = copy.deepcopy((model, some))


def own_settings(arguments: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return arguments for a Trainer that writes only to `folder`."""
    kept = {name: value for name, value in arguments.items() if name not in _OF_A_RUN}
    return {
        **kept,
        "limit_val_batches": 0 if arguments.get("limit_val_batches") == 0 else 1,
        "num_sanity_val_steps": 0,
        "logger": CSVLogger(folder),
        "default_root_dir": folder,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }


_MIN_BATCHES, _MAX_BATCHES, _STEPS = 8, 40, 4


@dataclass
class ProbeResult:
    """Observations from a few training steps."""

    batches: int = 0
    steps: int = 0  # optimizer steps counted by Lightning
    optimizers: int = 1
    optimizer_steps: int = 0  # optimizer steps counted by hooks
    backward_passes: int = 0  # backward passes that Lightning noticed
    clock: Clock | None = None
    gates: dict[str, Any] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)  # gates that ran
    untrained: list[str] = field(default_factory=list)  # gates that no optimizer holds
    # callback -> targets that are no longer in the module
    dead: dict[str, list[str]] = field(default_factory=dict)
    # gate -> gradient norms of the loss and of the penalties
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict)
    no_gradients: str | None = None  # why gradients could not be measured
    # layer -> first step after which a missing weight was not 0
    not_zero: dict[str, int] = field(default_factory=dict)
    whole_net: WholeNet | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def seconds_per_batch(self) -> float:
        """The median seconds per batch, without the first two batches."""
        return median(self.seconds[2:] or self.seconds or [math.nan])


class FirstProbe(pl.Callback):
    """Records before all other callbacks act."""

    def __init__(self, seen: ProbeResult) -> None:
        self.seen = seen
        self.loss_gradients: list[Tensor | None] = []
        self._count: FlopRecorder | None = None
        self._samples = 0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.seen.batches == 0:
            try:
                self._samples = extract_batch_size(batch)
            except MisconfigurationException:  # a custom batch class
                return
            self._count = FlopRecorder(pl_module)
            self._count.__enter__()

    def stop_counting(self) -> None:
        """Stop counting FLOPs after the forward pass."""
        if self._count is not None:
            self._count.__exit__(None, None, None)
            self.seen.whole_net = self._count.result(self._samples)
            self._count = None

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self.stop_counting()
        self.seen.backward_passes += 1
        for gate in self.seen.gates.values():
            shared_state(trainer, gate).phase_factor = 1.0  # skip a first phase without penalty
        self.loss_gradients = gradients_of(loss, self.seen)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.stop_counting()


def gate_parameters(seen: ProbeResult) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters of gates, with the names of the gates."""
    gates = [(n, gate) for n, gate in seen.gates.items() if isinstance(gate, nn.Module)]
    return [(name, p) for name, gate in gates for p in gate.parameters() if p.requires_grad]


def gradients_of(loss: Tensor, seen: ProbeResult) -> list[Tensor | None]:
    """Return a loss's gradients for the gate parameters, in the first batch only."""
    parameters = [parameter for _, parameter in gate_parameters(seen)]
    if not parameters or seen.batches or seen.no_gradients or loss.grad_fn is None:
        return []
    try:
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    except RuntimeError as error:  # for example, checkpoint(use_reentrant=True) or compiled code
        seen.no_gradients = str(error).partition("\n")[0]
        return []
    return list(found)


class LastProbe(pl.Callback):
    """Records after all other callbacks have acted."""

    def __init__(self, seen: ProbeResult, before: FirstProbe) -> None:
        self.seen = seen
        self.before = before
        self._sparse: list[Any] = []
        self._module: Any = None
        self._watched: list[Any] = []
        self._depth = 0
        self._started = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        seen = self.seen
        ours = [callback for callback in trainer.callbacks if is_ours(callback)]  # type: ignore[attr-defined]
        seen.clock = Clock.from_trainer(trainer)
        seen.gates = dict(gate_layers(pl_module, required=False))
        seen.optimizers = len(trainer.optimizers)
        held = {id(p) for o in trainer.optimizers for g in o.param_groups for p in g["params"]}
        unheld = [name for name, p in gate_parameters(seen) if id(p) not in held]
        seen.untrained = list(dict.fromkeys(unheld))
        live = set(pl_module.modules())
        for callback in ours:
            gone = [name for name, module in targets(callback).items() if module not in live]
            if gone:
                seen.dead[type(callback).__name__] = gone
        self._sparse = [callback for callback in ours if hasattr(callback, "connections")]
        self._module = pl_module
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(self._begin_step)
            optimizer.register_step_post_hook(self._end_step)

    def _begin_step(self, *_: Any) -> None:
        self._depth += 1  # a step may call the step of its parent class

    def _end_step(self, *_: Any) -> None:
        self._depth -= 1
        self.seen.optimizer_steps += self._depth == 0

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        if optimizer not in self._watched:  # registered late, to run after all other hooks
            self._watched.append(optimizer)
            optimizer.register_step_post_hook(self._look_at_weights)

    @torch.no_grad()
    def _look_at_weights(self, *_: Any) -> None:
        """Check that missing connections are 0 in the weights that the forward pass uses."""
        live = {id(module) for module in self._module.modules()}
        for callback in self._sparse:
            for name, sparse in callback.connections.items():
                weight, holes = sparse.layer.weight, ~sparse.mask
                holds = weight.shape == holes.shape and bool((weight[holes] == 0).all())
                if not holds or id(sparse.layer) not in live:
                    self.seen.not_zero.setdefault(name, self.seen.optimizer_steps)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._recorded = {name: gate.probability for name, gate in self.seen.gates.items()}
        self._started = time.perf_counter()

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        together = gradients_of(loss, self.seen)
        for (name, _), total, own in zip(
            gate_parameters(self.seen), together, self.before.loss_gradients, strict=False
        ):
            zero = torch.zeros(())
            own = zero if own is None else own
            added = (zero if total is None else total) - own
            old = self.seen.gradients.get(name, (0.0, 0.0))
            norms = (float(own.norm()) / scale, float(added.norm()) / scale)
            self.seen.gradients[name] = (math.hypot(old[0], norms[0]), math.hypot(old[1], norms[1]))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        seen = self.seen
        self.before.stop_counting()
        seen.seconds.append(time.perf_counter() - self._started)
        gates = seen.gates.items()
        seen.ran |= {name for name, g in gates if g.probability is not self._recorded[name]}
        seen.batches += 1
        seen.steps = trainer.global_step
        enough = seen.batches >= _MIN_BATCHES and seen.steps >= _STEPS * seen.optimizers
        if enough or seen.batches >= _MAX_BATCHES:
            trainer.should_stop = True


def run_steps(
    copies: Copies,
    data: Any,
    arguments: dict[str, Any],
    seen: ProbeResult,
    save: Path | None = None,
) -> None:
    """Run a few training steps that write only to a temporary folder.

    Args:
        copies: Copies of the model and its callbacks.
        data: A DataModule or a loader.
        arguments: Arguments of the Trainer.
        seen: The record to fill.
        save: Where to save a checkpoint at the end. If None, no checkpoint is saved.
    """
    before = FirstProbe(seen)
    with tempfile.TemporaryDirectory() as folder, torch.compiler.set_stance("force_eager"):
        trainer = pl.Trainer(
            **own_settings(arguments, folder),
            callbacks=[before, *copies.callbacks, LastProbe(seen, before)],
            devices=1,
        )
        trainer.fit(copies.model, data)
        if save is not None:
            trainer.save_checkpoint(save)
