"""The data loader for all DataModules, which can resume in the middle of an epoch."""

import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from ._files import Indices
from ._splits import Batch, Samples, Split

Job = tuple[Indices, int, int]  # indices, seed, epoch


class BatchLoader:
    """Iterates over the batches of one rank, in an order that depends only on (seed, epoch).

    The i-th batches of all ranks together equal the i-th batch of a single process with the global
    batch size. All ranks have the same number of batches, of which the last two may be smaller. No
    sample is repeated, unless `batch_size` is 1.

    This is not a torch `DataLoader`, so Lightning does not replace its sampler with one that
    repeats samples. Lightning saves the loader's `state_dict`, which contains the number of samples
    trained on. A resumed epoch continues after these samples. The number of ranks may change if the
    global batch size stays the same.

    Without a Trainer, every complete iteration advances to the next epoch. Only one iteration can
    be active, because a second one would take over the state and the worker processes.

    Args:
        part: The samples.
        batch_size: Batch size per rank.
        shuffle: Whether to shuffle every epoch.
        place: Function that returns (rank, world size). It is called lazily, because the process
            group may not exist yet. Defaults to the rank and world size of that group.
        progress: Function that returns how many batches of the epoch the Trainer has processed and
            completed. An interrupted batch is repeated after resuming.
        num_workers: Number of worker processes.
        pin_memory: Whether to copy batches into pinned memory.
    """

    def __init__(
        self,
        part: Samples,
        batch_size: int,
        shuffle: bool = False,
        place: Callable[[], tuple[int, int]] | None = None,
        progress: Callable[[], tuple[int, int]] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.part = part
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.place = place or rank_and_world_size
        self.progress = progress
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # set by seed_everything
        self.epoch = 0
        # Samples that all ranks have yielded in this epoch: (before the last batch, including it).
        self._samples_yielded = (0, 0)
        self._resume_offset = 0
        self._job_sampler = _JobSampler()
        self._dataloader: DataLoader[Batch] | None = None  # created by the iterating process

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Object through which Lightning calls `set_epoch`.

        An attribute `sampler` would do too, but would need a larger interface.
        """
        return SimpleNamespace(sampler=self)

    @property
    def _iterator(self) -> Any:
        """Iterator whose worker processes Lightning shuts down."""
        return None if self._dataloader is None else self._dataloader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if self._dataloader is not None:
            self._dataloader._iterator = iterator

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the samples and their augmentation."""
        if epoch != self.epoch:
            self.epoch, self._resume_offset, self._samples_yielded = epoch, 0, (0, 0)

    def __len__(self) -> int:
        return len(self._batch_ends(len(self.part)))

    def _batch_ends(self, samples: int) -> list[int]:
        """Return the end offsets of the global batches."""
        _, world_size = self.place()
        size = self.batch_size * world_size
        ends = [*range(size, samples, size), samples]
        if len(ends) > 1 and self.batch_size > 1:
            # If one rank had no last batch, the other ranks would wait for it forever.
            ends[-2] = min(ends[-2], samples - world_size)
        return ends

    def batches(self, offset: int = 0) -> list[Indices]:
        """Return the indices in every batch of this rank, after skipping `offset` samples."""
        rank, world_size = self.place()
        order = np.arange(len(self.part))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        global_batches = np.split(order[offset:], self._batch_ends(len(order) - offset)[:-1])
        # A batch with fewer samples than ranks (rare) repeats samples.
        filled = (np.resize(b, max(len(b), world_size)) for b in global_batches if len(b))
        return [batch[rank::world_size] for batch in filled]

    # A generator, because Lightning creates the iterator before it sets the epoch.
    def __iter__(self) -> Iterator[Batch]:
        offset, self._resume_offset = self._resume_offset, 0
        self._samples_yielded = (offset, offset)
        self._job_sampler.jobs = [(batch, self.seed, self.epoch) for batch in self.batches(offset)]
        if self._dataloader is None:
            self._dataloader = self._make_dataloader()
        ends = self._batch_ends(len(self.part) - offset)
        for batch, end in zip(self._dataloader, ends, strict=False):
            self._samples_yielded = (self._samples_yielded[1], offset + end)
            yield batch
        self.epoch, self._samples_yielded = self.epoch + 1, (0, 0)

    def _make_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(
            _BatchDataset(self.part),
            batch_size=None,
            sampler=self._job_sampler,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory and isinstance(self.part, Split),
            persistent_workers=self.num_workers > 0,
            generator=torch.Generator(),  # do not draw worker seeds from the global generator
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataloader": None}

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, which is identical on all ranks."""
        size = self.batch_size * self.place()[1]
        before, seen = self._samples_yielded
        yielded = math.ceil(seen / size)
        trained, done = self.progress() if self.progress else (yielded, yielded)
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "samples": len(self.part),
            "samples_seen": before if trained < yielded else seen,
            "samples_a_step": size,
            "epoch_is_done": int(seen == len(self.part) and done == trained == yielded),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the samples already seen, in the same order as the saved run."""
        done = bool(state.get("epoch_is_done"))  # the next epoch may use different data
        if not done and state.get("samples") != len(self.part):
            raise ValueError(
                f"This checkpoint was saved during an epoch of {state.get('samples')} training "
                f"samples, but this run has {len(self.part)}: resume with the same data, or use a "
                "checkpoint saved after an epoch (`every_n_epochs`)."
            )
        size, saved = self.batch_size * self.place()[1], state["samples_a_step"]
        if not done and size != saved and state["samples_seen"]:
            raise ValueError(  # Lightning would miscount the rest of the epoch
                f"This checkpoint was saved during an epoch with batches of {saved} samples in "
                f"total, but this run uses {size}: resume with the same `batch_size` x ranks, or "
                "use a checkpoint saved after an epoch (`every_n_epochs`)."
            )
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._resume_offset = len(self.part) if done else state["samples_seen"]
        self._samples_yielded = (self._resume_offset, self._resume_offset)


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank and world size of torch's process group, or (0, 1) without a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class _JobSampler(Sampler[Job]):
    """Yields the jobs for the next iteration."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    @override
    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class _BatchDataset(Dataset[Batch]):
    """Assembles batches, in the worker processes if there are any."""

    def __init__(self, part: Samples) -> None:
        self.part = part

    @override
    def __getitem__(self, job: Job) -> Batch:
        return self.part.get_batch(*job)
