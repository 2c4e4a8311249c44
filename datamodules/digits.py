"""Handwritten digits that ship with scikit-learn: the default that needs no download."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset
from typing_extensions import override

__all__ = ["DigitsDataModule"]


class _EpochShuffle(Sampler[int]):
    """Shuffles by run seed and epoch alone, so that a resumed run sees what it would have seen.

    Lightning tells it the epoch, and in a run of several processes puts its own in its place.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    @override
    def __iter__(self) -> Iterator[int]:
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        order = np.random.default_rng([seed, self.epoch]).permutation(self.length)
        return iter(order.tolist())

    def __len__(self) -> int:
        return self.length


class DigitsDataModule(pl.LightningDataModule):
    """1,797 grey images of 8 x 8 pixels, ten classes, scaled to [0, 1].

    A fifth is the test set, a tenth of the rest the validation set; both are stratified and depend
    on `split_seed` alone. The order of an epoch depends on the run's seed and the epoch alone.

    Licence: CC BY 4.0. Reference: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten
    Digits", UCI Machine Learning Repository, 1998 (its test part, as scikit-learn bundles it).

    Args:
        batch_size: Samples in a training batch; evaluation uses the same.
        split_seed: Seed of the split into training, validation and test.
        num_workers: Processes that load data; the data is small and in memory, so 0 is fastest.
        pin_memory: Whether batches are put into page-locked memory.

    >>> data = DigitsDataModule(batch_size=32)
    >>> data.setup("fit")
    >>> next(iter(data.train_dataloader()))[0].shape
    torch.Size([32, 1, 8, 8])
    """

    num_classes = 10
    input_shape = (1, 8, 8)
    class_names = tuple("0123456789")

    def __init__(
        self,
        batch_size: int = 64,
        split_seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        if find_spec("sklearn") is None:
            raise ModuleNotFoundError(
                "DigitsDataModule needs scikit-learn: pip install scikit-learn"
            )
        least = {"batch_size": 1, "split_seed": 0, "num_workers": 0}
        for name, value in zip(least, (batch_size, split_seed, num_workers), strict=True):
            if value < least[name]:
                raise ValueError(f"`{name}` must be at least {least[name]}, got {value}.")
        self.batch_size = batch_size
        self.split_seed = split_seed
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self._parts: dict[str, TensorDataset] = {}

    @override
    def setup(self, stage: str) -> None:
        if self._parts:
            return
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = torch.from_numpy(digits.images).float().div_(16).unsqueeze(1)
        labels = torch.from_numpy(digits.target)

        def split(indices: Tensor, share: float) -> tuple[Tensor, Tensor]:
            parts = train_test_split(
                indices.numpy(),
                test_size=share,
                stratify=labels[indices].numpy(),
                random_state=self.split_seed,
            )
            return torch.from_numpy(parts[0]), torch.from_numpy(parts[1])

        rest, test = split(torch.arange(len(labels)), 0.2)
        train, val = split(rest, 0.1)
        for name, indices in {"train": train, "val": val, "test": test}.items():
            self._parts[name] = TensorDataset(images[indices], labels[indices])

    @property
    def class_weights(self) -> Tensor:
        """Weights that give every class of the training set the same total weight."""
        labels = self._parts["train"].tensors[1]
        counts = torch.bincount(labels, minlength=self.num_classes)
        return len(labels) / (self.num_classes * counts)

    def _loader(
        self, part: str, sampler: Sampler[int] | None = None
    ) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self._parts[part],
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.num_workers > 0,
        )

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("train", _EpochShuffle(len(self._parts["train"])))

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("val")

    @override
    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("test")

    @override
    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("test")
