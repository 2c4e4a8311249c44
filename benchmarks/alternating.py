"""Compare ways of training in one run, in turns: slow spells of the machine hit all of them.

Machines are noisy: for a while all steps take a fifth longer, and single ones many times as long.
So the ways alternate; a step is measured by the usual one around it; and of the steps at the same
place of a cycle (as between two updates) the median is taken, before they are added up. What
belongs to a place, as an update, stays in; what hits any step does not.
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
    """A loader that gives one batch again and again, without any cost."""

    def __init__(self, batch: Any, times: int = 100_000) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, self.times)


def turns(names: list[str], base: str, cycle: int, stretch: int, rounds: int) -> Iterator[str]:
    """Give the name of every step: each way in turns with the base, both at every place.

    Args:
        names: The ways to compare.
        base: The one to compare with.
        cycle: Steps after which what is not done in every step comes again.
        stretch: Steps of the same way in a row; must divide the cycle.
        rounds: How often every way has as many steps as a cycle, after the first time.
    """
    for _ in range(rounds + 1):
        for name in names:
            for first in (name, base), (base, name):
                for place in range(cycle):
                    yield first[place // stretch % 2]


class StepTimes:
    """The seconds of every step, by what was done in it and its place in the cycle.

    Args:
        base: The way that the others are measured by.
        cycle: Steps after which what is not done in every step comes again.
        stretch: Steps of the same way in a row.
        ways: How many ways are compared with the base; the first round of all is left out.
    """

    def __init__(self, base: str, cycle: int, stretch: int, ways: int = 1) -> None:
        self.base, self.cycle, self._stretch = base, cycle, stretch
        self._first = 2 * cycle * ways
        self._reach = stretch + 10  # steps around one that tell how long a usual one takes
        self.steps: list[tuple[str, float]] = []
        self._begun = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._begun = time.perf_counter()

    def end(self, name: str) -> None:
        """Take the time of a step. A GPU is waited for before another way has its turn."""
        if torch.cuda.is_available() and (len(self.steps) + 1) % self._stretch == 0:
            torch.cuda.synchronize()
        self.steps.append((name, time.perf_counter() - self._begun))

    def seconds(self) -> float:
        """Return the time of a usual step of the base."""
        return statistics.median(seconds for name, seconds in self.steps if name == self.base)

    def ratios(self) -> dict[str, float]:
        """Return by name the time of a step over one of the base."""
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
