"""When connections are dropped and grown, and how many of them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dg_lightning.schedules import Clock, Duration, Schedule, check_duration

__all__ = ["DropSchedule", "DropShape"]

DropShape: TypeAlias = Literal["cosine", "linear", "constant"]


@dataclass
class DropSchedule:
    """Updates every so many steps, which drop a share of connections that falls over time.

    Args:
        every_n_steps: Optimizer steps from one update to the next.
        drop_fraction: The share of connections that the first update drops.
        drop_shape: How that share falls until the last update.
        until: When updates end.

    >>> schedule = DropSchedule(100, drop_fraction=0.3, drop_shape="cosine", until=0.5)
    >>> schedule.resolve(Clock(1000)) is None  # no warning
    True
    >>> [step for step in range(1, 600) if schedule.is_due(step, step - 1)], schedule.fraction(0)
    ([100, 200, 300, 400], 0.3)
    """

    every_n_steps: int
    drop_fraction: float
    drop_shape: DropShape
    until: Duration

    def __post_init__(self) -> None:
        if self.every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {self.every_n_steps}.")
        if not 0 < self.drop_fraction <= 1:
            raise ValueError(f"`drop_fraction` must be in (0, 1], got {self.drop_fraction}.")
        if self.drop_shape not in ("cosine", "linear", "constant"):
            raise ValueError(
                f"`drop_shape` must be cosine, linear or constant, got {self.drop_shape!r}."
            )
        check_duration("until", self.until)

    def resolve(self, clock: Clock, name: str = "It") -> str | None:
        """Resolve durations, when training starts; return a warning if there will be no update."""
        self.last_step = clock.steps(self.until, "until")
        end = self.drop_fraction if self.drop_shape == "constant" else 0.0
        shape = "linear" if self.drop_shape == "constant" else self.drop_shape
        schedule = Schedule(self.drop_fraction, end, shape, until=max(self.last_step, 1))
        self.fraction = schedule.resolve(clock)
        if self.last_step > self.every_n_steps:
            return None
        return (
            f"{name} never rewires: its interval is {self.every_n_steps} steps, and "
            f"it stops before step {self.last_step}; lower `every_n_steps` or raise `until`."
        )

    def is_due(self, step: int, last: int) -> bool:
        """Return True if an update is due after a step; the one before was after step `last`."""
        due = step // self.every_n_steps > last // self.every_n_steps
        return due and step < self.last_step
