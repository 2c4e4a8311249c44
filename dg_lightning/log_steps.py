"""Which steps of a training are logged: to log costs more than many a thing that is computed."""

from typing import Any

__all__ = ["logged_step", "logs_now"]


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
