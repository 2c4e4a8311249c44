"""Log values by optimizer step, and find the random generators that loaders use."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

# Trainer -> key -> epoch in which the key was last logged
_LOGGED: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def log_step(pl_module: Any, values: Mapping[str, Tensor | float], *, always: bool = False) -> None:
    """Log a callback's current values in the steps that Lightning logs.

    Call this function in every step, from a hook for training batches. Loggers then get a complete
    row in each logged step. Each key is logged at least once per epoch, so that it can be
    monitored. With `always`, new values reach `callback_metrics` in the other steps too.
    """
    trainer = pl_module.trainer
    seen, epoch = _LOGGED.setdefault(trainer, {}), trainer.current_epoch
    every = always or is_logged_step(trainer)
    for key, value in values.items():
        if every or seen.get(key) != epoch:
            pl_module.log(key, value.detach() if isinstance(value, Tensor) else value)
            seen[key] = epoch


def is_due(trainer: Any, key: str) -> bool:
    """Return True if this step is logged, or the key is new in this epoch."""
    seen = _LOGGED.get(trainer, {}).get(key) == trainer.current_epoch
    return not seen or is_logged_step(trainer)


def is_logged_step(trainer: Any) -> bool:
    """Return True in an epoch's first batch, and in steps that reach the loggers."""
    interval = trainer.log_every_n_steps
    is_due = interval and (logged_step(trainer) + 1) % interval == 0
    return bool(is_due or trainer.should_stop or trainer.fit_loop.batch_idx <= 0)


def logged_step(trainer: Any) -> int:
    """Return the step number that Lightning uses for logging."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def loader_generators(loaders: Any) -> list[torch.Generator]:
    """Return the distinct random generators of torch loaders and their samplers."""
    found: list[torch.Generator] = []
    for loader in CombinedLoader([] if loaders is None else loaders).flattened:
        if isinstance(loader, DataLoader):
            inner = getattr(loader.batch_sampler, "sampler", None)
            for holder in (loader, loader.sampler, loader.batch_sampler, inner):
                generator = getattr(holder, "generator", None)
                if isinstance(generator, torch.Generator) and generator not in found:
                    found.append(generator)
    return found
