"""Parts of a dataset: whole batches are cut from tables by index, and augmented as a whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

__all__ = [
    "Augmentation",
    "CropFlip",
    "Draws",
    "Normalize",
    "Part",
    "Rows",
    "grouped_split",
    "stratified_split",
]

Batch = tuple[Tensor, Tensor]
Indices = NDArray[np.int64]
Draws = dict[str, NDArray[Any]]


class Rows(Protocol):
    """Samples in a row: an array in memory, a memory-mapped one, or a sparse matrix."""

    def __len__(self) -> int: ...

    def take(self, rows: Indices) -> Tensor:
        """Return a dense copy of some rows."""
        ...


class Augmentation(Protocol):
    """A random change of every sample, each with draws of its own."""

    def draw(self, generator: np.random.Generator, samples: int) -> Draws:
        """Draw what an epoch needs: arrays with a value for every sample."""
        ...

    def apply(self, inputs: Tensor, draws: Draws) -> Tensor:
        """Change a batch as its samples' draws say."""
        ...


@dataclass
class Part(Dataset[Batch]):
    """Training, validation or test samples.

    Draws are made for a whole epoch at once and then looked up, so that the augmentation of a
    sample is a function of (seed, epoch, index), whichever batch, worker or rank it is in.
    """

    table: Rows
    rows: Indices  # where each sample lies in the table
    labels: Tensor  # of each sample
    prepare: Callable[[Tensor], Tensor] | None = None  # from rows of the table to a net's inputs
    augmentation: Augmentation | None = None
    _drawn: tuple[tuple[int, int], Draws] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def cut(self, indices: Indices, seed: int = 0, epoch: int = 0) -> Batch:
        """Return inputs and labels of some samples."""
        inputs = self.table.take(self.rows[indices])
        if self.augmentation is not None:
            draws = self._draws(self.augmentation, seed, epoch)
            inputs = self.augmentation.apply(inputs, {k: v[indices] for k, v in draws.items()})
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        return inputs, self.labels[torch.from_numpy(indices)]

    def _draws(self, augmentation: Augmentation, seed: int, epoch: int) -> Draws:
        if self._drawn is None or self._drawn[0] != (seed, epoch):
            generator = np.random.default_rng([seed, epoch, 1])
            self._drawn = ((seed, epoch), augmentation.draw(generator, len(self)))
        return self._drawn[1]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch to a plain torch `DataLoader`."""
        return self.cut(np.asarray(indices, dtype=np.int64))


class Normalize:
    """Makes float images of bytes: scaled to [0, 1], then by mean and deviation of each channel.

    The operations and their order are those of torchvision's `ToTensor` and `Normalize`, so that
    the values are the same to the last bit.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().div_(255).sub_(self.mean).div_(self.std)

    def plain(self) -> dict[str, Any]:
        """Return the settings, for checkpoints and exports."""
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        return {"divide_by": 255, "mean": mean, "std": std}


class CropFlip:
    """Shifts every image by up to `padding` pixels, and mirrors each with a probability of 1/2.

    The same as torchvision's `RandomCrop(size, padding)` and `RandomHorizontalFlip()` on bytes, for
    a whole batch at once.
    """

    def __init__(self, padding: int, flip: bool = True) -> None:
        self.padding = padding
        self.flip = flip

    def draw(self, generator: np.random.Generator, samples: int) -> Draws:
        """Draw the corner of the crop, and whether it is mirrored."""
        draws: Draws = {
            side: generator.integers(0, 2 * self.padding + 1, samples) for side in ("top", "left")
        }
        mirrored = generator.random(samples) < 0.5
        return {**draws, "flip": mirrored & self.flip}

    def apply(self, inputs: Tensor, draws: Draws) -> Tensor:
        """Crop and mirror a batch (samples, channels, height, width)."""
        images, flip, around = inputs.numpy(), draws["flip"], 2 * self.padding
        samples, channels, height, width = images.shape
        padded = np.zeros((samples, channels, height + around, width + around), images.dtype)
        inside = padded[:, :, self.padding :, self.padding :][:, :, :height, :width]
        inside[~flip] = images[~flip]
        inside[flip] = images[flip][..., ::-1]
        # Mirroring comes before the crop here, so the crop is mirrored too.
        left = np.where(flip, around - draws["left"], draws["left"])
        crops = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        return torch.from_numpy(crops[np.arange(samples), :, draws["top"], left])


def stratified_split(
    indices: Indices, labels: Tensor, share: float, seed: int, class_names: Sequence[str]
) -> tuple[Indices, Indices]:
    """Split samples in two, with a share of every class in the second part."""
    from sklearn.model_selection import train_test_split  # half a second to import

    if not 0 < share < 1:
        raise ValueError(f"`val_share` must be above 0 and below 1, got {share}.")
    of = labels[torch.from_numpy(indices)].numpy()
    counts = np.bincount(of, minlength=len(class_names))
    for name, count in zip(class_names, counts, strict=True):
        if count < 2:
            raise ValueError(
                f"Every class needs samples in every part, but class {name!r} has {count} of "
                f"{len(of)} to split: give it more, merge it with another, or leave it out."
            )
    if min(share, 1 - share) * len(of) < len(class_names):
        raise ValueError(
            f"A share of {share} of {len(of)} samples cannot hold {len(class_names)} classes: "
            "give more samples, or a share nearer to 0.5."
        )
    first, second = train_test_split(indices, test_size=share, stratify=of, random_state=seed)
    for part in (first, second):
        present = np.bincount(labels[torch.from_numpy(part)], minlength=len(class_names))
        if not present.all():
            name = class_names[int(present.argmin())]
            raise ValueError(
                f"Class {name!r} has {counts[present.argmin()]} of the {len(of)} samples to split, "
                f"too few for a share of {share}: give it more, or merge it with another."
            )
    return first, second


def grouped_split(
    indices: Indices,
    labels: NDArray[Any],
    groups: NDArray[Any],
    share: float,
    seed: int,
) -> tuple[Indices, Indices]:
    """Split samples in two, with about a share of them in the second part, and groups kept whole.

    Args:
        indices: The samples.
        labels: Labels of all samples; their frequencies are kept as far as groups allow.
        groups: Groups of all samples, such as donors.
        share: Share of the second part.
        seed: Seed.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    number = len(set(groups[indices]))
    if number < 2:
        raise ValueError(
            f"A split by group needs at least 3 groups in all, and {number} is left to split: give "
            "another `split_by`, or none."
        )
    folds = StratifiedGroupKFold(min(number, round(1 / share)), shuffle=True, random_state=seed)
    first, second = next(folds.split(indices, labels[indices], groups[indices]))
    return indices[first], indices[second]
