"""The landing of a budget: gates that stand still, on what they are allowed to use."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.budget import GateBudget
from dg_lightning.protocol import GateLike

__all__ = ["FrozenGates", "Landing"]

_TOLERANCE = 0.01  # of the budget: closer than this, a gate that has landed is left alone
_LOOKS = 10  # measurements that a correction rests on


class FrozenGates:
    """Keeps the parameters of gates as they are, whatever an optimizer does.

    Not by `requires_grad` or an empty `grad`: DDP and a loss scaler count on gradients.

    Args:
        gates: The gates.
    """

    def __init__(self, gates: Iterable[GateLike]) -> None:
        modules = [gate for gate in gates if isinstance(gate, nn.Module)]
        parameters = [parameter for gate in modules for parameter in gate.parameters()]
        self.kept = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @torch.no_grad()
    def hold(self) -> None:
        """Put the parameters back."""
        for parameter, value in self.kept:
            parameter.copy_(value)


class Landing:
    """Brings frozen gates onto their budget, at once if they are static.

    What GateNets use differs from batch to batch, so a correction of theirs rests on several looks.

    Args:
        budget: The budget.
    """

    def __init__(self, budget: GateBudget) -> None:
        self.budget = budget
        self.landed = False
        self.looks = 0
        self.used = 0.0

    def shift_after(self, used: Tensor) -> float:
        """Take in what was used, and return what to add to every ``z / τ``; mostly 0."""
        self.looks += 1
        self.used += (float(used) - self.used) / self.looks
        if self.landed:
            settled = abs(self.used / self.budget.budget - 1) <= _TOLERANCE
            if settled or self.looks < _LOOKS:
                return 0.0
        self.landed = True
        return self.budget.shift_for(float(self.budget.used()) + self.budget.budget - self.used)

    def apply(self, shift: float) -> None:
        """Shift the gates, and begin to look anew."""
        if shift:
            self.looks, self.used = 0, float(self.budget.used(shift))
            self.budget.shift(shift)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"landed": self.landed, "looks": self.looks, "used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.landed, self.looks, self.used = state["landed"], state["looks"], state["used"]
