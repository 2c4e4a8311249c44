"""Copies of a model and its callbacks, which act at once and save nothing."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
)
from lightning.pytorch.loggers import CSVLogger

from dg_lightning.callbacks import SET, BudgetController, GatePenalty, MagnitudePruning, RigL
from dg_lightning.schedules import Schedule

__all__ = ["Copies", "hasten", "is_ours", "own_settings", "taking_part", "targets"]

# Settings of a Trainer that a check has its own for.
_OF_A_RUN = frozenset({
    "barebones", "callbacks", "default_root_dir", "devices", "enable_checkpointing",
    "enable_model_summary", "enable_progress_bar", "fast_dev_run", "limit_val_batches", "logger",
    "min_epochs", "min_steps", "num_nodes", "num_sanity_val_steps", "profiler", "strategy",
})  # fmt: skip
_LEFT_OUT = (BatchSizeFinder, Checkpoint, LearningRateFinder, ModelSummary, ProgressBar)


def is_ours(callback: Any) -> bool:
    """Return True for a callback of this package, or one that derives from it."""
    return any(k.__module__.startswith("dg_lightning.callbacks.") for k in type(callback).__mro__)


def targets(callback: Any) -> dict[str, Any]:
    """Return the gates or layers that one of our callbacks acts on, by name."""
    if hasattr(callback, "term"):
        return dict(callback.term.gates)
    if hasattr(callback, "connections"):
        return {name: sparse.layer for name, sparse in callback.connections.items()}
    return dict(vars(callback).get("_gates") or vars(callback).get("_routers") or {})


def taking_part(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks that neither save checkpoints, nor print, nor search for settings."""
    return [callback for callback in callbacks if not isinstance(callback, _LEFT_OUT)]


def hasten(callbacks: Sequence[Any]) -> None:
    """Let callbacks act within the first steps."""
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
    """Copies of a model and of the callbacks that take part, made together.

    Args:
        model: The model.
        callbacks: The callbacks of its Trainer.
        without_ours: Whether to leave our callbacks out.
    """

    def __init__(
        self, model: pl.LightningModule, callbacks: Sequence[Any], without_ours: bool = False
    ) -> None:
        some = [c for c in taking_part(callbacks) if not (without_ours and is_ours(c))]
        self.model, self.callbacks = copy.deepcopy((model, some))


def own_settings(arguments: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the settings of a Trainer that leaves nothing behind."""
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
