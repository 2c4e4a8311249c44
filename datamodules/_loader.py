"""The loader of all DataModules: an epoch of whole batches that can be left and taken up again."""

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

from ._part import Batch, Indices, Part

__all__ = ["BatchLoader", "place_in_process_group"]

Job = tuple[Indices, int, int]  # which samples, seed, epoch


class BatchLoader:
    """Cuts the batches of one rank, in an order that is a function of (seed, epoch) alone.

    With several ranks, batch i of all ranks together is what one process with a batch that many
    times as large would have as batch i. All ranks have the same number of batches, of which the
    last two may be smaller, and no sample is repeated to get there (unless a batch is one sample).

    It is no torch `DataLoader`, so that Lightning does not put a sampler of its own in its place,
    which repeats samples to make ranks even. `state_dict` says how many samples were trained on;
    Lightning saves it, and a resumed epoch goes on behind them, also when another number of ranks
    shares batches of the same size.

    Without a Trainer, every complete pass is followed by the next epoch's. There is one pass at a
    time: a second one takes over the state, and the worker processes.

    Args:
        part: The samples.
        batch_size: Samples in a batch of this rank.
        shuffle: Whether an epoch has an order of its own.
        place: Tells which of how many ranks this is; asked when it is needed, because ranks may
            not exist yet. Torch's process group if None.
        progress: Tells how many batches of the epoch the Trainer has trained on, and how many of
            these it is done with; a batch that it was interrupted in is trained on again then.
        num_workers: Processes that cut batches.
        pin_memory: Whether batches are put into page-locked memory.
    """

    def __init__(
        self,
        part: Part,
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
        self.place = place or place_in_process_group
        self.progress = progress
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # set by seed_everything
        self.epoch = 0
        # Samples of this epoch that all ranks have handed out: before the last batch, and with it.
        self._handed_out = (0, 0)
        self._resume_behind = 0
        self._jobs = _Jobs()
        self._workers: DataLoader[Batch] | None = None  # made by the process that iterates

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Where Lightning looks for `set_epoch`; of a `sampler` it would expect more."""
        return SimpleNamespace(sampler=self)

    @property
    def _iterator(self) -> Any:
        """Where Lightning looks for worker processes, to end them with the run."""
        return None if self._workers is None else self._workers._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if self._workers is not None:
            self._workers._iterator = iterator

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the augmentation of an epoch."""
        if epoch != self.epoch:
            self.epoch, self._resume_behind, self._handed_out = epoch, 0, (0, 0)

    def __len__(self) -> int:
        return len(self._ends(len(self.part)))

    def _ends(self, samples: int) -> list[int]:
        """Return where the batches of all ranks together end."""
        _, world_size = self.place()
        size = self.batch_size * world_size
        ends = [*range(size, samples, size), samples]
        if len(ends) > 1 and self.batch_size > 1:
            # A rank without a last batch would leave the others waiting for ever.
            ends[-2] = min(ends[-2], samples - world_size)
        return ends

    def batches(self, behind: int = 0) -> list[Indices]:
        """Return the samples of every batch of this rank, behind those that were seen."""
        rank, world_size = self.place()
        order = np.arange(len(self.part))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        of_all_ranks = np.split(order[behind:], self._ends(len(order) - behind)[:-1])
        # Fewer samples than ranks, which is rare, are repeated.
        enough = (np.resize(b, max(len(b), world_size)) for b in of_all_ranks if len(b))
        return [batch[rank::world_size] for batch in enough]

    # Runs at the first `next`: Lightning makes the iterator before it tells the epoch.
    def __iter__(self) -> Iterator[Batch]:
        behind, self._resume_behind = self._resume_behind, 0
        self._handed_out = (behind, behind)
        self._jobs.jobs = [(batch, self.seed, self.epoch) for batch in self.batches(behind)]
        if self._workers is None:
            self._workers = self._make_workers()
        for batch, end in zip(self._workers, self._ends(len(self.part) - behind), strict=False):
            self._handed_out = (self._handed_out[1], behind + end)
            yield batch
        self.epoch, self._handed_out = self.epoch + 1, (0, 0)

    def _make_workers(self) -> DataLoader[Batch]:
        return DataLoader(
            _Cutter(self.part),
            batch_size=None,
            sampler=self._jobs,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.num_workers > 0,
            generator=torch.Generator(),  # its seeds for workers are not drawn from the run's
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": None}

    def state_dict(self) -> dict[str, int]:
        """Return where in which epoch this is; the same on every rank."""
        size = self.batch_size * self.place()[1]
        before, seen = self._handed_out
        handed_out = math.ceil(seen / size)
        trained, done = self.progress() if self.progress else (handed_out, handed_out)
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "samples": len(self.part),
            "samples_seen": before if trained < handed_out else seen,
            "samples_a_step": size,
            "epoch_is_done": int(seen == len(self.part) and done == trained == handed_out),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the samples that were seen, in the order of the run that saw them."""
        done = bool(state.get("epoch_is_done"))  # then the next epoch may be of other data
        if not done and state.get("samples") != len(self.part):
            raise ValueError(
                f"This checkpoint is from within an epoch of {state.get('samples')} training "
                f"samples, got {len(self.part)}: resume it with the same data, or take one that "
                "was saved after an epoch (`every_n_epochs`)."
            )
        size, saved = self.batch_size * self.place()[1], state["samples_a_step"]
        if not done and size != saved and state["samples_seen"]:
            raise ValueError(  # Lightning would count the rest of the epoch wrongly
                f"This checkpoint is from within an epoch of batches of {saved} samples on all "
                f"ranks together, got {size}: resume it with the same `batch_size` x ranks, or "
                "take one that was saved after an epoch (`every_n_epochs`)."
            )
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._resume_behind = len(self.part) if done else state["samples_seen"]
        self._handed_out = (self._resume_behind, self._resume_behind)


def place_in_process_group() -> tuple[int, int]:
    """Return which of how many processes this is."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class _Jobs(Sampler[Job]):
    """The batches of the pass that starts next."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    @override
    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class _Cutter(Dataset[Batch]):
    """Cuts the batch that a job names; this is what worker processes hold."""

    def __init__(self, part: Part) -> None:
        self.part = part

    @override
    def __getitem__(self, job: Job) -> Batch:
        return self.part.cut(*job)
