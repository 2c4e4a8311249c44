"""Splits of a dataset, which assemble batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ._files import ArrayTable, Indices, Tables

Batch = tuple[Tensor, Tensor]
Draws = dict[str, NDArray[Any]]
PaddingMode: TypeAlias = Literal["reflect", "constant"]


class RowTable(Protocol):
    """A table of samples: an array, a memory-mapped array or a sparse matrix."""

    def __len__(self) -> int: ...

    def take(self, rows: Indices) -> Tensor:
        """Return a dense copy of the given rows."""
        ...


class Augmentation(Protocol):
    """A random augmentation, sampled independently for every sample."""

    def draw(self, generator: np.random.Generator, samples: int) -> Draws:
        """Sample the random values for an epoch, as arrays with one entry per sample."""
        ...

    def apply(self, inputs: Tensor, draws: Draws) -> Tensor:
        """Augment a batch with the random values sampled for it."""
        ...


class Samples(Protocol):
    """Samples that can be read in batches, on the host or on a device."""

    def __len__(self) -> int: ...

    def get_batch(self, indices: Indices, seed: int = 0, epoch: int = 0) -> Batch:
        """Return the inputs and labels of the given samples."""
        ...


@dataclass
class Split(Dataset[Batch]):
    """Training, validation or test samples.

    Random values are sampled for a whole epoch at once, so that the augmentation of a sample is a
    function of (seed, epoch, index), independent of batch, worker and rank.
    """

    table: RowTable
    rows: Indices  # table row of each sample
    labels: Tensor  # label of each sample
    prepare: Callable[[Tensor], Tensor] | None = None  # table rows -> model inputs
    augmentation: Augmentation | None = None
    change: Callable[[Tensor, Indices], Tensor] | None = None  # applied after augmentation
    _cached_draws: tuple[tuple[int, int], Draws] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def get_batch(self, indices: Indices, seed: int = 0, epoch: int = 0) -> Batch:
        """Return the inputs and labels of the given samples."""
        inputs = self.table.take(self.rows[indices])
        if self.augmentation is not None:
            draws = self.draws_for_epoch(self.augmentation, seed, epoch)
            inputs = self.augmentation.apply(inputs, {k: v[indices] for k, v in draws.items()})
        if self.change is not None:
            inputs = self.change(inputs, self.rows[indices])
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        return inputs, self.labels[torch.from_numpy(indices)]

    def draws_for_epoch(self, augmentation: Augmentation, seed: int, epoch: int) -> Draws:
        """Return the random values for all samples in an epoch."""
        if self._cached_draws is None or self._cached_draws[0] != (seed, epoch):
            generator = np.random.default_rng([seed, epoch, 1])
            self._cached_draws = ((seed, epoch), augmentation.draw(generator, len(self)))
        return self._cached_draws[1]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch, for a plain torch `DataLoader`."""
        return self.get_batch(np.asarray(indices, dtype=np.int64))


class Normalize:
    """Scales uint8 images to [0, 1] and standardises each channel.

    The results are bit-identical to those of torchvision's `ToTensor` and `Normalize`, because the
    operations and their order are the same.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().div_(255).sub_(self.mean).div_(self.std)

    def to(self, device: torch.device) -> "Normalize":
        """Return a copy that normalises images on a device."""
        moved = Normalize([], [])
        moved.mean, moved.std = self.mean.to(device), self.std.to(device)
        return moved

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain values, for checkpoints and exports."""
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        return {"divide_by": 255, "mean": mean, "std": std}


class CropFlip:
    """Shifts images by up to `padding` pixels and flips them with probability 1/2.

    Equivalent to torchvision's `RandomCrop(size, padding, padding_mode=...)` and
    `RandomHorizontalFlip()`, but for a whole batch of uint8 images at once.

    Args:
        padding: The largest shift, in pixels.
        flip: Whether to flip images.
        padding_mode: `reflect` mirrors the image at its border; `constant` pads it with black.
    """

    def __init__(
        self, padding: int, flip: bool = True, padding_mode: PaddingMode = "reflect"
    ) -> None:
        self.padding = padding
        self.flip = flip
        self.padding_mode: PaddingMode = padding_mode

    def draw(self, generator: np.random.Generator, samples: int) -> Draws:
        """Sample a crop position and a flip for every image."""
        draws: Draws = {
            side: generator.integers(0, 2 * self.padding + 1, samples) for side in ("top", "left")
        }
        flipped = generator.random(samples) < 0.5
        return {**draws, "flip": flipped & self.flip}

    def apply(self, inputs: Tensor, draws: Draws) -> Tensor:
        """Crop and flip a batch of shape (samples, channels, height, width)."""
        images, flip, around = inputs.numpy(), draws["flip"], 2 * self.padding
        samples, _, height, width = images.shape
        edge = (self.padding, self.padding)
        padded = np.pad(images, ((0, 0), (0, 0), edge, edge), self.padding_mode)
        padded[flip] = padded[flip][..., ::-1]
        # Flipping precedes the crop here, so the crop position is mirrored too.
        left = np.where(flip, around - draws["left"], draws["left"])
        crops = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        return torch.from_numpy(crops[np.arange(samples), :, draws["top"], left])

    def apply_on_device(self, inputs: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Crop and flip a batch on its device. On a CPU, `apply` is faster."""
        height, width = inputs.shape[-2:]
        down, down_inside = self._places(draws["top"], height)
        across, across_inside = self._places(draws["left"], width)
        flip = draws["flip"].unsqueeze(1)
        across = torch.where(flip, across.flip(1), across)
        places = (down.unsqueeze(2) * width + across.unsqueeze(1)).flatten(1).unsqueeze(1)
        crops = inputs.flatten(2).gather(2, places.expand(-1, inputs.shape[1], -1))
        if self.padding_mode == "constant":
            across_inside = torch.where(flip, across_inside.flip(1), across_inside)
            inside = down_inside.unsqueeze(2) & across_inside.unsqueeze(1)
            crops = crops * inside.flatten(1).unsqueeze(1)
        return crops.view(inputs.shape)

    def _places(self, start: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the source pixels of each crop, and whether they lie inside the image.

        Positions outside the image are mirrored at its border.
        """
        wanted = start.unsqueeze(1) + torch.arange(size, device=start.device) - self.padding
        last = size - 1
        return last - (last - wanted.abs()).abs(), (wanted >= 0) & (wanted <= last)


def stratified_split(
    indices: Indices, labels: Tensor, share: float, seed: int, class_names: Sequence[str]
) -> tuple[Indices, Indices]:
    """Split samples in two, so that the second split gets a given share of every class."""
    from sklearn.model_selection import train_test_split  # slow to import

    if not 0 < share < 1:
        raise ValueError(f"`val_share` must be above 0 and below 1, got {share}.")
    of = labels[torch.from_numpy(indices)].numpy()
    counts = np.bincount(of, minlength=len(class_names))
    for name, count in zip(class_names, counts, strict=True):
        if count < 2:
            raise ValueError(
                f"Every class needs at least 2 samples, but class {name!r} has {count} of "
                f"{len(of)}: add samples, merge it with another class, or remove it."
            )
    if min(share, 1 - share) * len(of) < len(class_names):
        raise ValueError(
            f"A share of {share} of {len(of)} samples cannot cover {len(class_names)} classes: "
            "add samples, or use a share closer to 0.5."
        )
    first, second = train_test_split(indices, test_size=share, stratify=of, random_state=seed)
    for part in (first, second):
        present = np.bincount(labels[torch.from_numpy(part)], minlength=len(class_names))
        if not present.all():
            name = class_names[int(present.argmin())]
            raise ValueError(
                f"Class {name!r} has {counts[present.argmin()]} of the {len(of)} samples to split, "
                f"which is too few for a share of {share}: add samples, or merge it with another "
                "class."
            )
    return first, second


def grouped_split(
    indices: Indices,
    labels: NDArray[Any],
    groups: NDArray[Any],
    share: float,
    seed: int,
) -> tuple[Indices, Indices]:
    """Split samples in two, and keep every group together.

    Args:
        indices: The samples.
        labels: Labels of all samples. The split is stratified as far as the groups allow.
        groups: The group that every sample belongs to, such as its donor.
        share: Approximate share of the samples in the second split.
        seed: The random seed.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    number = len(set(groups[indices]))
    if number < 2:
        raise ValueError(
            f"A split by group needs at least 3 groups in total, but only {number} is left to "
            "split: choose another `split_by`, or omit it."
        )
    folds = StratifiedGroupKFold(min(number, round(1 / share)), shuffle=True, random_state=seed)
    first, second = next(folds.split(indices, labels[indices], groups[indices]))
    return indices[first], indices[second]


def split_images(
    tables: Tables,
    class_names: Sequence[str],
    val_share: float,
    seed: int,
    normalize: Normalize,
    augmentation: Augmentation | None = None,
) -> dict[str, Split]:
    """Split the tables `train_images`, `train_labels`, `test_images` and `test_labels`."""
    for name in ("train", "test"):
        images, labels = tables[f"{name}_images"], tables.labels(f"{name}_labels")
        if len(images) != len(labels):
            raise ValueError(
                f"The {name} files do not match: they contain {len(images)} images but "
                f"{len(labels)} labels. Download them again."
            )
        wrong = labels[(labels < 0) | (labels >= len(class_names))]
        if len(wrong):
            raise ValueError(
                f"Labels in the {name} files must be in 0 to {len(class_names) - 1}, got "
                f"{int(wrong[0])}: download the files again."
            )
    images, labels = tables["train_images"], tables.labels("train_labels")
    test_images, test_labels = tables["test_images"], tables.labels("test_labels")
    train, val = stratified_split(np.arange(len(labels)), labels, val_share, seed, class_names)
    return {
        "train": Split(images, train, labels[train], normalize, augmentation),
        "val": Split(images, val, labels[val], normalize),
        "test": Split(test_images, np.arange(len(test_labels)), test_labels, normalize),
    }


@dataclass
class Windows(Dataset[Batch]):
    """Windows of text, as pairs of input bytes and the bytes that follow them.

    Random windows are drawn for a whole epoch at once, so that a window is a function of (seed,
    epoch, index), independent of batch, worker and rank.
    """

    text: ArrayTable  # bytes, in memory or memory-mapped
    context: int  # bytes per window
    count: int  # windows per epoch
    random: bool
    _cached_starts: tuple[tuple[int, int], Indices] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.count

    def get_batch(self, indices: Indices, seed: int = 0, epoch: int = 0) -> Batch:
        """Return the given windows, and the same windows shifted by one byte."""
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


_CHUNK = 4096  # samples prepared at a time
_LARGEST_SHARE = 0.25  # maximum share of the free device memory


class DevicePart:
    """A split stored on a device.

    Samples are stored after preparation, or before it if they are augmented in every epoch.

    Args:
        part: The split.
        device: The device.
    """

    def __init__(self, part: Split, device: torch.device) -> None:
        self.part = part
        self.labels = part.labels.to(device)
        rows = np.array_split(np.arange(len(part)), math.ceil(len(part) / _CHUNK))
        first = _read_samples(part, rows[0][:1])
        self.inputs = torch.empty((len(part), *first.shape[1:]), dtype=first.dtype, device=device)
        for chunk in rows:
            self.inputs[chunk[0] : chunk[-1] + 1] = _read_samples(part, chunk).to(device)
        self._normalize: Normalize | None = None
        if isinstance(part.prepare, Normalize) and part.augmentation is not None:
            self._normalize = part.prepare.to(device)
        self._draws: tuple[tuple[int, int], dict[str, Tensor]] = ((-1, -1), {})

    def __len__(self) -> int:
        return len(self.part)

    def get_batch(self, indices: Indices, seed: int = 0, epoch: int = 0) -> Batch:
        """Return the inputs and labels of the given samples, like `Split.get_batch`."""
        index = torch.from_numpy(indices).to(self.labels.device, non_blocking=True)
        inputs = self.inputs[index]
        if isinstance(self.part.augmentation, CropFlip):
            if self._draws[0] != (seed, epoch):
                drawn = self.part.draws_for_epoch(self.part.augmentation, seed, epoch)
                moved = {k: torch.from_numpy(v).to(inputs.device) for k, v in drawn.items()}
                self._draws = ((seed, epoch), moved)
            chosen = {name: values[index] for name, values in self._draws[1].items()}
            inputs = self.part.augmentation.apply_on_device(inputs, chosen)
        if self._normalize is not None:
            inputs = self._normalize(inputs)
        return inputs, self.labels[index]


def on_device(part: Samples, device: torch.device | None) -> Samples:
    """Copy a split to a CUDA device if possible, or return it unchanged.

    The split stays on the host if it needs more than a quarter of the free device memory, or if its
    augmentation cannot run on the device.
    """
    if device is None or device.type != "cuda" or not isinstance(part, Split):
        return part
    normal = isinstance(part.augmentation, CropFlip) and isinstance(part.prepare, Normalize)
    if part.augmentation is not None and not (normal and part.change is None):
        return part
    size = len(part) * _read_samples(part, np.arange(1)).nbytes
    free, _ = torch.cuda.mem_get_info(device)
    return DevicePart(part, device) if size <= _LARGEST_SHARE * free else part


def _read_samples(part: Split, indices: Indices) -> Tensor:
    """Return samples on the CPU, and prepare them unless they have to be augmented first."""
    augmented = part.augmentation is not None
    return part.table.take(part.rows[indices]) if augmented else part.get_batch(indices)[0]
