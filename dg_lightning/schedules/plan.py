"""The plan of a training run: the values its callbacks will set, and the risks in them.

Section 4.1 of the paper lists causes of gate collapse; `find_risks` looks for them in a plan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from dg_lightning.gates.protocol import gate_layers
from dg_lightning.schedules.schedule import Clock, ValueAt, as_schedule

__all__ = ["Curve", "collect_plan", "find_risks", "warn_of_risks"]

Quantity: TypeAlias = Literal["temperature", "threshold", "keep", "weight", "factor", "budget"]

_SUDDEN = 0.05  # fraction of training: a fall within it is sudden
_JUMP = 0.01  # fraction of training: a change by a quarter of the range within it is a jump
_LOW_TEMPERATURE = 0.5
_HIGH_THRESHOLD = 0.9
_TOUCHING = 0.02


@dataclass(frozen=True)
class Curve:
    """One quantity over the optimizer steps.

    Args:
        quantity: The quantity.
        label: Display name.
        value_at: Value as a function of the step.
        gates: Names of the gates it applies to.
    """

    quantity: Quantity
    label: str
    value_at: ValueAt
    gates: tuple[str, ...]

    def values(self, clock: Clock, points: int = 400) -> tuple[list[int], list[float]]:
        """Return evenly spaced steps from first to last, and the values at them."""
        assert clock.total_steps is not None  # there is no plan of a training without an end
        points = min(points, clock.total_steps)
        last = clock.total_steps - 1
        steps = [round(i * last / max(points - 1, 1)) for i in range(points)]
        return steps, [self.value_at(step) for step in steps]


def collect_plan(callbacks: Iterable[Any], clock: Clock, module: nn.Module) -> list[Curve]:
    """Return the curves of all callbacks that have a plan."""
    planning = [callback for callback in callbacks if hasattr(callback, "plan")]
    return [curve for callback in planning for curve in callback.plan(clock, module)]


def warn_of_risks(callback: Any, trainer: Any, module: nn.Module) -> None:
    """Warn of the risks in a Trainer's plan; only its first callback with a plan warns."""
    planning = [other for other in trainer.callbacks if hasattr(other, "plan")]
    if planning[0] is not callback or trainer.fast_dev_run:
        return
    clock = Clock.from_trainer(trainer)
    if clock.total_steps is None:
        return
    for risk in find_risks(collect_plan(planning, clock, module), clock, module):
        rank_zero_warn(risk)


def find_risks(curves: Sequence[Curve], clock: Clock, module: nn.Module) -> list[str]:
    """Return one line for each setting of a plan that makes gate collapse likely."""
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
            "gates learn little; start from 1 to 2 and cool slowly."
        )
    window = max(1, round(_SUDDEN * len(steps)))
    for index in range(len(steps) - 1):
        later = min(index + window, len(steps) - 1)
        if values[later] < _LOW_TEMPERATURE and values[later] < 0.6 * values[index]:
            return (
                f"τ drops from {values[index]:.3g} to {values[later]:.3g} between step "
                f"{steps[index]} and {steps[later]}: a sudden fall below {_LOW_TEMPERATURE} makes "
                "gates collapse; take longer, or stay above it."
            )
    return None


def _high_threshold(curve: Curve, clock: Clock) -> str | None:
    steps, values = curve.values(clock)
    for step, value in zip(steps, values, strict=True):
        if value > _HIGH_THRESHOLD:
            return (
                f"θ rises above {_HIGH_THRESHOLD} (to {max(values):.3g}, from step {step} on): few "
                "gates have so high a p, and the others close at once; keep it at 0.8 or below."
            )
    return None


def _target_on_threshold(keep: Curve, threshold: Curve, clock: Clock) -> str | None:
    _, targets = keep.values(clock)
    _, theta = threshold.values(clock)
    touching = [abs(a - b) < _TOUCHING for a, b in zip(targets, theta, strict=True)]
    if touching[-1] or sum(touching) > 0.1 * len(touching):
        at = -1 if touching[-1] else touching.index(True)
        return (
            f"{keep.label} sits on θ ({targets[at]:.3g} and {theta[at]:.3g}): the mean p is parked "
            "on the threshold, and a little noise opens or closes all gates; keep them apart, or "
            "take the rates `of: g`."
        )
    return None


def _jumps(curve: Curve, clock: Clock) -> list[int]:
    """Return the steps at which a value jumps by more than a quarter of its range."""
    assert clock.total_steps is not None
    if clock.total_steps * _JUMP < 1:
        return []  # in so short a run every change is a jump
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
        f"λ, θ and the keep target all jump at step {min(shared)}: such a shock closes gates for "
        "good; join the phases smoothly (`join: 0.1`) or move one of them."
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
        "τ has no effect on which gates are open at θ = 0.5, where the mask is the sign of the "
        "logit; it only scales gradients and p. Set another threshold if the mask should follow τ."
    )
