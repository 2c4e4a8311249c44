"""Values that change in phases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dg_lightning.arguments import check_fields

from .schedule import Duration, check_duration

__all__ = ["JoinedPhases", "Phase"]


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
    """A value that takes one of `values` in each phase, with cosine transitions.

    Args:
        values: The value of each phase.
        starts: The step at which each phase starts.
        width: The steps that a transition takes, from the start of the new phase.

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
            # If the previous transition is unfinished, start from where it got to.
            value += (target - value) * (1 - math.cos(math.pi * progress)) / 2
        return value
