"""Windows of a long text, cut where random starts or equal distances say."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import Dataset

from ._part import Batch, Indices
from ._tables import ArrayTable

__all__ = ["Windows"]


@dataclass
class Windows(Dataset[Batch]):
    """Windows of a text, as pairs of bytes and the bytes that follow them.

    Random windows are drawn for a whole epoch at once, so that a window is a function of (seed,
    epoch, index), independent of batch, worker and rank.
    """

    text: ArrayTable  # bytes, in memory or memory-mapped
    context: int  # bytes of a window
    count: int  # windows of an epoch
    random: bool
    _cached_starts: tuple[tuple[int, int], Indices] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.count

    def cut(self, indices: Indices, seed: int = 0, epoch: int = 0) -> Batch:
        """Return the given windows, and the same moved on by one byte."""
        starts = self._starts(seed, epoch)[indices]
        taken = self.text.array[starts[:, None] + np.arange(self.context + 1)]
        windows = torch.from_numpy(taken.astype(np.int64))
        return windows[:, :-1], windows[:, 1:]

    def _starts(self, seed: int, epoch: int) -> Indices:
        if not self.random:
            seed = epoch = 0
        if self._cached_starts is None or self._cached_starts[0] != (seed, epoch):
            last = len(self.text) - self.context - 1
            if self.random:
                drawn = np.random.default_rng([seed, epoch, 1]).integers(0, last + 1, self.count)
            else:
                drawn = np.linspace(0, last, self.count).astype(np.int64)
            self._cached_starts = ((seed, epoch), drawn)
        return self._cached_starts[1]
