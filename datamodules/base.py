"""What all DataModules share: files, cache, splits, loaders, and facts on classes."""

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from ._files import Download, DownloadError, fetch
from ._loader import BatchLoader, place_in_process_group
from ._part import Batch, Part
from ._prepared import PreparedData
from ._tables import Save, Tables, cached_tables, tables_in_memory

__all__ = ["BaseDataModule", "one_of"]


class BaseDataModule(PreparedData):
    """A dataset that is decoded once, and then cut into whole batches by index.

    A dataset's class says which files it needs (`downloads`, `sources`), how they become tables
    (`decode`), and which rows are training, validation and test samples (`split`).

    Args:
        batch_size: Samples in a training batch, on every rank.
        eval_batch_size: Samples in a batch of validation, test and predict; `batch_size` if None.
        root: Folder of the datasets; the environment variable DG_DATA or `data` if None.
        cache_dir: Folder of decoded data; DG_CACHE or `.dg_cache` in the root if None.
        split_seed: Seed of the split, and of what else is drawn once, such as clips of silence.
        num_workers: Processes that cut batches. Samples are decoded already, so 0 is mostly best.
        pin_memory: Whether batches are put into page-locked memory.
    """

    downloads: tuple[Download, ...] = ()
    # Packages, and what brings them.
    needs: ClassVar[Mapping[str, str]] = {"sklearn": "scikit-learn"}

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
        self.eval_batch_size = eval_batch_size
        self.split_seed = int(split_seed)
        self.num_workers = num_workers
        least = {"batch_size": 1, "eval_batch_size": 1, "split_seed": 0, "num_workers": 0}
        for name, smallest in least.items():
            if (value := getattr(self, name)) is not None and value < smallest:
                raise ValueError(f"`{name}` must be at least {smallest}, got {value}.")
        if self.split_seed >= 2**32:
            raise ValueError(f"`split_seed` must be below 2**32, got {self.split_seed}.")
        self.pin_memory = pin_memory
        self.root = Path(root or os.environ.get("DG_DATA") or "data").absolute()
        cache = cache_dir or os.environ.get("DG_CACHE") or self.root / ".dg_cache"
        self.cache_dir = Path(cache).absolute()
        self._opened: Tables | None = None
        self._parts: dict[str, Part] = {}
        self._stage = ""

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

    # What follows from it.

    @override
    def prepare_data(self) -> None:
        _, missing = self._look_for_sources()
        for download in self._bringing(missing):
            try:
                fetch(download, self.root)
            except DownloadError as error:
                raise self._lacking(missing, f"; the download failed ({error})") from error
            except OSError as error:
                why = f"; it cannot be written there ({error.strerror})"
                raise self._lacking(missing, why) from error
        self._tables()

    def _look_for_sources(self) -> tuple[list[Any], list[Path]]:
        """Return what identifies the files that are there, and those that are not."""
        there: list[Any] = []
        missing = []
        for path in self.sources():
            try:
                found = os.stat(path)
                name = str(path).removeprefix(str(self.root))  # a root may be moved
                # The last one changes with the content, whatever the others are set to.
                there.append((name, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
            except (FileNotFoundError, NotADirectoryError):
                missing.append(Path(path))
        return there, missing

    def _bringing(self, missing: Sequence[Path]) -> list[Download]:
        """Return the downloads that bring missing files."""
        targets = {d: self.root / d.target for d in self.downloads}
        return [d for d in targets if any(p.is_relative_to(targets[d]) for p in missing)]

    def _lacking(self, missing: Sequence[Path], why: str = "") -> FileNotFoundError:
        """Return the error that says what is missing, where it belongs and how to get it."""
        paths = ", ".join(map(str, missing[:4])) + ", ..." * (len(missing) > 4)
        ways = ["name a file that is there"]
        if downloads := self._bringing(missing):
            for download in downloads:
                if download.folder and (folder := self.root / download.target).exists():
                    why += f"; remove {folder}, for it is incomplete"
            unpacked = {
                d: f" and unpack it to {self.root / d.target}" for d in downloads if d.folder
            }
            ways = [f"get {d.url}{unpacked.get(d, '')}" for d in downloads]
            ways += ["or point `root` or DG_DATA to the folder that holds the dataset"]
        return FileNotFoundError(f"{type(self).__name__} misses {paths}{why}: {', '.join(ways)}.")

    def _tables(self) -> Tables:
        if self._opened is None:
            files, missing = self._look_for_sources()
            if missing:
                raise self._lacking(missing)
            if files:
                name = type(self).__name__.removesuffix("DataModule")
                origin = [files, self.settings()]
                self._opened = cached_tables(self.cache_dir, name, origin, self.decode)
            else:  # what ships with a library, or is in memory, is not kept again
                self._opened = tables_in_memory(self.decode)
        return self._opened

    @override
    def setup(self, stage: str) -> None:
        self._stage = str(getattr(stage, "value", stage))
        parts = self._parts or self.split(self._tables())
        self.check_parts(parts)
        if self._parts:
            return
        self._parts = parts
        rank_zero_info(f"{type(self).__name__}: {self.describe_parts()}.")

    def describe_parts(self) -> str:
        """Say how many samples there are, and how often a constant answer is right."""
        sizes = ", ".join(f"{name} {len(part):,}" for name, part in self._parts.items())
        return (
            f"{sizes} samples of {self.num_classes} classes; always saying the most frequent one "
            f"is right in {self.majority_rate():.1%} of the test part"
        )

    def check_parts(self, parts: Mapping[str, Part]) -> None:
        """Refuse parts that cannot be trained or evaluated on."""
        if self.num_classes < 2:
            raise ValueError(f"Expected at least 2 classes, got {self.class_names[0]!r} alone.")
        for name, part in parts.items():
            if not (counts := self._counts(part)).all():
                empty = self.class_names[int(counts.argmin())]
                raise ValueError(
                    f"Class {empty!r} has no samples in the {name} part: the dataset is "
                    "incomplete, or its labels are wrong."
                )

    @property
    def facts(self) -> dict[str, Any]:
        """What only the files know, such as class names; they are fetched if need be."""
        if self._opened is None:
            self.prepare_data()
        return self._tables().facts

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def part(self, name: str) -> Part:
        """Return the samples of `train`, `val` or `test`."""
        if not self._parts:
            raise RuntimeError(f"{type(self).__name__}.setup('fit') must be called first.")
        return self._parts[one_of("part", name, *self._parts)]

    def class_counts(self) -> dict[str, dict[str, int]]:
        """Return the samples of every class in every part."""
        return {
            name: dict(zip(self.class_names, self._counts(self.part(name)).tolist(), strict=True))
            for name in ("train", "val", "test")
        }

    def _counts(self, part: Part) -> Tensor:
        return torch.bincount(part.labels, minlength=self.num_classes)

    def majority_rate(self, part: str = "test") -> float:
        """Return the accuracy of always saying the most frequent class of the training samples."""
        most = int(self._counts(self.part("train")).argmax())
        return float((self.part(part).labels == most).float().mean())

    @property
    def class_weights(self) -> Tensor:
        """Weights that give every class of the training samples the same total weight."""
        part = self.part("train")
        return len(part) / (self.num_classes * self._counts(part))

    @override
    def train_dataloader(self) -> BatchLoader:
        overfitting = getattr(self.trainer, "overfit_batches", 0) > 0  # on the same batches always
        return self._loader("train", shuffle=not overfitting)

    @override
    def val_dataloader(self) -> BatchLoader:
        return self._loader("val")

    @override
    def test_dataloader(self) -> BatchLoader:
        return self._loader("test")

    @override
    def predict_dataloader(self) -> DataLoader[Batch]:
        # A plain one, which Lightning can ask for the indices of the samples it predicts.
        return DataLoader(
            self.part_to_predict(),
            batch_size=self.eval_batch_size or self.batch_size,
            collate_fn=_whole,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # no seed for workers is drawn from the run's
        )

    def part_to_predict(self) -> Part:
        """Return the samples of `predict`, in the order of the dataset."""
        return self.part("test")

    def _loader(self, part: str, shuffle: bool = False) -> BatchLoader:
        training = part == "train"
        return BatchLoader(
            self.part(part),
            self.batch_size if training else self.eval_batch_size or self.batch_size,
            shuffle=shuffle,
            place=self._place,
            progress=self._progress if training and self.trainer is not None else None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def _place(self) -> tuple[int, int]:
        """Return which of how many processes that share the samples this is."""
        if self.trainer is None:
            return place_in_process_group()
        # Ranks that hold parts of one model see the same samples: strategies know which.
        of = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return int(of["rank"]), int(of["num_replicas"])

    def _progress(self) -> tuple[int, int]:
        """Return how many batches of the epoch the Trainer has trained on, and is done with."""
        assert self.trainer is not None
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.processed, progress.completed


def one_of(name: str, value: str, *choices: str) -> str:
    """Return a setting that has one of these values; the command line checks that already."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")
    return value


def _whole(batch: Any) -> Any:
    return batch  # which a part has cut already
