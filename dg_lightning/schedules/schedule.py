"""Schedules: immutable descriptions of a value as a function of the optimizer step.

A duration is a number of optimizer steps (int), a fraction of training (float), or a string
(``"3 epochs"``, ``"600 steps"``). It is resolved against a `Clock` once, when training starts.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_info

from dg_lightning.arguments import as_dataclass, check_fields

__all__ = [
    "Clock",
    "Duration",
    "Schedule",
    "ScheduledValue",
    "Shape",
    "ValueAt",
    "as_schedule",
    "check_duration",
]

Duration: TypeAlias = int | float | str
Shape: TypeAlias = Literal["linear", "cosine", "quadratic", "exponential", "step"]
ValueAt: TypeAlias = Callable[[int], float]

_WORDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(steps?|epochs?|%)\s*")
_UNKNOWN = {
    "training": "the training has no known end",
    "epoch": "the data has no length",
}


@dataclass(frozen=True)
class Clock:
    """Length of a training run in optimizer steps.

    Args:
        total_steps: Optimizer steps of the whole run; None if it has no known end.
        steps_per_epoch: Optimizer steps per epoch; None if the data has no length.
        assumed: Whether both rest on the assumption that every batch is a step of every optimizer,
            as in manual optimization.

    >>> Clock(1000, 100).steps("3 epochs"), Clock(1000).steps(0.25), Clock(1000).steps(40)
    (300, 250, 40)
    """

    total_steps: int | None
    steps_per_epoch: int | None = None
    assumed: bool = False

    @classmethod
    def from_trainer(cls, trainer: Any) -> "Clock":
        """Create the clock of a Trainer that is about to fit."""
        estimated = trainer.estimated_stepping_batches
        total = int(estimated) if 0 < estimated < math.inf else None
        batches = trainer.num_training_batches
        per_epoch = None
        if batches and not math.isinf(batches):
            per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
        module = getattr(trainer, "lightning_module", None)
        if module is None or module.automatic_optimization:
            return cls(total, per_epoch)
        # Lightning counts the steps of every optimizer, but estimates one per batch.
        optimizers = max(1, len(trainer.optimizers))
        assumed = trainer.max_steps == -1
        if assumed and total is not None:
            total *= optimizers
        return cls(total, per_epoch and per_epoch * optimizers, assumed)

    def steps(self, duration: Duration, name: str = "duration") -> int:
        """Return a duration in optimizer steps; `name` is the argument that it was given as."""
        check_duration(name, duration)
        if isinstance(duration, int):
            return duration
        number, unit = _parse(duration)
        if unit == "step":
            return round(number)
        length = self.total_steps if unit == "training" else self.steps_per_epoch
        if length is None:
            raise ValueError(
                f"`{name}` is {duration!r}, and {_UNKNOWN[unit]}: write it in steps ('600 steps')"
                + (", or set `max_steps` of the Trainer." if unit == "training" else ".")
            )
        if self.assumed:
            rank_zero_info(
                f"`{name}: {duration}` assumes one step of every optimizer in each batch, "
                f"{self.total_steps or 'any number of'} steps in all. If `training_step` steps "
                "less often, set `max_steps` of the Trainer to the number of its steps."
            )
        return round(number * length)

    def end_of_epoch(self, step: int) -> int:
        """Return the number of steps at the end of the epoch that contains `step`."""
        if self.steps_per_epoch is None:
            raise ValueError(
                "`staircase: epoch` cannot be followed, because the data has no length."
            )
        return (step // self.steps_per_epoch + 1) * self.steps_per_epoch


def check_duration(name: str, duration: Duration) -> None:
    """Raise a ValueError if `duration` is not a valid duration."""
    if isinstance(duration, str):
        number, unit = _parse(duration)
        valid = number >= 0 and not (unit == "training" and number > 1)
    elif isinstance(duration, float):
        valid = 0 <= duration <= 1
    else:
        valid = isinstance(duration, int) and not isinstance(duration, bool) and duration >= 0
    if not valid:
        raise ValueError(
            f"`{name}` must be a number of steps (an int), a fraction of training (a float from 0 "
            f"to 1), or words like '3 epochs', '600 steps' and '40 %', got {duration!r}."
        )


def _parse(duration: float | str) -> tuple[float, Literal["step", "epoch", "training"]]:
    """Return the number and the unit of a duration; the number is -1 for unknown words."""
    if not isinstance(duration, str):
        return duration, "training"
    match = _WORDS.fullmatch(duration)
    if match is None:
        return -1.0, "training"
    number = float(match[1])
    if match[2] == "%":
        return number / 100, "training"
    return number, "step" if match[2].startswith("step") else "epoch"


@dataclass(frozen=True)
class Schedule:
    """A value that changes from `start` to `end` during training.

    Args:
        start: Value at `begin`.
        end: Value from `until` on.
        shape: Curve between them; `quadratic` starts slowly, `exponential` changes by a constant
            factor per step, `step` jumps to `end` at `begin`.
        begin: Start of the change, i.e. the length of the warmup.
        until: End of the change.
        before: Value during the warmup; None means `start`.
        staircase: `epoch` holds the end-of-epoch value through each epoch, as in algorithm 1 of
            the paper.

    >>> ramp = Schedule(0.0, 1.0, begin="2 epochs", until=1.0, staircase="epoch")
    >>> [ramp.resolve(Clock(50, 10))(step) for step in (0, 10, 20, 30, 49)]
    [0.0, 0.0, 0.3333333333333333, 0.6666666666666666, 1.0]
    """

    start: float
    end: float
    shape: Shape = "linear"
    begin: Duration = 0
    until: Duration = 1.0
    before: float | None = None
    staircase: Literal["epoch"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.shape == "exponential" and not self.start * self.end > 0:
            raise ValueError(
                "An exponential schedule needs a start and an end above 0, got "
                f"{self.start} and {self.end}: begin with a small value, and set `before: 0`."
            )
        check_duration("begin", self.begin)
        check_duration("until", self.until)

    def resolve(self, clock: Clock) -> ValueAt:
        """Return the value as a function of the optimizer step."""
        if self.start == self.end and self.before in (None, self.start):
            return ScheduledValue(self, clock, 0, 0)  # a constant needs no clock
        begin, until = clock.steps(self.begin, "begin"), 0
        if self.shape != "step":
            until = clock.steps(self.until, "until")
            if until < begin:
                raise ValueError(
                    f"A schedule must end after it begins, got begin {self.begin!r} (step {begin}) "
                    f"and until {self.until!r} (step {until})."
                )
        return ScheduledValue(self, clock, begin, until)

    def interpolate(self, progress: float) -> float:
        """Return the value at a share of the way from `start` to `end`."""
        if self.shape == "exponential":
            return float(self.start * (self.end / self.start) ** progress)
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        elif self.shape == "quadratic":
            progress = progress**2
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class ScheduledValue:
    """A schedule that knows the steps of its training run: a value for each optimizer step."""

    schedule: Schedule
    clock: Clock
    begin: int
    until: int

    def __call__(self, step: int) -> float:
        """Return the value at a step."""
        schedule = self.schedule
        if self.begin == self.until == 0:
            return schedule.end
        in_warmup = step < self.begin
        if schedule.staircase is not None:  # the epoch that ends with the warmup is part of it
            step = self.clock.end_of_epoch(step)
            in_warmup = step <= self.begin
        if in_warmup:
            return schedule.start if schedule.before is None else schedule.before
        if schedule.shape == "step" or step >= self.until:
            return schedule.end
        return schedule.interpolate((step - self.begin) / (self.until - self.begin))


def as_schedule(name: str, value: "float | Schedule | dict[str, Any]") -> Schedule:
    """Convert a schedule, a dict of its arguments, or a constant to a `Schedule`.

    >>> as_schedule("weight", 0.5).resolve(Clock(10))(3)
    0.5
    """
    if isinstance(value, Schedule | dict):
        return as_dataclass(name, value, Schedule)
    return Schedule(value, value)
