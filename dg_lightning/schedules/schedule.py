"""Schedules: immutable descriptions of a value as a function of the optimizer step.

A duration is a number of optimizer steps (int), a fraction of training (float), or a string
(``"3 epochs"``, ``"600 steps"``). It is resolved against a `Clock` once, when training starts.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

__all__ = [
    "Clock",
    "Duration",
    "Phase",
    "Schedule",
    "Shape",
    "ValueAt",
    "as_schedule",
    "check_duration",
    "join_phases",
]

Duration: TypeAlias = int | float | str
Shape: TypeAlias = Literal["linear", "cosine", "quadratic", "exponential", "step"]
ValueAt: TypeAlias = Callable[[int], float]

_WORDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(steps?|epochs?|%)\s*")


@dataclass(frozen=True)
class Clock:
    """Length of a training run in optimizer steps.

    Args:
        total_steps: Optimizer steps of the whole run.
        steps_per_epoch: Optimizer steps per epoch; None if the data has no length.

    >>> Clock(1000, 100).steps("3 epochs"), Clock(1000).steps(0.25), Clock(1000).steps(40)
    (300, 250, 40)
    """

    total_steps: int
    steps_per_epoch: int | None = None

    @classmethod
    def from_trainer(cls, trainer: Any) -> "Clock":
        """Create the clock of a Trainer that is about to fit."""
        total = trainer.estimated_stepping_batches
        if not 0 < total < math.inf:
            raise ValueError(
                f"A schedule needs to know how long the training is, and it has {total} steps: "
                "set `max_steps` of the Trainer, or `max_epochs` with data that has a length."
            )
        batches = trainer.num_training_batches
        module = getattr(trainer, "lightning_module", None)
        if module is not None and not module.automatic_optimization and trainer.max_steps == -1:
            # Lightning counts the steps of every optimizer, but estimates one per batch.
            optimizers = max(1, len(trainer.optimizers))
            total, batches = total * optimizers, batches * optimizers
        if not batches or math.isinf(batches):
            return cls(int(total))
        return cls(int(total), math.ceil(batches / trainer.accumulate_grad_batches))

    def steps(self, duration: Duration) -> int:
        """Return a duration in optimizer steps."""
        check_duration("duration", duration)
        if isinstance(duration, int):
            return duration
        if isinstance(duration, float):
            return round(duration * self.total_steps)
        match = _WORDS.fullmatch(duration)
        assert match is not None
        number, unit = float(match[1]), match[2]
        if unit == "%":
            return round(number / 100 * self.total_steps)
        if unit.startswith("step"):
            return round(number)
        if self.steps_per_epoch is None:
            raise ValueError(
                f"`{duration}` cannot be counted, because the data has no length: "
                "write it in steps or as a fraction of training."
            )
        return round(number * self.steps_per_epoch)

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
        valid = _WORDS.fullmatch(duration) is not None
    elif isinstance(duration, float):
        valid = 0 <= duration <= 1
    else:
        valid = isinstance(duration, int) and duration >= 0
    if not valid:
        raise ValueError(
            f"`{name}` must be a number of steps (an int), a fraction of training (a float from 0 "
            f"to 1), or words like '3 epochs' and '600 steps', got {duration!r}."
        )


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
        for name in ("start", "end", "before"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"`{name}` must be finite, got {value}.")
        if self.shape not in get_args(Shape):
            raise ValueError(f"`shape` must be one of {get_args(Shape)}, got {self.shape!r}.")
        if self.staircase not in (None, "epoch"):
            raise ValueError(f"`staircase` must be epoch or null, got {self.staircase!r}.")
        if self.shape == "exponential" and not self.start * self.end > 0:
            raise ValueError(
                "An exponential schedule needs a start and an end above 0, got "
                f"{self.start} and {self.end}: begin with a small value, and set `before: 0`."
            )
        check_duration("begin", self.begin)
        check_duration("until", self.until)

    def resolve(self, clock: Clock) -> ValueAt:
        """Return the value as a function of the optimizer step."""
        begin, until = clock.steps(self.begin), clock.steps(self.until)
        if self.shape != "step" and until < begin:
            raise ValueError(
                f"A schedule must end after it begins, got begin {self.begin!r} (step {begin}) and "
                f"until {self.until!r} (step {until})."
            )

        def value_at(step: int) -> float:
            in_warmup = step < begin
            if self.staircase is not None:  # the epoch that ends with the warmup is part of it
                step = clock.end_of_epoch(step)
                in_warmup = step <= begin
            if in_warmup:
                return self.start if self.before is None else self.before
            if self.shape == "step" or step >= until:
                return self.end
            return self._interpolate((step - begin) / (until - begin))

        return value_at

    def _interpolate(self, progress: float) -> float:
        if self.shape == "exponential":
            return float(self.start * (self.end / self.start) ** progress)
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        elif self.shape == "quadratic":
            progress = progress**2
        return self.start + (self.end - self.start) * progress


def as_schedule(name: str, value: "float | Schedule | dict[str, Any]") -> Schedule:
    """Convert a schedule, a dict of its arguments, or a constant to a `Schedule`.

    >>> as_schedule("weight", 0.5).resolve(Clock(10))(3)
    0.5
    """
    if isinstance(value, Schedule):
        return value
    if isinstance(value, dict):
        try:
            return Schedule(**value)
        except TypeError as error:
            raise ValueError(
                f"`{name}` as a schedule takes {', '.join(Schedule.__dataclass_fields__)}, "
                f"got {', '.join(map(str, value))}."
            ) from error
    return Schedule(value, value)


@dataclass(frozen=True)
class Phase:
    """One phase of `ThresholdPhases`.

    Args:
        keep: Fraction of gates to keep open, for a `GatePenalty` whose `target` is null.
        threshold: θ.
        weight_factor: Multiplier of the weight of every penalty on the gates.
        begin: Start of the phase; 0 for the first one.
    """

    keep: float
    threshold: float
    weight_factor: float
    begin: Duration = 0

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise ValueError(f"`keep` must be in [0, 1], got {self.keep}.")
        if not 0 <= self.threshold < 1:
            raise ValueError(f"`threshold` must be in [0, 1), got {self.threshold}.")
        if not self.weight_factor >= 0:
            raise ValueError(f"`weight_factor` must be at least 0, got {self.weight_factor}.")
        check_duration("begin", self.begin)


def join_phases(values: Sequence[float], starts: Sequence[int], width: int) -> ValueAt:
    """Return a function that takes one of `values` in each phase, with cosine transitions.

    A transition starts with the new phase and takes `width` steps.

    >>> at = join_phases([1.0, 0.0], [0, 10], width=4)
    >>> [round(at(step), 2) for step in (9, 10, 12, 14)]
    [1.0, 1.0, 0.5, 0.0]
    """

    def value_at(step: int) -> float:
        value = values[0]
        for start, target in zip(starts[1:], values[1:], strict=True):
            if step < start:
                break
            progress = min(1.0, (step - start) / width) if width else 1.0
            # If the previous transition is unfinished, start from where it got to.
            value += (target - value) * (1 - math.cos(math.pi * progress)) / 2
        return value

    return value_at
