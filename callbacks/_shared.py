"""Helpers for callbacks: averages over ranks, conflict checks and deferred state."""

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.gates.protocol import gate_layers
from dg_lightning.rewiring import SparseLayer
from dg_lightning.surgery.gating import is_sharded


def state_key(callback: object, **arguments: object) -> str:
    """Return a callback's checkpoint key, which includes the given arguments."""
    return f"{type(callback).__qualname__}{arguments!r}"


def mean_over_ranks(trainer: Any, value: Tensor) -> Tensor:
    """Return the mean of a value over all ranks, so that they all make the same decision."""
    if trainer.world_size == 1:
        return value
    mean: Tensor = trainer.strategy.reduce(value.clone(), reduce_op="mean")
    return mean


def named_part(callback: object, pl_module: nn.Module, name: str) -> nn.Module:
    """Return the part of a LightningModule that a callback's `submodule` names."""
    try:
        return pl_module.get_submodule(name)
    except AttributeError as error:
        parts = ", ".join(child for child, _ in pl_module.named_children())
        raise ValueError(
            f"`submodule` of {type(callback).__name__} must name a submodule of "
            f"{type(pl_module).__name__} ({parts}), got {name!r}."
        ) from error


def check_equal_masks(trainer: Any, layers: Iterable[SparseLayer]) -> None:
    """Raise RuntimeError if ranks have different masks."""
    if trainer.world_size == 1:
        return
    own = [layer.checksum() for layer in layers]
    every: list[list[int]] = [[]] * trainer.world_size
    dist.all_gather_object(every, own)
    if any(other != own for other in every):
        raise RuntimeError(
            "Processes have different connections, because their weights or gradients differ: "
            "check for hooks that change gradients on only some processes."
        )


def check_whole_weights(callback: Any, trainer: Any, module: nn.Module) -> None:
    """Reject sharded weights."""
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    sharding = any(k.startswith(("FSDP", "DeepSpeed", "ModelParallel")) for k in kinds)
    if sharding or is_sharded(module):
        raise ValueError(
            f"{type(callback).__name__} needs whole weights on every process, but {kinds[0]} "
            "shards them: use strategy='ddp' or a single device."
        )


def check_no_other_masks(callback: Any, trainer: Any, module: nn.Module) -> None:
    """Reject other callbacks that prune the same layers."""
    name = type(callback).__name__
    own = callback.find_layers(module)
    for other in trainer.callbacks:
        # Compared by name, because `lightning` and `pytorch_lightning` each have a ModelPruning.
        if "ModelPruning" in [kind.__name__ for kind in type(other).__mro__]:
            raise ValueError(
                f"{name} and Lightning's ModelPruning both decide which weights are 0: remove one. "
                f"To prune layers that {name} does not, use MagnitudePruning with `layers`."
            )
        if other is callback or not hasattr(other, "set_initial_masks"):
            continue
        if shared := set(own) & set(other.find_layers(module)):
            raise ValueError(
                f"{name} and {type(other).__name__} both make {min(shared)} sparse: give them "
                "disjoint `layers`."
            )


def check_step_counting(callback: Any, trainer: Any, module: Any) -> None:
    """Reject optimizer steps that bypass Lightning in manual optimization."""
    if module.automatic_optimization:
        return
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        if trainer.training and progress.ready == progress.completed:
            raise RuntimeError(
                f"{type(callback).__name__} counts optimizer steps, but this step bypasses "
                "Lightning: in `training_step`, call `step()` on an optimizer from "
                "`self.optimizers()`, without `use_pl_optimizer=False`."
            )

    for optimizer in trainer.optimizers:
        optimizer.register_step_post_hook(refuse)


def check_single_penalty(callback: Any, trainer: Any) -> None:
    """Reject two penalties that control the same gates or log the same keys."""
    for other in trainer.callbacks:
        if other is callback or not hasattr(getattr(other, "term", None), "gates"):
            continue
        names = f"{type(callback).__name__} and {type(other).__name__}"
        shared = [name for name in callback.term.gates if name in other.term.gates]
        if shared and (hasattr(callback, "budget") or hasattr(other, "budget")):
            raise ValueError(
                f"{names} both penalise {shared[0]}: remove one, or give them disjoint `layers`."
            )
        if callback.name == other.name:
            had = "no `name`" if callback.name is None else f"the name {callback.name!r}"
            raise ValueError(
                f"{names} both have {had}: give each a different `name`, because it is part of its "
                "logged keys."
            )


def check_single_writer(callback: Any, trainer: Any, module: Any) -> None:
    """Reject a second callback that sets the same number of the same gates."""
    own = gate_layers(module, callback.layers)
    for other in trainer.callbacks:
        both = callback.writes & getattr(other, "writes", set())
        if other is callback or not both:
            continue
        if shared := [name for name in gate_layers(module, other.layers) if name in own]:
            names = " and ".join(sorted({type(callback).__name__, type(other).__name__}))
            raise ValueError(
                f"Two callbacks ({names}) set the {min(both)} of {shared[0]}: give them disjoint "
                "`layers`."
            )


class DeferredStateCallback(pl.Callback):
    """Base class that restores state only once training starts and the gates are known.

    Lightning loads callback state before `on_fit_start`, but a learning-rate search loads it later.
    A checkpoint that is saved before training starts contains the state that was loaded.
    """

    _loaded: dict[str, Any] | None = None

    def current_state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        raise NotImplementedError

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `current_state` returned."""
        raise NotImplementedError

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._loaded = None  # may be left over from a test or from a run that failed to start

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.current_state() if self._loaded is None else self._loaded

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._loaded is not None:
            self.restore(self._loaded)
            self._loaded = None
