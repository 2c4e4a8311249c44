"""The landing of a budget: gates frozen on exactly what they may use."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from dg_lightning.budget.budget import GateBudget
from dg_lightning.gates.protocol import GateLike
from dg_lightning.schedules.schedule import Clock, Duration, Schedule, ValueAt

__all__ = ["FrozenGates", "Landing", "Mean", "Timetable"]

_MEASUREMENTS = 200  # over a training run, where their interval is not given
_LANDING = 10  # measurements over which gates land

_TOLERANCE = 0.01  # of the budget: closer than this, a gate that has landed is left alone
ENOUGH_MEASUREMENTS = 10  # batches that a correction is based on
LEAST = 1e-6  # share that something is at least taken to use


Mean: TypeAlias = Callable[[Tensor], Tensor]  # over ranks


class Timetable(NamedTuple):
    """When a budget is pressed for and landed on, in optimizer steps."""

    pressed: ValueAt  # how much of the way to the budget is demanded, from 0 to 1
    begin: int
    landing: int
    landed: int
    interval: int  # between measurements

    @classmethod
    def resolve(
        cls, clock: Clock, begin: Duration, until: Duration, landing: Duration, every: int | None
    ) -> "Timetable":
        """Resolve durations; `every` is the interval, None for 1/200 of the training run."""
        pressed = Schedule(0.0, 1.0, "linear", begin, until).resolve(clock)
        first, freeze = clock.steps(begin, "begin"), clock.steps(landing, "landing")
        interval = every or max(1, (clock.total_steps or freeze) // _MEASUREMENTS)
        landed = freeze + _LANDING * interval
        if clock.total_steps is not None:
            # Two steps are left for it: gates are frozen first and land one step later, because p
            # is of before the optimizer's step.
            freeze = min(freeze, max(clock.total_steps - 2, 0))
            landed = min(landed, clock.total_steps - 1)
        return cls(pressed, first, freeze, landed, interval)

    def landing_progress(self, step: int) -> float:
        """Return how much of the landing has passed, from 0 to 1 and beyond."""
        return (step - self.landing) / max(self.landed - self.landing, 1)


class FrozenGates:
    """Keeps the parameters of gates fixed, whatever an optimizer does.

    `requires_grad` and `grad` stay as they are: DDP and loss scalers rely on gradients.

    Args:
        gates: The gates.
    """

    def __init__(self, gates: Iterable[GateLike]) -> None:
        modules = [gate for gate in gates if isinstance(gate, nn.Module)]
        parameters = [parameter for gate in modules for parameter in gate.parameters()]
        self.kept = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @torch.no_grad()
    def hold(self) -> None:
        """Restore the parameters."""
        for parameter, value in self.kept:
            parameter.copy_(value)


class Landing:
    """Shifts frozen gates onto their budget, a little with every measurement.

    Static gates then use it exactly. What GateNets use varies between batches and changes with the
    features that they read, so they are corrected by the mean of several batches.

    Args:
        budget: The budget.
    """

    def __init__(self, budget: GateBudget) -> None:
        self.budget = budget
        self.landed = False
        self.start: float | None = None  # what was used when gates were frozen
        self.measurements = 0
        self.used = 0.0

    def approach(self, used: Tensor, progress: float) -> float:
        """Return the shift of a measurement before the gates have landed.

        Args:
            used: The share that deployed gates use, as far as the last forward pass shows it.
            progress: How much of the landing has passed, from 0 to 1.
        """
        self.used = float(used)
        self.start = self.start or max(self.used, LEAST)
        self.landed = progress >= 1
        target = self.start * (self.budget.budget / self.start) ** min(max(progress, 0.0), 1.0)
        return self.shift_to(target, self.used)

    def correct(self, used: Tensor, measurements: int = 1) -> float:
        """Add measurements after the landing, and return the shift they ask for, mostly 0."""
        self.measurements += measurements
        self.used += (float(used) - self.used) * measurements / self.measurements
        settled = abs(self.used / self.budget.budget - 1) <= _TOLERANCE
        if settled or self.measurements < ENOUGH_MEASUREMENTS:
            return 0.0
        return self.shift_to(self.budget.budget, self.used)

    def shift_to(self, target: float, used: float) -> float:
        """Return the shift that brings what is used to the target."""
        here = float(self.budget.used())  # by the last pass, which may differ from it
        return self.budget.shift_for(target if used < LEAST else here * target / used)

    def apply(self, shift: float, mean: Mean) -> None:
        """Shift the gates, and restart the measurements.

        Args:
            shift: The shift, equal on all ranks.
            mean: Mean of a value over ranks, so that all of them record the same use.
        """
        if shift:
            self.measurements = 0
            before = float(mean(self.budget.used()))
            after = float(mean(self.budget.used(shift)))
            self.used = after if before < LEAST else self.used * after / before
            self.budget.shift(shift)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        kept = {"landed": self.landed, "looks": self.measurements, "used": self.used}
        return kept if self.start is None else {**kept, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.landed, self.used = state["landed"], state["used"]
        self.measurements, self.start = state["looks"], state.get("start")
