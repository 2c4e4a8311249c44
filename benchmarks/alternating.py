"""Compare training variants by alternating them in one run, so that noise affects all of them.

Machines are noisy: sometimes all steps take a fifth longer, and single steps many times longer.
So the variants alternate, and each step is divided by the typical baseline step around it. Steps
at the same position of a cycle (such as between two updates) are reduced to their median before
averaging. This keeps regular costs, such as an update, and removes random outliers.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Repeated", "StepTimes", "turns"]


class Repeated:
    """A loader that repeats one batch at no cost."""

    def __init__(self, batch: Any, times: int = 100_000) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, self.times)


def turns(names: list[str], base: str, cycle: int, stretch: int, rounds: int) -> Iterator[str]:
    """Yield the variant of every step: each alternates with the base, at every position.

    Args:
        names: The variants to compare.
        base: The baseline.
        cycle: Period, in steps, of work that is not done every step.
        stretch: Consecutive steps of the same variant; must divide the cycle.
        rounds: Cycles measured per variant, after a warm-up cycle.
    """
    for _ in range(rounds + 1):
        for name in names:
            for first in (name, base), (base, name):
                for place in range(cycle):
                    yield first[place // stretch % 2]


class StepTimes:
    """Step times in seconds, by variant and position in the cycle.

    Args:
        base: The baseline.
        cycle: Period, in steps, of work that is not done every step.
        stretch: Consecutive steps of the same variant.
        ways: Number of variants compared with the base; the first round of each is discarded.
    """

    def __init__(self, base: str, cycle: int, stretch: int, ways: int = 1) -> None:
        self.base, self.cycle, self._stretch = base, cycle, stretch
        self._first = 2 * cycle * ways
        self._reach = stretch + 10  # neighbouring steps that define the typical time
        self.steps: list[tuple[str, float]] = []
        self._begun = 0.0

    def begin(self) -> None:
        """Start timing a step."""
        self._begun = time.perf_counter()

    def end(self, name: str) -> None:
        """Record the time of a step; synchronise the GPU before the variant changes."""
        if torch.cuda.is_available() and (len(self.steps) + 1) % self._stretch == 0:
            torch.cuda.synchronize()
        self.steps.append((name, time.perf_counter() - self._begun))

    def seconds(self) -> float:
        """Return the median step time of the base."""
        return statistics.median(seconds for name, seconds in self.steps if name == self.base)

    def ratios(self) -> dict[str, float]:
        """Return the step time of each variant relative to the base."""
        places: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(self.cycle)])
        for index, (name, seconds) in enumerate(self.steps):
            if index >= self._first:
                places[name][index % self.cycle].append(seconds / self._usual_at(index))
        means = {
            name: statistics.mean(statistics.median(seen) for seen in each)
            for name, each in places.items()
        }
        return {name: mean / means[self.base] for name, mean in means.items()}

    def _usual_at(self, index: int) -> float:
        around = self.steps[max(0, index - self._reach) : index + self._reach + 1]
        return statistics.median(seconds for name, seconds in around if name == self.base)
