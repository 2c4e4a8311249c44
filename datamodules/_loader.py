"""The loader of all DataModules: an epoch of whole batches that can be left and taken up again."""

import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from ._part import Batch, Indices, Part

__all__ = ["BatchLoader"]

Job = tuple[Indices, int, int]  # which samples, seed, epoch


class BatchLoader:
    """Cuts the batches of one rank, in an order that is a function of (seed, epoch) alone.

    With several ranks, batch i of all ranks together is what one process with a batch that many
    times as large would have as batch i. All ranks have the same number of batches, of which the
    last two may be smaller, and no sample is repeated to get there (unless a batch is one sample).

    It is no torch `DataLoader`, so that Lightning does not put a sampler of its own in its place,
    which repeats samples to make ranks even. `state_dict` says how many samples were handed out;
    Lightning saves it, and a resumed epoch goes on behind them, also with another number of ranks
    or another batch size.

    Without a Trainer, every complete pass is followed by the next epoch's.

    Args:
        part: The samples.
        batch_size: Samples in a batch of this rank.
        shuffle: Whether an epoch has an order of its own.
        rank: Which of the ranks this is.
        world_size: How many ranks there are.
        num_workers: Processes that cut batches.
        pin_memory: Whether batches are put into page-locked memory.
    """

    def __init__(
        self,
        part: Part,
        batch_size: int,
        shuffle: bool = False,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.part = part
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # set by seed_everything
        self.epoch = 0
        self._seen = 0  # samples of this epoch that all ranks have handed out
        self._resume_behind = 0
        self._jobs: list[Job] = []  # of the pass under way
        self._workers: DataLoader[Batch] = DataLoader(
            _Cutter(part),
            batch_size=None,
            sampler=self._jobs,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # its seeds for workers are not drawn from the run's
        )

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Where Lightning looks for `set_epoch`; of a `sampler` it would expect more."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the augmentation of an epoch."""
        if epoch != self.epoch:
            self.epoch, self._resume_behind = epoch, 0

    def __len__(self) -> int:
        return len(self._ends(len(self.part)))

    def _ends(self, samples: int) -> list[int]:
        """Return where the batches of all ranks together end."""
        size = self.batch_size * self.world_size
        ends = [*range(size, samples, size), samples]
        if len(ends) > 1 and self.batch_size > 1:
            # A rank without a last batch would leave the others waiting for ever.
            ends[-2] = min(ends[-2], samples - self.world_size)
        return ends

    def batches(self, behind: int = 0) -> list[Indices]:
        """Return the samples of every batch of this rank, behind those that were seen."""
        order = np.arange(len(self.part))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        of_all_ranks = np.split(order[behind:], self._ends(len(order) - behind)[:-1])
        # Fewer samples than ranks, which is rare, are repeated.
        enough = (np.resize(b, max(len(b), self.world_size)) for b in of_all_ranks if len(b))
        return [batch[self.rank :: self.world_size] for batch in enough]

    # Runs at the first `next`: Lightning makes the iterator before it tells the epoch.
    def __iter__(self) -> Iterator[Batch]:
        behind, self._resume_behind = self._resume_behind, 0
        self._seen = behind
        self._jobs[:] = [(batch, self.seed, self.epoch) for batch in self.batches(behind)]
        for batch, end in zip(self._workers, self._ends(len(self.part) - behind), strict=False):
            self._seen = behind + end
            yield batch
        self.epoch, self._seen = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return where in which epoch this is; the same on every rank."""
        return {"seed": self.seed, "epoch": self.epoch, "samples_seen": self._seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the samples that were seen, in the order of the run that saw them."""
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._seen = self._resume_behind = state["samples_seen"]


class _Cutter(Dataset[Batch]):
    """Cuts the batch that a job names; this is what worker processes hold."""

    def __init__(self, part: Part) -> None:
        self.part = part

    @override
    def __getitem__(self, job: Job) -> Batch:
        return self.part.cut(*job)
