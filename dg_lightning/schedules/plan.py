"""The plan of a training run: what its callbacks schedule, and which settings will not work."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, Literal, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from dg_lightning.gates.protocol import gate_layers
from dg_lightning.schedules.schedule import Clock, ValueAt, as_schedule

Quantity: TypeAlias = Literal[
    "temperature", "threshold", "keep", "target", "weight", "factor", "budget"
]

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
        reads: Quantities of other callbacks that this one reads, such as the keep target. With
            `keep of g`, the target is for hard gates.
        freezes_at: Step at which the callback freezes the gates, if it does.
    """

    quantity: Quantity
    label: str
    value_at: ValueAt
    gates: tuple[str, ...]
    reads: tuple[str, ...] = ()
    freezes_at: int | None = None

    def values(self, clock: Clock, points: int = 400) -> tuple[list[int], list[float]]:
        """Return evenly spaced steps from the first to the last, and the value at each of them."""
        assert clock.total_steps is not None  # a run whose end is unknown has no plan
        points = min(points, clock.total_steps)
        last = clock.total_steps - 1
        steps = [round(i * last / max(points - 1, 1)) for i in range(points)]
        return steps, [self.value_at(step) for step in steps]


def collect_plan(callbacks: Iterable[Any], clock: Clock, module: nn.Module) -> list[Curve]:
    """Return the curves of all callbacks that have a plan, each as it was set."""
    planning = [callback for callback in callbacks if hasattr(callback, "plan")]
    return [curve for callback in planning for curve in callback.plan(clock, module)]


def acting(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves as they act on the gates.

    The weight of a penalty is multiplied by the factor of the phases, and frozen gates no longer
    change. A curve is split where this differs between its gates.
    """
    found = []
    for curve in curves:
        groups: dict[tuple[int, ...], list[str]] = {}
        for gate in curve.gates:
            changing = [i for i, other in enumerate(curves) if _changes(other, curve, gate)]
            groups.setdefault(tuple(changing), []).append(gate)
        for indices, gates in groups.items():
            others = [curves[i] for i in indices]
            factors = [other.value_at for other in others if other.quantity == "factor"]
            ends = [end for other in others if (end := other.freezes_at) is not None]
            label = f"{curve.label} × factor" if factors else curve.label
            value_at = _Acting((curve.value_at, *factors), min(ends, default=None))
            found.append(replace(curve, label=label, value_at=value_at, gates=tuple(gates)))
    weighted = {gate for curve in found if curve.quantity == "weight" for gate in curve.gates}
    return [c for c in found if c.quantity != "factor" or not weighted.issuperset(c.gates)]


def _changes(other: Curve, curve: Curve, gate: str) -> bool:
    """Return whether one curve changes how another one acts on a gate."""
    scales = other.quantity == "factor" and curve.quantity == "weight"
    freezes = other.freezes_at is not None and other is not curve
    return gate in other.gates and (scales or freezes)


@dataclass(frozen=True)
class _Acting:
    """The product of values, which is constant from the step `end` on."""

    values: tuple[ValueAt, ...]
    end: int | None

    def __call__(self, step: int) -> float:
        step = step if self.end is None else min(step, self.end)
        return prod(value_at(step) for value_at in self.values)


def find_unused(curves: Sequence[Curve], clock: Clock) -> list[str]:
    """Return one line for each setting in a plan that has no effect."""
    found = [_too_late(curve, clock) for curve in curves]
    found += [_unread(curve, curves) for curve in curves if curve.quantity in ("keep", "factor")]
    found += [_after_freezing(curve, other, clock) for curve in curves for other in curves]
    for curve in acting(curves):
        if curve.quantity == "weight" and not any(curve.values(clock)[1]):
            found.append(f"{curve.label} is 0 for the whole training run, so nothing is penalised.")
    return list(dict.fromkeys(line for line in found if line is not None))


def _too_late(curve: Curve, clock: Clock) -> str | None:
    """Return a line about a change that is scheduled for after training."""
    begin, total = getattr(curve.value_at, "last_begin", 0), clock.total_steps
    if total is None or begin < total:
        return None
    return f"{curve.label} changes from step {begin} on, but training ends at step {total}."


def _unread(curve: Curve, curves: Sequence[Curve]) -> str | None:
    """Return a line about a keep target or factor of phases that no penalty reads."""
    names = {curve.quantity, f"{curve.quantity} of g"}
    reading = [other for other in curves if names.intersection(other.reads)]
    unread = set(curve.gates).difference(*(other.gates for other in reading))
    if not unread:
        return None
    remedy = "add a GatePenalty, or leave `weight_factor` out"
    if curve.quantity == "keep":
        remedy = "add a GatePenalty with `usage='target'` and no `target`, or leave `keep` out"
    more = f" and {len(unread) - 1} others" if len(unread) > 1 else ""
    return (
        f"The {curve.label} of ThresholdPhases has no effect on {min(unread)}{more}, because no "
        f"penalty there reads it: {remedy}."
    )


def _after_freezing(curve: Curve, other: Curve, clock: Clock) -> str | None:
    """Return a line about a value that changes after its gates were frozen."""
    end = other.freezes_at
    if end is None or curve is other or not set(curve.gates) & set(other.gates):
        return None
    steps, values = curve.values(clock)
    late = [value for step, value in zip(steps, values, strict=True) if step > end]
    if all(abs(value - curve.value_at(end)) <= 1e-9 for value in late):
        return None
    return (
        f"{curve.label} still changes after step {end}, when BudgetController freezes the gates, "
        "and that has no effect: let it end earlier, or raise `freeze_at`."
    )


def plan_warnings(callbacks: Iterable[Any], clock: Clock, module: nn.Module) -> list[str]:
    """Return one line for each setting of the callbacks that has no effect or is risky."""
    callbacks = list(callbacks)
    curves = collect_plan(callbacks, clock, module)
    lines = [*find_unused(curves, clock), *find_risks(curves, clock, module)]
    for callback in callbacks:
        if hasattr(callback, "checkpoint_risks"):
            lines += callback.checkpoint_risks(callbacks, clock)
    return lines


def warn_of_risks(callback: Any, trainer: Any, module: nn.Module) -> None:
    """Warn about a Trainer's plan. Only the first callback with a plan warns."""
    planning = [other for other in trainer.callbacks if hasattr(other, "plan")]
    if planning[0] is not callback or trainer.fast_dev_run:
        return
    clock = Clock.from_trainer(trainer)
    if clock.total_steps is None:
        return
    for line in plan_warnings(trainer.callbacks, clock, module):
        rank_zero_warn(line)


def find_risks(curves: Sequence[Curve], clock: Clock, module: nn.Module) -> list[str]:
    """Return one line for each setting in a plan that makes gate collapse likely."""
    curves = acting(curves)
    of_g = {gate for curve in curves if "keep of g" in curve.reads for gate in curve.gates}
    temperatures, thresholds, keeps, weights, factors = (
        [curve for curve in curves if curve.quantity == quantity]
        for quantity in ("temperature", "threshold", "keep", "weight", "factor")
    )
    targets = [curve for curve in curves if curve.quantity == "target"]
    found = [_sudden_cooling(curve, clock) for curve in temperatures]
    found += [_high_threshold(curve, clock) for curve in thresholds]
    found += [
        _target_on_threshold(keep, threshold, clock)
        for keep in [*(keep for keep in keeps if not of_g.issuperset(keep.gates)), *targets]
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
        if name in curve.gates
        and name not in scheduled
        and getattr(gate, "policy", "threshold") == "threshold"
        and float(gate.threshold) == 0.5
    ]
    if len(idle) < len(curve.gates):
        return None
    return (
        "τ has no effect on which gates are open at θ = 0.5: the sign of the logit decides, and τ "
        "changes only p and its gradients. If τ should affect the mask, use another threshold."
    )
