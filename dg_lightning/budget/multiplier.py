"""λ of a budget: the weight of its penalty, which a controller moves."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Multiplier"]


class Multiplier:
    """λ of a budget, moved by what was used; all arithmetic stays on the device.

    `pi` is a proportional-integral controller on log λ, which finds the scale of any loss;
    `dual` is gradient ascent on the Lagrangian.

    Args:
        method: The rule; λ of `shift` is never moved, as it has no penalty.
        initial: The first λ.
        highest: The largest λ.
        integral: Gain of the summed error; of `dual`, the step of λ as a multiple of `initial`.
        proportional: Gain of the change of the error.
    """

    def __init__(
        self,
        method: Literal["pi", "dual", "shift"],
        initial: float,
        highest: float,
        integral: float = 0.1,
        proportional: float = 1.0,
    ) -> None:
        self.method = method
        self.initial = initial
        self.highest = highest
        self.lowest = initial * 1e-3
        self.integral = integral
        self.proportional = proportional
        self.value = torch.tensor(initial)
        self.error = torch.tensor(0.0)

    def on(self, device: torch.device) -> Tensor:
        """Return λ on a device, where it stays: a copy in every step would wait for it."""
        if self.value.device != device:
            self.value, self.error = self.value.to(device), self.error.to(device)
        return self.value

    @torch.no_grad()
    def update(self, used: Tensor, allowed: float) -> None:
        """Raise λ where more was used than allowed, lower it where less.

        While too much is used λ never falls, however fast the error does.
        """
        value = self.on(used.device)
        error = torch.log(used.clamp_min(1e-6) / allowed).clamp(-0.5, 0.5).to(value.dtype)
        if self.method == "pi":
            step = self.integral * error + self.proportional * (error - self.error)
            step = torch.where(error > 0, step.clamp_min(0), step)
            value = (value * step.exp()).clamp(self.lowest, self.highest)
        else:
            value = (value + self.integral * self.initial * error).clamp(0, self.highest)
        # In place: a captured step reads this tensor.
        self.value.copy_(value)
        self.error.copy_(error)

    def state_dict(self) -> dict[str, float]:
        """Return λ and the last error."""
        return {"value": float(self.value), "error": float(self.error)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on where `state_dict` was taken."""
        self.value, self.error = torch.tensor(state["value"]), torch.tensor(state["error"])
