"""The landing of a budget: gates frozen on exactly what they may use."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.budget.budget import GateBudget
from dg_lightning.gates.protocol import GateLike

__all__ = ["FrozenGates", "Landing"]

_TOLERANCE = 0.01  # of the budget: closer than this, a gate that has landed is left alone
_MEASUREMENTS = 10  # that a correction is based on


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
    """Shifts frozen gates onto their budget, in one step if they are static.

    The usage of GateNets varies between batches, so they are corrected by several measurements.

    Args:
        budget: The budget.
    """

    def __init__(self, budget: GateBudget) -> None:
        self.budget = budget
        self.landed = False
        self.measurements = 0
        self.used = 0.0

    def shift_after(self, used: Tensor) -> float:
        """Add a measurement, and return the shift of every ``z / τ``, mostly 0."""
        self.measurements += 1
        self.used += (float(used) - self.used) / self.measurements
        if self.landed:
            settled = abs(self.used / self.budget.budget - 1) <= _TOLERANCE
            if settled or self.measurements < _MEASUREMENTS:
                return 0.0
        self.landed = True
        return self.budget.shift_for(float(self.budget.used()) + self.budget.budget - self.used)

    def apply(self, shift: float) -> None:
        """Shift the gates, and restart the measurements."""
        if shift:
            self.measurements, self.used = 0, float(self.budget.used(shift))
            self.budget.shift(shift)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"landed": self.landed, "looks": self.measurements, "used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.landed, self.used = state["landed"], state["used"]
        self.measurements = state["looks"]
