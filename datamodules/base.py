"""What all DataModules share: files, cache, splits, loaders, and facts on classes."""

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from ._files import Download, DownloadError, fetch
from ._loader import BatchLoader
from ._part import Augmentation, Batch, Normalize, Part, stratified_split
from ._tables import Save, Tables, cached_tables, tables_in_memory

__all__ = ["BaseDataModule", "DataOptions"]


class DataOptions(TypedDict, total=False):
    """What every DataModule can be told.

    Args:
        root: Folder of the datasets; the environment variable DG_DATA or `data` if None.
        cache_dir: Folder of decoded data; DG_CACHE or `.dg_cache` in the root if None.
        split_seed: Seed of what is drawn once: the split, and samples that are left out or made.
        num_workers: Processes that cut batches. They are decoded and in memory: 0 is mostly best.
        pin_memory: Whether batches are put into page-locked memory.
    """

    root: str | None
    cache_dir: str | None
    split_seed: int
    num_workers: int
    pin_memory: bool


class BaseDataModule(pl.LightningDataModule):
    """A dataset that is decoded once, and then cut into whole batches by index.

    A dataset's class says which files it needs (`downloads`, `sources`), how they become tables
    (`decode`), and which rows are training, validation and test samples (`split`).

    Args:
        batch_size: Samples in a training batch, on every rank.
        eval_batch_size: Samples in a batch of validation, test and predict; `batch_size` if None.
        root: See `DataOptions`, as for the others.
        cache_dir: See there.
        split_seed: See there.
        num_workers: See there.
        pin_memory: See there.
    """

    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    downloads: tuple[Download, ...] = ()
    needs: ClassVar[Mapping[str, str]] = {
        "sklearn": "scikit-learn"
    }  # packages, and what brings them

    def __init__(
        self,
        batch_size: int,
        eval_batch_size: int | None = None,
        root: str | None = None,
        cache_dir: str | None = None,
        split_seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        for package, source in {**BaseDataModule.needs, **self.needs}.items():
            if find_spec(package) is None:
                name = type(self).__name__
                raise ModuleNotFoundError(f"{name} needs {package}: pip install {source}")
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.split_seed = split_seed
        self.num_workers = num_workers
        least = {"batch_size": 1, "eval_batch_size": 1, "split_seed": 0, "num_workers": 0}
        for name, smallest in least.items():
            if (value := getattr(self, name)) < smallest:
                raise ValueError(f"`{name}` must be at least {smallest}, got {value}.")
        self.pin_memory = pin_memory
        self.root = Path(root or os.environ.get("DG_DATA") or "data")
        self.cache_dir = Path(cache_dir or os.environ.get("DG_CACHE") or self.root / ".dg_cache")
        self._parts: dict[str, Part] = {}

    # What a dataset's class says.

    @abstractmethod
    def sources(self) -> Sequence[Path | str]:
        """Return the files that are decoded, whether they are there or not."""

    def settings(self) -> Mapping[str, Any]:
        """Return what decoding depends on besides the files."""
        return {}

    @abstractmethod
    def decode(self, save: Save) -> None:
        """Make tables of the files."""

    @abstractmethod
    def split(self, tables: Tables) -> dict[str, Part]:
        """Return the parts `train`, `val` and `test`."""

    def image_parts(
        self,
        tables: Tables,
        val_share: float,
        normalize: Normalize,
        augmentation: Augmentation | None = None,
    ) -> dict[str, Part]:
        """Return parts of images whose validation samples are taken off the training ones."""
        images, labels = tables["train_images"], tables.labels("train_labels")
        test_images, test_labels = tables["test_images"], tables.labels("test_labels")
        train, val = stratified_split(
            np.arange(len(labels)), labels, val_share, self.split_seed, self.class_names
        )
        return {
            "train": Part(images, train, labels[train], normalize, augmentation),
            "val": Part(images, val, labels[val], normalize),
            "test": Part(test_images, np.arange(len(test_labels)), test_labels, normalize),
        }

    # What follows from it.

    @override
    def prepare_data(self) -> None:
        for download in self._wanted():
            try:
                fetch(download, self.root)
            except DownloadError as error:
                raise self._lacking(f", and the download failed ({error})") from error
            except OSError as error:
                raise self._lacking(f", and cannot be written there ({error.strerror})") from error
        self._tables()

    def _look_for_sources(self) -> tuple[list[Any], list[Path]]:
        """Return names, sizes and times of the files that are there, and those that are not."""
        there: list[Any] = []
        missing = []
        for path in self.sources():
            try:
                found = os.stat(path)
                name = str(path).removeprefix(str(self.root))  # a root may be moved
                there.append((name, found.st_size, found.st_mtime_ns))
            except (FileNotFoundError, NotADirectoryError):
                missing.append(Path(path))
        return there, missing

    def _wanted(self) -> list[Download]:
        """Return the downloads that bring missing files."""
        _, missing = self._look_for_sources()
        targets = {d: self.root / d.target for d in self.downloads}
        return [d for d in targets if any(p.is_relative_to(targets[d]) for p in missing)]

    def _lacking(self, why: str = "") -> FileNotFoundError:
        """Return the error that says what is missing, where it belongs and how to get it."""
        _, missing = self._look_for_sources()
        names = ", ".join(path.name for path in missing[:4]) + ", ..." * (len(missing) > 4)
        urls = ", ".join(download.url for download in self._wanted())
        return FileNotFoundError(
            f"{type(self).__name__} misses {names} in {missing[0].parent}{why}: get "
            f"{urls or 'them'}, or point `root` or DG_DATA to the folder that holds the dataset."
        )

    def _tables(self) -> Tables:
        files, missing = self._look_for_sources()
        if missing:
            raise self._lacking()
        if not files:  # what ships with a library is not kept again
            return tables_in_memory(self.decode)
        name = type(self).__name__.removesuffix("DataModule")
        return cached_tables(self.cache_dir, name, [files, self.settings()], self.decode)

    @override
    def setup(self, stage: str) -> None:
        if self._parts:
            return
        tables = self._tables()
        self.facts = tables.facts
        self._parts = self.split(tables)
        if self.num_classes < 2:
            raise ValueError(f"Expected at least 2 classes, got {self.class_names[0]!r} alone.")
        for part, counts in self.class_counts().items():
            if empty := [name for name, count in counts.items() if not count]:
                raise ValueError(f"Class {empty[0]!r} has no samples in the {part} part.")
        sizes = ", ".join(f"{name} {len(part):,}" for name, part in self._parts.items())
        rank_zero_info(
            f"{type(self).__name__}: {sizes} samples of {self.num_classes} classes; always saying "
            f"the most frequent one is right in {self.majority_rate():.1%} of the test part."
        )

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What only the files know, such as class names; they are fetched if need be."""
        self.prepare_data()
        return self._tables().facts

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def class_counts(self) -> dict[str, dict[str, int]]:
        """Return the samples of every class in every part."""
        return {
            name: dict(zip(self.class_names, self._counts(part).tolist(), strict=True))
            for name, part in self._parts.items()
        }

    def _counts(self, part: Part) -> Tensor:
        return torch.bincount(part.labels, minlength=self.num_classes)

    def majority_rate(self, part: str = "test") -> float:
        """Return the accuracy of always saying the most frequent class of the training samples."""
        most = int(self._counts(self._parts["train"]).argmax())
        return float((self._parts[part].labels == most).float().mean())

    @property
    def class_weights(self) -> Tensor:
        """Weights that give every class of the training samples the same total weight."""
        part = self._parts["train"]
        return len(part) / (self.num_classes * self._counts(part))

    @override
    def train_dataloader(self) -> BatchLoader:
        overfitting = getattr(self.trainer, "overfit_batches", 0) > 0  # on the same batches always
        return self._loader("train", self.batch_size, shuffle=not overfitting)

    @override
    def val_dataloader(self) -> BatchLoader:
        return self._loader("val", self.eval_batch_size)

    @override
    def test_dataloader(self) -> BatchLoader:
        return self._loader("test", self.eval_batch_size)

    @override
    def predict_dataloader(self) -> DataLoader[Batch]:
        # A plain one, which Lightning can ask for the indices of the samples it predicts.
        return DataLoader(
            self.part_to_predict(),
            batch_size=self.eval_batch_size,
            collate_fn=_whole,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def part_to_predict(self) -> Part:
        """Return the samples of `predict`, in the order of the dataset."""
        return self._parts["test"]

    def _loader(self, part: str, batch_size: int, shuffle: bool = False) -> BatchLoader:
        if not self._parts:
            raise RuntimeError(f"{type(self).__name__}.setup('fit') comes before its loaders.")
        rank, world_size = self._place()
        return BatchLoader(
            self._parts[part],
            batch_size,
            shuffle=shuffle,
            rank=rank,
            world_size=world_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def _place(self) -> tuple[int, int]:
        """Return which of how many processes that share the samples this is."""
        if self.trainer is not None:
            # Ranks that hold parts of one model see the same samples: strategies know which.
            of = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
            return int(of["rank"]), int(of["num_replicas"])
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1


def _whole(batch: Any) -> Any:
    return batch  # which a part has cut already
