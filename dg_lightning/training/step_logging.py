"""Values and random generators at the level of optimizer steps and loaders."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

_LOGGED: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()  # epochs of keys, by Trainer


def log_step(pl_module: Any, values: Mapping[str, Tensor | float], *, always: bool = False) -> None:
    """Log the current values of a callback, in the steps that Lightning logs.

    To be called from hooks of a training batch, in every step. Loggers get a complete row in each
    logged step. A key is logged once in every epoch, so that it can be monitored. With `always`,
    values that are new reach `callback_metrics` in other steps too.
    """
    trainer = pl_module.trainer
    seen, epoch = _LOGGED.setdefault(trainer, {}), trainer.current_epoch
    every = always or is_logged_step(trainer)
    for key, value in values.items():
        if every or seen.get(key) != epoch:
            pl_module.log(key, value.detach() if isinstance(value, Tensor) else value)
            seen[key] = epoch


def is_due(trainer: Any, key: str) -> bool:
    """Return True if this step is logged, or the key has not been logged in this epoch."""
    seen = _LOGGED.get(trainer, {}).get(key) == trainer.current_epoch
    return not seen or is_logged_step(trainer)


def is_logged_step(trainer: Any) -> bool:
    """Return True in the first batch of an epoch, and in steps that are handed to loggers."""
    interval = trainer.log_every_n_steps
    is_due = interval and (logged_step(trainer) + 1) % interval == 0
    return bool(is_due or trainer.should_stop or trainer.fit_loop.batch_idx <= 0)


def logged_step(trainer: Any) -> int:
    """Return the step under which Lightning logs what is logged now."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def loader_generators(loaders: Any) -> list[torch.Generator]:
    """Return the generators that torch loaders and their samplers were given, each once."""
    found: list[torch.Generator] = []
    for loader in CombinedLoader([] if loaders is None else loaders).flattened:
        if isinstance(loader, DataLoader):
            inner = getattr(loader.batch_sampler, "sampler", None)
            for holder in (loader, loader.sampler, loader.batch_sampler, inner):
                generator = getattr(holder, "generator", None)
                if isinstance(generator, torch.Generator) and generator not in found:
                    found.append(generator)
    return found
