"""Which step of a training it is, and which are logged: to log costs more than many a figure."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "forget_logged",
    "is_logged",
    "log_figures",
    "log_of_step",
    "logged_step",
    "logs_now",
    "step_counter",
    "steps_done",
]

_OURS = ("gates/", "collapse/")  # keys of callbacks


def steps_done(trainer: Any, pl_module: Any) -> int:
    """Return the Trainer's `global_step`, for hooks of every step: without seven calls."""
    done: int = step_counter(trainer, pl_module).completed
    return done


def step_counter(trainer: Any, pl_module: Any) -> Any:
    """Return what counts the steps of a training, in `completed`; it stays the same all along."""
    loop = trainer.fit_loop.epoch_loop
    if pl_module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step.total
    return loop.manual_optimization.optim_step_progress.total


def logged_step(trainer: Any) -> int:
    """Return the step under which Lightning logs what is logged now."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def logs_now(trainer: Any) -> bool:
    """Tell whether what is logged in this batch of a training is of use.

    To a logger, or in the first batch of an epoch to those who monitor it.
    """
    # The Trainer's own answer (`should_update_logs`), without asking which of its loops is running.
    loop, interval = trainer.fit_loop.epoch_loop, trainer.log_every_n_steps
    if loop.batch_idx <= 0:
        return True
    return bool(interval) and (
        (loop._batches_that_stepped + 1) % interval == 0 or trainer.should_stop
    )


def log_of_step(pl_module: Any, key: str, value: Tensor | float) -> None:
    """Log a value of one step, as `pl_module.log(key, value)` does.

    That looks at every attribute of what it keeps of a key each time, about 0.5 ms; here it is done
    once an epoch. For hooks of a training batch, and values of one entry.
    """
    trainer = pl_module.trainer
    name, results = f"{pl_module._current_fx_name}.{key}", trainer._results
    known = None if results is None else results.get(name)
    # In the first batch Lightning forgets the last epoch, hook by hook.
    first = trainer._logger_connector._first_loop_iter is not False
    own_way = type(pl_module).log.__qualname__ != "LightningModule.log"
    if known is None or known.meta.on_epoch or first or own_way:
        pl_module.log(key, value)
        return
    if not isinstance(value, Tensor):
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        value = torch.tensor(value, dtype=dtype, device=pl_module.device)
    results.update_metrics(name, value.detach(), batch_size=1)


def is_logged(trainer: Any, pl_module: Any) -> bool:
    """Tell whether Lightning hands values of single steps to the loggers when this batch ends."""
    if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
        return False
    return bool(trainer._logger_connector.should_update_logs or trainer.fast_dev_run)


def log_figures(trainer: Any, figures: Mapping[str, float], *, to_loggers: bool) -> None:
    """Leave many figures for those who monitor them, and hand them to the loggers.

    There they are a row of their own, as those of Lightning's own monitors. `log_of_step` costs
    50 µs for each.
    """
    values = torch.tensor(list(figures.values())).unbind()  # one for all: each costs its time
    # Not by the Trainer's properties, which compute everything that was logged anew.
    connector = trainer._logger_connector
    connector._callback_metrics.update(zip(figures, values, strict=True))
    if to_loggers:
        connector._logged_metrics.update(zip(figures, values, strict=True))
        row = {**figures, "epoch": trainer.current_epoch}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=logged_step(trainer))


def forget_logged(trainer: Any, *more: str) -> None:
    """Take values of the step before out of Lightning's results if loggers have seen them.

    Those of callbacks, and of keys that begin with what is given.
    Call it when a batch starts, before anything is logged. Lightning keeps the values of a step and
    goes over all of them in every later one, about 10 µs for each: with all our callbacks a tenth
    of a small step.
    """
    loop, interval = trainer.fit_loop.epoch_loop, trainer.log_every_n_steps
    stepped: int = loop._batches_that_stepped
    # Where every step is logged there is none to go without.
    if interval < 2 or stepped == 0 or stepped % interval or trainer.should_stop:
        return
    if loop.batch_idx <= 0:  # in which callbacks log, see `logs_now`, and the last epoch is gone
        return
    for metric in (trainer._results or {}).values():
        meta = metric.meta
        if meta.on_step and not meta.on_epoch and meta.name.startswith((*_OURS, *more)):
            metric.has_reset = True
