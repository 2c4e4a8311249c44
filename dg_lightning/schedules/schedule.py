"""Immutable schedules, which define a value at each optimizer step.

A duration is a number of optimizer steps, or text such as ``"30%"``, ``"3 epochs"`` or
``"600 steps"``. When training starts, a `Clock` converts durations to optimizer steps.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_info

from dg_lightning.arguments import as_dataclass, check_fields, warn_of_fraction

Duration: TypeAlias = int | float | str
Shape: TypeAlias = Literal["linear", "cosine", "quadratic", "exponential", "step"]
ValueAt: TypeAlias = Callable[[int], float]

_WORDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(steps?|epochs?|%)\s*")
_UNKNOWN = {
    "training": "the training run has no known end",
    "epoch": "the data has no length",
}


@dataclass(frozen=True)
class Clock:
    """Length of a training run in optimizer steps.

    Args:
        total_steps: Optimizer steps in the whole run; None if its end is unknown.
        steps_per_epoch: Optimizer steps per epoch; None if the data has no length.
        assumed: Whether these numbers assume that every optimizer steps once per batch, which is
            the default for manual optimization.

    >>> Clock(1000, 100).steps("3 epochs"), Clock(1000).steps(0.25), Clock(1000).steps(40)
    (300, 250, 40)
    """

    total_steps: int | None
    steps_per_epoch: int | None = None
    assumed: bool = False

    @classmethod
    def from_trainer(cls, trainer: Any) -> "Clock":
        """Create a clock from a Trainer at the start of `fit`.

        If epochs have different lengths, as in `TaskSequence`, steps per epoch are a mean.
        """
        estimated = trainer.estimated_stepping_batches
        total = int(estimated) if 0 < estimated < math.inf else None
        batches = trainer.num_training_batches
        per_epoch = None
        if by_epoch := _steps_by_epoch(trainer):
            # Lightning's estimate takes the current epoch's length for all.
            total, per_epoch = sum(by_epoch), round(sum(by_epoch) / len(by_epoch))
            total = total if trainer.max_steps == -1 else min(total, trainer.max_steps)
        elif batches and not math.isinf(batches):
            per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
        module = getattr(trainer, "lightning_module", None)
        if module is None or module.automatic_optimization:
            return cls(total, per_epoch)
        # Lightning counts the steps of every optimizer, but its estimate is one step per batch.
        optimizers = max(1, len(trainer.optimizers))
        assumed = trainer.max_steps == -1
        if assumed and total is not None:
            total *= optimizers
        return cls(total, per_epoch and per_epoch * optimizers, assumed)

    def steps(self, duration: Duration, name: str = "duration") -> int:
        """Convert a duration to optimizer steps. Error messages refer to it as `name`."""
        _check_duration(name, duration)
        if isinstance(duration, int):
            return duration
        number, unit = _parse(duration)
        if unit == "step":
            return round(number)
        length = self.total_steps if unit == "training" else self.steps_per_epoch
        if length is None:
            raise ValueError(
                f"`{name}` is {duration!r}, but {_UNKNOWN[unit]}: set it in steps ('600 steps')"
                + (", or set the Trainer's `max_steps`." if unit == "training" else ".")
            )
        if self.assumed:
            rank_zero_info(
                f"`{name}: {duration}` assumes that every optimizer steps once per batch, "
                f"{self.total_steps or 'any number of'} steps in total. If `training_step` steps "
                "less often, set the Trainer's `max_steps` to the number of optimizer steps."
            )
        return round(number * length)

    def end_of_epoch(self, step: int) -> int:
        """Return the step at which the epoch that contains `step` ends."""
        if self.steps_per_epoch is None:
            raise ValueError(
                "`staircase: epoch` needs data with a known length: remove `staircase`."
            )
        return (step // self.steps_per_epoch + 1) * self.steps_per_epoch


def _steps_by_epoch(trainer: Any) -> list[int]:
    """Return the optimizer steps of each epoch if the data knows them, or an empty list."""
    data: Any = getattr(trainer, "datamodule", None)
    if not hasattr(data, "batches_by_epoch") or not trainer.max_epochs or trainer.max_epochs < 0:
        return []
    limit = trainer.limit_train_batches
    batches = [
        min(count, limit) if isinstance(limit, int) else int(count * limit)
        for count in data.batches_by_epoch(trainer.max_epochs)
    ]
    return [math.ceil(count / trainer.accumulate_grad_batches) for count in batches]


def check_duration(name: str, duration: Duration) -> None:
    """Raise a ValueError if `duration` is invalid, and warn if it is a float."""
    _check_duration(name, duration)
    if isinstance(duration, float):
        warn_of_fraction(name, duration, stacklevel=4)


def _check_duration(name: str, duration: Duration) -> None:
    if isinstance(duration, str):
        number, unit = _parse(duration)
        valid = number >= 0 and not (unit == "training" and number > 1)
    elif isinstance(duration, float):
        valid = 0 <= duration <= 1
    else:
        valid = isinstance(duration, int) and not isinstance(duration, bool) and duration >= 0
    if not valid:
        raise ValueError(
            f"`{name}` must be a number of steps, or text such as '30%', '3 epochs' or "
            f"'600 steps', got {duration!r}."
        )


def _parse(duration: float | str) -> tuple[float, Literal["step", "epoch", "training"]]:
    """Return the number and the unit of a duration, or -1 as the number for invalid text."""
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
        end: Value from `until` onwards.
        shape: Curve between `start` and `end`. `quadratic` starts slowly, `exponential` changes by
            a constant factor per step, and `step` jumps to `end` at `begin`.
        begin: When the change starts, which is also the length of the warmup.
        until: When the change ends. The shape `step` ignores this.
        before: Value during the warmup. None means `start`.
        staircase: `epoch` keeps the value constant within each epoch, at the value that the epoch
            ends with, as in algorithm 1 of the paper.

    >>> ramp = Schedule(0.0, 1.0, begin="2 epochs", until="100%", staircase="epoch")
    >>> [ramp.resolve(Clock(50, 10))(step) for step in (0, 10, 20, 30, 49)]
    [0.0, 0.0, 0.3333333333333333, 0.6666666666666666, 1.0]
    """

    start: float
    end: float
    shape: Shape = "linear"
    begin: Duration = 0
    until: Duration = "100%"
    before: float | None = None
    staircase: Literal["epoch"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.shape == "exponential" and not self.start * self.end > 0:
            raise ValueError(
                "An exponential schedule needs a nonzero `start` and `end` with the same sign, got "
                f"{self.start} and {self.end}: start from a small value, and set `before: 0`."
            )
        check_duration("begin", self.begin)
        check_duration("until", self.until)

    def resolve(self, clock: Clock) -> ValueAt:
        """Return a function that maps optimizer steps to values."""
        if self.start == self.end and self.before in (None, self.start):
            return ScheduledValue(self, clock, 0, 0)  # a constant needs no clock
        begin, until = clock.steps(self.begin, "begin"), 0
        if self.shape != "step":
            until = clock.steps(self.until, "until")
            if until < begin:
                raise ValueError(
                    f"`until` must not be before `begin`, got {self.until!r} (step {until}) as "
                    f"`until` and {self.begin!r} (step {begin}) as `begin`."
                )
        return ScheduledValue(self, clock, begin, until)

    def interpolate(self, progress: float) -> float:
        """Return the value when a fraction `progress` of the change is complete."""
        if self.shape == "exponential":
            return float(self.start * (self.end / self.start) ** progress)
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        elif self.shape == "quadratic":
            progress = progress**2
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class ScheduledValue:
    """A schedule whose durations were converted to optimizer steps."""

    schedule: Schedule
    clock: Clock
    begin: int
    until: int

    @property
    def last_begin(self) -> int:
        """The step at which the last change begins."""
        return self.begin if self.schedule.start != self.schedule.end else 0

    def __call__(self, step: int) -> float:
        """Return the value at a step."""
        schedule = self.schedule
        if self.begin == self.until == 0:
            return schedule.end
        in_warmup = step < self.begin
        if schedule.staircase is not None:  # the warmup includes the epoch in which it ends
            step = self.clock.end_of_epoch(step)
            in_warmup = step <= self.begin
        if in_warmup:
            return schedule.start if schedule.before is None else schedule.before
        if schedule.shape == "step" or step >= self.until:
            return schedule.end
        return schedule.interpolate((step - self.begin) / (self.until - self.begin))


def as_schedule(name: str, value: "float | Schedule | dict[str, Any]") -> Schedule:
    """Convert a constant, or a dict of arguments, to a `Schedule`.

    >>> as_schedule("weight", 0.5).resolve(Clock(10))(3)
    0.5
    """
    if isinstance(value, Schedule | dict):
        return as_dataclass(name, value, Schedule)
    return Schedule(value, value)


@dataclass(frozen=True)
class Phase:
    """One phase of `ThresholdPhases`.

    Args:
        keep: Fraction of gates to keep open, for a `GatePenalty` whose `target` is null. None, in
            all phases, sets no keep target.
        threshold: The threshold θ during the phase. None, in all phases, leaves θ alone.
        weight_factor: Factor by which the weight of every penalty on the gates is multiplied.
        begin: When the phase starts. It must be 0 for the first phase.
    """

    keep: float | None = None
    threshold: float | None = None
    weight_factor: float = 1.0
    begin: Duration = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.keep is not None and not 0 <= self.keep <= 1:
            raise ValueError(f"`keep` must be in [0, 1], got {self.keep}.")
        if self.threshold is not None and not 0 <= self.threshold < 1:
            raise ValueError(f"`threshold` must be in [0, 1), got {self.threshold}.")
        if not self.weight_factor >= 0:
            raise ValueError(f"`weight_factor` must be at least 0, got {self.weight_factor}.")
        check_duration("begin", self.begin)


@dataclass(frozen=True)
class JoinedPhases:
    """A value that is constant in each phase, with cosine transitions between phases.

    Args:
        values: The value for each phase.
        starts: The step at which each phase starts.
        width: Length of a transition in steps, from the start of the new phase.

    >>> at = JoinedPhases([1.0, 0.0], [0, 10], width=4)
    >>> [round(at(step), 2) for step in (9, 10, 12, 14)]
    [1.0, 1.0, 0.5, 0.0]
    """

    values: Sequence[float]
    starts: Sequence[int]
    width: int

    @property
    def last_begin(self) -> int:
        """The step at which the last change begins."""
        changes = zip(pairwise(self.values), self.starts[1:], strict=True)
        return max((start for (a, b), start in changes if a != b), default=0)

    def __call__(self, step: int) -> float:
        """Return the value at a step."""
        value = self.values[0]
        for start, target in zip(self.starts[1:], self.values[1:], strict=True):
            if step < start:
                break
            progress = min(1.0, (step - start) / self.width) if self.width else 1.0
            # If the previous transition is unfinished, start from the value it has reached.
            value += (target - value) * (1 - math.cos(math.pi * progress)) / 2
        return value
