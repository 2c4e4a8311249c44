"""Which steps of a training are logged: to log costs more than many a thing that is computed."""

from typing import Any

__all__ = ["forget_logged", "logged_step", "logs_now"]

_OURS = ("gates/", "collapse/", "rewire/", "train/loss", "train/task_loss", "train/aux_loss")


def logged_step(trainer: Any) -> int:
    """Return the step under which Lightning logs what is logged now."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def logs_now(trainer: Any) -> bool:
    """Tell whether what is logged in this batch of a training is seen by a logger."""
    # The Trainer's own answer (`should_update_logs`), without asking which of its loops is running.
    loop, interval = trainer.fit_loop.epoch_loop, trainer.log_every_n_steps
    if loop.batch_idx <= 0:
        return True
    return bool(interval) and (
        (loop._batches_that_stepped + 1) % interval == 0 or trainer.should_stop
    )


def forget_logged(trainer: Any) -> None:
    """Take our values of the step before out of Lightning's results if loggers have seen them.

    Call it before a batch. Lightning keeps the values of a step and goes over all of them in every
    later one, about 10 µs for each: with all our callbacks a tenth of a small step.
    """
    loop, interval = trainer.fit_loop.epoch_loop, trainer.log_every_n_steps
    stepped: int = loop._batches_that_stepped
    # Where every step is logged there is none to go without.
    if interval < 2 or stepped == 0 or stepped % interval:
        return
    for metric in (trainer._results or {}).values():
        meta = metric.meta
        if meta.on_step and not meta.on_epoch and meta.name.startswith(_OURS):
            metric.has_reset = True
