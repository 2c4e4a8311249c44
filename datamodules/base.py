"""Base class of all DataModules: downloads, cache, splits, loaders and class statistics."""

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Self, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from dg_lightning.training.checkpoint import open_checked

from ._files import Download, DownloadError, Save, Tables, cached_tables, fetch, tables_in_memory
from ._loader import BatchLoader, rank_and_world_size
from ._splits import Batch, Split, on_device


class PreparedData(pl.LightningDataModule):
    """A DataModule that saves its class names, input shape and scaling in the checkpoint."""

    _parts: dict[str, Split]

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """Class names, in label order."""

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""

    @abstractmethod
    def part_to_predict(self) -> Split:
        """Return the samples for `predict`, in dataset order."""

    def preparation(self) -> dict[str, Any]:
        """Return the class names, input shape and scaling as plain values."""
        scaling: dict[str, Any] = getattr(self.part_to_predict().prepare, "plain", dict)()
        names, shape = list(self.class_names), list(self.input_shape)
        return {"class_names": names, "input_shape": shape, **scaling}

    def use_preparation(self, preparation: Mapping[str, Any]) -> None:
        """Prepare samples as they were prepared in training.

        Args:
            preparation: The preparation of a trained model (`GatedClassifier.preparation`) or of
                another DataModule.

        Raises:
            ValueError: If this data cannot be prepared in the same way.
        """
        for name in ("class_names", "input_shape"):
            trained, here = list(preparation.get(name) or ()), list(getattr(self, name))
            if trained and trained != here:
                raise ValueError(
                    f"The checkpoint was trained with {name} {_abbreviate(trained)}, "
                    f"but {type(self).__name__} has {_abbreviate(here)}: use the original data."
                )

    @classmethod
    @override
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a DataModule from a checkpoint.

        `weights_only=False` disables all checks, so a file may run arbitrary code when it is
        loaded. See `dg_lightning.trust`.
        """
        if weights_only is False:
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, False, **kwargs
            )
        with open_checked(cls, checkpoint_path, hparams_file) as (file, _, hparams):
            return super().load_from_checkpoint(
                file, map_location, weights_only=True, **(hparams | kwargs)
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"preparation": self.preparation()} if self._parts else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if isinstance(state_dict.get("preparation"), dict):
            self.use_preparation(state_dict["preparation"])

    def describe_samples(self) -> dict[str, Sequence[Any]]:
        """Return the columns of `predictions.csv` that describe each sample.

        The first column identifies the sample. `true_label` is empty if the label is unknown.
        """
        part = self.part_to_predict()
        names = [self.class_names[label] for label in part.labels.tolist()]
        return {"index": range(len(part)), "true_label": names, "part": ["test"] * len(part)}


def _abbreviate(values: list[Any]) -> str:
    return f"[{', '.join(map(str, values[:6]))}{', ...' * (len(values) > 6)}]"


Choice = TypeVar("Choice", bound=str)


class BaseDataModule(PreparedData):
    """A dataset that is decoded once and then read in whole batches.

    Subclasses define which files they need (`downloads`, `sources`), how to decode them into tables
    (`decode`), and which rows are training, validation and test samples (`split`).

    Args:
        batch_size: Training batch size per rank.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        root: Folder that contains the datasets. Defaults to the environment variable DG_DATA, or to
            `data` if it is not set.
        cache_dir: Folder for decoded data. Defaults to the environment variable DG_CACHE, or to
            `.dg_cache` in the root if it is not set.
        split_seed: Seed for the split and for other one-time sampling, such as silent clips.
        num_workers: Worker processes. Samples are already decoded, so 0 is usually best.
        pin_memory: Whether to copy batches into pinned memory.
        device_cache: `auto` keeps samples on the CUDA device if they fit in a quarter of its free
            memory. `never` copies every batch from the host.
    """

    downloads: tuple[Download, ...] = ()
    # Import name -> name for `pip install`.
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
        device_cache: Literal["auto", "never"] = "auto",
    ) -> None:
        super().__init__()
        for package, source in {**BaseDataModule.needs, **self.needs}.items():
            if find_spec(package) is None:
                name = type(self).__name__
                raise ModuleNotFoundError(f"{name} needs {package}: pip install {source}")
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.split_seed, self.num_workers = int(split_seed), num_workers
        least = {"batch_size": 1, "eval_batch_size": 1, "split_seed": 0, "num_workers": 0}
        for name, smallest in least.items():
            if (value := getattr(self, name)) is not None and value < smallest:
                raise ValueError(f"`{name}` must be at least {smallest}, got {value}.")
        if self.split_seed >= 2**32:
            raise ValueError(f"`split_seed` must be below 2**32, got {self.split_seed}.")
        self.pin_memory = pin_memory
        self.device_cache = check_choice("device_cache", device_cache, "auto", "never")
        self.root = Path(root or os.environ.get("DG_DATA") or "data").absolute()
        cache = cache_dir or os.environ.get("DG_CACHE") or self.root / ".dg_cache"
        self.cache_dir = Path(cache).absolute()
        self._loaded_tables: Tables | None = None
        self._parts: dict[str, Split] = {}
        self._stage = ""

    @abstractmethod
    def sources(self) -> Sequence[Path | str]:
        """Return the files to decode, whether or not they exist."""

    def settings(self) -> Mapping[str, Any]:
        """Return the settings that decoding depends on."""
        return {}

    @abstractmethod
    def decode(self, save: Save) -> None:
        """Decode the files into tables."""

    @abstractmethod
    def split(self, tables: Tables) -> dict[str, Split]:
        """Return the splits `train`, `val` and `test`."""

    @override
    def prepare_data(self) -> None:
        _, missing = self._find_sources()
        for download in self._downloads_for(missing):
            try:
                fetch(download, self.root)
            except DownloadError as error:
                raise self._missing_error(missing, f"; the download failed ({error})") from error
            except OSError as error:
                why = f"; the download cannot be saved ({error.strerror})"
                raise self._missing_error(missing, why) from error
        self._tables()

    def _find_sources(self) -> tuple[list[Any], list[Path]]:
        """Return values that identify the existing files, and the paths of missing files."""
        there: list[Any] = []
        missing = []
        for path in self.sources():
            try:
                found = os.stat(path)
                name = str(path).removeprefix(str(self.root))  # the root may be moved
                # ctime changes with the content, even if mtime is reset.
                there.append((name, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
            except (FileNotFoundError, NotADirectoryError):
                missing.append(Path(path))
        return there, missing

    def _downloads_for(self, missing: Sequence[Path]) -> list[Download]:
        """Return the downloads that contain missing files."""
        targets = {d: self.root / d.target for d in self.downloads}
        return [d for d in targets if any(p.is_relative_to(targets[d]) for p in missing)]

    def _missing_error(self, missing: Sequence[Path], why: str = "") -> FileNotFoundError:
        """Return an error that names the missing files and how to get them."""
        paths = ", ".join(map(str, missing[:4])) + ", ..." * (len(missing) > 4)
        fixes = ["pass an existing file or folder"]
        if downloads := self._downloads_for(missing):
            for download in downloads:
                if download.folder and (folder := self.root / download.target).exists():
                    why += f"; remove {folder}, which is incomplete"
            unpacked = {
                d: f" and unpack it to {self.root / d.target}" for d in downloads if d.folder
            }
            fixes = [f"download {d.url}{unpacked.get(d, '')}" for d in downloads]
            fixes += ["or set `root` or DG_DATA to the folder that contains the dataset"]
        return FileNotFoundError(
            f"{type(self).__name__} cannot find {paths}{why}: {', '.join(fixes)}."
        )

    def _tables(self) -> Tables:
        if self._loaded_tables is None:
            files, missing = self._find_sources()
            if missing:
                raise self._missing_error(missing)
            if files:
                name = type(self).__name__.removesuffix("DataModule")
                origin = [files, self.settings()]
                self._loaded_tables = cached_tables(self.cache_dir, name, origin, self.decode)
            else:  # the data is in memory or comes with a library
                self._loaded_tables = tables_in_memory(self.decode)
        return self._loaded_tables

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
        """Summarise the split sizes and the accuracy of the majority class."""
        sizes = ", ".join(f"{name} {len(part):,}" for name, part in self._parts.items())
        return (
            f"{sizes} samples in {self.num_classes} classes; always predicting the most frequent "
            f"class would be right for {self.majority_rate():.1%} of the test samples"
        )

    def check_parts(self, parts: Mapping[str, Split]) -> None:
        """Raise ValueError if a split cannot be used for training or evaluation."""
        if self.num_classes < 2:
            raise ValueError(f"Expected at least 2 classes, got only {self.class_names[0]!r}.")
        for name, part in parts.items():
            if not (counts := self._counts(part)).all():
                empty = self.class_names[int(counts.argmin())]
                raise ValueError(
                    f"Class {empty!r} has no samples in the {name} split: the dataset is "
                    "incomplete, or its labels are wrong."
                )

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata from decoding, such as class names. Downloads the files if necessary."""
        if self._loaded_tables is None:
            self.prepare_data()
        return self._tables().metadata

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def part(self, name: str) -> Split:
        """Return the samples of `train`, `val` or `test`."""
        if not self._parts:
            raise RuntimeError(f"{type(self).__name__}.setup('fit') must be called first.")
        return self._parts[check_choice("part", name, *self._parts)]

    def class_counts(self) -> dict[str, dict[str, int]]:
        """Return the number of samples per class in every split."""
        return {
            name: dict(zip(self.class_names, self._counts(self.part(name)).tolist(), strict=True))
            for name in ("train", "val", "test")
        }

    def _counts(self, part: Split) -> Tensor:
        return torch.bincount(part.labels, minlength=self.num_classes)

    def majority_rate(self, part: str = "test") -> float:
        """Return the accuracy of always predicting the most frequent training class."""
        majority = int(self._counts(self.part("train")).argmax())
        return float((self.part(part).labels == majority).float().mean())

    @property
    def class_weights(self) -> Tensor:
        """Class weights that give every class the same total weight in training."""
        part = self.part("train")
        return len(part) / (self.num_classes * self._counts(part))

    @override
    def train_dataloader(self) -> BatchLoader:
        overfitting = getattr(self.trainer, "overfit_batches", 0) > 0  # repeats the same batches
        return self._loader("train", shuffle=not overfitting)

    @override
    def val_dataloader(self) -> BatchLoader:
        return self._loader("val")

    @override
    def test_dataloader(self) -> BatchLoader:
        return self._loader("test")

    @override
    def predict_dataloader(self) -> DataLoader[Batch]:
        # Lightning tracks the indices of predicted samples only with a plain DataLoader.
        return DataLoader(
            self.part_to_predict(),
            batch_size=self.eval_batch_size or self.batch_size,
            collate_fn=_identity,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # do not draw worker seeds from the global generator
        )

    def part_to_load(self, name: str) -> Split:
        """Return the samples that a loader iterates over."""
        return self.part(name)

    def part_to_predict(self) -> Split:
        """Return the samples for `predict`, in dataset order."""
        return self.part("test")

    def _loader(self, part: str, shuffle: bool = False) -> BatchLoader:
        training, trainer, device = part == "train", self.trainer, None
        if trainer is not None and self.device_cache == "auto" and not self.num_workers:
            # The model is on the root device only during a run.
            running = trainer.state.status == TrainerStatus.RUNNING
            device = trainer.strategy.root_device if running else None
        return BatchLoader(
            on_device(self.part_to_load(part), device),
            self.batch_size if training else self.eval_batch_size or self.batch_size,
            shuffle=shuffle,
            place=self._rank_and_world_size,
            progress=self._progress if training and trainer is not None else None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and world size among the processes that share the samples."""
        if self.trainer is None:
            return rank_and_world_size()
        # In model parallelism, several ranks see the same samples, and the strategy knows which.
        sampler = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return int(sampler["rank"]), int(sampler["num_replicas"])

    def _progress(self) -> tuple[int, int]:
        """Return how many batches of the epoch the Trainer has processed and completed."""
        assert self.trainer is not None
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.processed, progress.completed


def check_choice(name: str, value: Choice, *choices: str) -> Choice:
    """Return a setting, or raise ValueError if it is not one of the choices."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")
    return value


def _identity(batch: Any) -> Any:
    return batch  # already collated
