"""The plan of a training: what its callbacks will set over the steps, and what is risky about it.

Section 4.1 of the paper names what makes gates collapse; the lint looks for it before training.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from dg_lightning.protocol import gate_layers
from dg_lightning.schedules import Clock, ValueAt, as_schedule

__all__ = ["Curve", "plan_of", "risks", "warn_of_risks"]

Quantity: TypeAlias = Literal["temperature", "threshold", "keep", "weight", "factor", "budget"]

_SUDDEN = 0.05  # of training: what falls within it, falls at once
_JUMP = 0.01  # of training: what moves a quarter of its way within it, jumps
_LOW_TEMPERATURE = 0.5
_HIGH_THRESHOLD = 0.9
_SITS_ON = 0.02


@dataclass(frozen=True)
class Curve:
    """One quantity over the optimizer steps.

    Args:
        quantity: What it is.
        label: How to name it.
        value_at: Its value as a function of the step.
        gates: The names of the gates that it is set for.
    """

    quantity: Quantity
    label: str
    value_at: ValueAt
    gates: tuple[str, ...]

    def values(self, clock: Clock, points: int = 400) -> tuple[list[int], list[float]]:
        """Return steps from the first to the last, and the values there."""
        points = min(points, clock.total_steps)
        last = clock.total_steps - 1
        steps = [round(i * last / max(points - 1, 1)) for i in range(points)]
        return steps, [self.value_at(step) for step in steps]


def plan_of(callbacks: Iterable[Any], clock: Clock, module: nn.Module) -> list[Curve]:
    """Ask every callback that has a plan for it."""
    planning = [callback for callback in callbacks if hasattr(callback, "plan")]
    return [curve for callback in planning for curve in callback.plan(clock, module)]


def warn_of_risks(callback: Any, trainer: Any, module: nn.Module) -> None:
    """Warn of what is risky in the plan of a Trainer; of its callbacks, the first one speaks."""
    planning = [other for other in trainer.callbacks if hasattr(other, "plan")]
    if planning[0] is not callback or trainer.fast_dev_run:
        return
    clock = Clock.of(trainer)
    for risk in risks(plan_of(planning, clock, module), clock, module):
        rank_zero_warn(risk)


def risks(curves: Sequence[Curve], clock: Clock, module: nn.Module) -> list[str]:
    """Name the settings of a plan that make a collapse of gates likely, each in a line."""
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
    found += [_all_at_once(keeps, thresholds, [*weights, *factors], clock)]
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
    _, cuts = threshold.values(clock)
    touching = [abs(a - b) < _SITS_ON for a, b in zip(targets, cuts, strict=True)]
    if touching[-1] or sum(touching) > 0.1 * len(touching):
        at = -1 if touching[-1] else touching.index(True)
        return (
            f"{keep.label} sits on θ ({targets[at]:.3g} and {cuts[at]:.3g}): the mean p is parked "
            "on the threshold, and a little noise opens or closes all gates; keep them apart, or "
            "take the rates `of: g`."
        )
    return None


def _jumps(curve: Curve, clock: Clock) -> list[int]:
    """Return the steps at which a value goes a quarter of its whole range at once."""
    if clock.total_steps * _JUMP < 1:
        return []  # so short a training has nothing but jumps
    steps = list(range(0, clock.total_steps, max(1, round(_JUMP * clock.total_steps))))
    values = [curve.value_at(step) for step in steps]
    span = max(values) - min(values)
    moved = [abs(b - a) for a, b in pairwise(values)]
    return [step for step, d in zip(steps, moved, strict=False) if span and d > 0.25 * span]


def _all_at_once(
    keeps: Sequence[Curve], thresholds: Sequence[Curve], weights: Sequence[Curve], clock: Clock
) -> str | None:
    places = [
        {step for curve in curves for step in _jumps(curve, clock)}
        for curves in (keeps, thresholds, weights)
    ]
    together = set.intersection(*places)
    if not together:
        return None
    return (
        f"λ, θ and the keep target all jump at step {min(together)}: such a shock closes gates for "
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
        "logit; it only scales gradients and p. Set another threshold if the mask shall follow."
    )
