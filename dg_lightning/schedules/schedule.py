"""Immutable schedules, which define a value at each optimizer step.

A duration is a number of optimizer steps, or text such as ``"30%"``, ``"3 epochs"`` or
``"600 steps"``. When training starts, a `Clock` converts durations to optimizer steps.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from dg_lightning.arguments import as_dataclass, check_fields, warn_of_fraction
from dg_lightning.gates.protocol import gate_layers

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
        """Create a clock from a Trainer at the start of `fit`."""
        estimated = trainer.estimated_stepping_batches
        total = int(estimated) if 0 < estimated < math.inf else None
        batches = trainer.num_training_batches
        per_epoch = None
        if batches and not math.isinf(batches):
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
        keep: Fraction of gates to keep open, for a `GatePenalty` whose `target` is null.
        threshold: The threshold θ during the phase.
        weight_factor: Factor by which the weight of every penalty on the gates is multiplied.
        begin: When the phase starts. It must be 0 for the first phase.
    """

    keep: float
    threshold: float
    weight_factor: float
    begin: Duration = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.keep <= 1:
            raise ValueError(f"`keep` must be in [0, 1], got {self.keep}.")
        if not 0 <= self.threshold < 1:
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


Quantity: TypeAlias = Literal["temperature", "threshold", "keep", "weight", "factor", "budget"]

_SUDDEN = 0.05  # fraction of training in which a drop counts as sudden
_JUMP = 0.01  # fraction of training in which a change of a quarter of the range is a jump
_LOW_TEMPERATURE = 0.5
_HIGH_THRESHOLD = 0.9
_TOUCHING = 0.02


@dataclass(frozen=True)
class Curve:
    """A quantity that changes over the optimizer steps, such as a temperature.

    Args:
        quantity: Which quantity this is.
        label: Display name.
        value_at: Function that maps an optimizer step to the value.
        gates: Names of the gates that the quantity applies to.
    """

    quantity: Quantity
    label: str
    value_at: ValueAt
    gates: tuple[str, ...]

    def values(self, clock: Clock, points: int = 400) -> tuple[list[int], list[float]]:
        """Return evenly spaced steps from the first to the last, and the value at each of them."""
        assert clock.total_steps is not None  # a run whose end is unknown has no plan
        points = min(points, clock.total_steps)
        last = clock.total_steps - 1
        steps = [round(i * last / max(points - 1, 1)) for i in range(points)]
        return steps, [self.value_at(step) for step in steps]


def collect_plan(callbacks: Iterable[Any], clock: Clock, module: nn.Module) -> list[Curve]:
    """Return the curves of all callbacks that have a plan."""
    planning = [callback for callback in callbacks if hasattr(callback, "plan")]
    return [curve for callback in planning for curve in callback.plan(clock, module)]


def warn_of_risks(callback: Any, trainer: Any, module: nn.Module) -> None:
    """Warn about risks in a Trainer's plan. Only the first callback with a plan warns."""
    planning = [other for other in trainer.callbacks if hasattr(other, "plan")]
    if planning[0] is not callback or trainer.fast_dev_run:
        return
    clock = Clock.from_trainer(trainer)
    if clock.total_steps is None:
        return
    for risk in find_risks(collect_plan(planning, clock, module), clock, module):
        rank_zero_warn(risk)


def find_risks(curves: Sequence[Curve], clock: Clock, module: nn.Module) -> list[str]:
    """Return one line for each setting in a plan that makes gate collapse likely."""
    temperatures, thresholds, keeps, weights, factors = (
        [curve for curve in curves if curve.quantity == quantity]
        for quantity in ("temperature", "threshold", "keep", "weight", "factor")
    )
    found = [_sudden_cooling(curve, clock) for curve in temperatures]
    found += [_high_threshold(curve, clock) for curve in thresholds]
    found += [
        _target_on_threshold(keep, threshold, clock)
        for keep in keeps
        for threshold in [*thresholds, *_constant_thresholds(module, thresholds)]
        if set(keep.gates) & set(threshold.gates)
    ]
    found += [_simultaneous_jumps(keeps, thresholds, [*weights, *factors], clock)]
    found += [_idle_temperature(curve, thresholds, module) for curve in temperatures]
    return list(dict.fromkeys(risk for risk in found if risk is not None))


def _constant_thresholds(module: nn.Module, scheduled: Sequence[Curve]) -> list[Curve]:
    """Return the thresholds that no callback changes, as curves."""
    changed = {name for curve in scheduled for name in curve.gates}
    constant = []
    for name, gate in gate_layers(module, required=False).items():
        if name not in changed:
            value_at = as_schedule("threshold", round(float(gate.threshold), 6)).resolve(Clock(1))
            constant.append(Curve("threshold", "θ", value_at, (name,)))
    return constant


def _sudden_cooling(curve: Curve, clock: Clock) -> str | None:
    steps, values = curve.values(clock)
    if values[0] < _LOW_TEMPERATURE:
        return (
            f"τ starts at {values[0]:.3g}, below {_LOW_TEMPERATURE}: the sigmoid saturates and "
            "gates learn little. Start between 1 and 2, and cool slowly."
        )
    window = max(1, round(_SUDDEN * len(steps)))
    for index in range(len(steps) - 1):
        later = min(index + window, len(steps) - 1)
        if values[later] < _LOW_TEMPERATURE and values[later] < 0.6 * values[index]:
            return (
                f"τ drops from {values[index]:.3g} to {values[later]:.3g} between step "
                f"{steps[index]} and {steps[later]}: a sudden drop below {_LOW_TEMPERATURE} can "
                "make gates collapse. Cool more slowly, or stay above this value."
            )
    return None


def _high_threshold(curve: Curve, clock: Clock) -> str | None:
    steps, values = curve.values(clock)
    for step, value in zip(steps, values, strict=True):
        if value > _HIGH_THRESHOLD:
            return (
                f"θ rises above {_HIGH_THRESHOLD} (to {max(values):.3g}, from step {step} on): few "
                "gates have such a high p, and all others close. Keep θ at 0.8 or below."
            )
    return None


def _target_on_threshold(keep: Curve, threshold: Curve, clock: Clock) -> str | None:
    _, targets = keep.values(clock)
    _, theta = threshold.values(clock)
    touching = [abs(a - b) < _TOUCHING for a, b in zip(targets, theta, strict=True)]
    if touching[-1] or sum(touching) > 0.1 * len(touching):
        at = -1 if touching[-1] else touching.index(True)
        return (
            f"{keep.label} is too close to θ ({targets[at]:.3g} and {theta[at]:.3g}): when the "
            "mean p is at the threshold, a little noise opens or closes all gates. Keep them "
            "apart, or set `rate: g`."
        )
    return None


def _jumps(curve: Curve, clock: Clock) -> list[int]:
    """Return the steps at which a value jumps by more than a quarter of its range."""
    assert clock.total_steps is not None
    if clock.total_steps * _JUMP < 1:
        return []  # in such a short run, every change would be a jump
    steps = list(range(0, clock.total_steps, max(1, round(_JUMP * clock.total_steps))))
    values = [curve.value_at(step) for step in steps]
    span = max(values) - min(values)
    changes = [abs(b - a) for a, b in pairwise(values)]
    return [step for step, d in zip(steps, changes, strict=False) if span and d > 0.25 * span]


def _simultaneous_jumps(
    keeps: Sequence[Curve], thresholds: Sequence[Curve], weights: Sequence[Curve], clock: Clock
) -> str | None:
    jumps = [
        {step for curve in curves for step in _jumps(curve, clock)}
        for curves in (keeps, thresholds, weights)
    ]
    shared = set.intersection(*jumps)
    if not shared:
        return None
    return (
        f"λ, θ and the keep target all jump at step {min(shared)}: such a shock closes gates "
        "permanently. Smooth the transitions (`transition: 10%`), or move one of the jumps."
    )


def _idle_temperature(curve: Curve, thresholds: Sequence[Curve], module: nn.Module) -> str | None:
    scheduled = {name for threshold in thresholds for name in threshold.gates}
    idle = [
        name
        for name, gate in gate_layers(module, required=False).items()
        if name in curve.gates and name not in scheduled and float(gate.threshold) == 0.5
    ]
    if len(idle) < len(curve.gates):
        return None
    return (
        "τ has no effect on which gates are open at θ = 0.5: the sign of the logit decides, and τ "
        "changes only p and its gradients. If τ should affect the mask, use another threshold."
    )
