"""Samples that live on a GPU, where batches are cut by index: none waits for the host."""

import math

import numpy as np
import torch
from torch import Tensor

from ._part import Batch, CropFlip, Indices, Normalize, Part, Samples

__all__ = ["DevicePart", "on_device"]

_CHUNK = 4096  # samples that are prepared at a time
_LARGEST_SHARE = 0.25  # of the memory that is free


class DevicePart:
    """The samples of a part on a device: prepared, or raw if they are augmented in every epoch.

    Args:
        part: The samples.
        device: The device.
    """

    def __init__(self, part: Part, device: torch.device) -> None:
        self.part = part
        self.labels = part.labels.to(device)
        rows = np.array_split(np.arange(len(part)), math.ceil(len(part) / _CHUNK))
        first = _samples(part, rows[0][:1])
        self.inputs = torch.empty((len(part), *first.shape[1:]), dtype=first.dtype, device=device)
        for chunk in rows:
            self.inputs[chunk[0] : chunk[-1] + 1] = _samples(part, chunk).to(device)
        self._normalize: Normalize | None = None
        if isinstance(part.prepare, Normalize) and part.augmentation is not None:
            self._normalize = part.prepare.to(device)
        self._draws: tuple[tuple[int, int], dict[str, Tensor]] = ((-1, -1), {})

    def __len__(self) -> int:
        return len(self.part)

    def cut(self, indices: Indices, seed: int = 0, epoch: int = 0) -> Batch:
        """Return inputs and labels of the given samples, see `Part.cut`."""
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
    """Return a part whose samples are on a CUDA device, or the part itself if they cannot be.

    They cannot be where they would take more than a quarter of the free memory, or are augmented
    in another way than images are.
    """
    if device is None or device.type != "cuda" or not isinstance(part, Part):
        return part
    normal = isinstance(part.augmentation, CropFlip) and isinstance(part.prepare, Normalize)
    if part.augmentation is not None and not (normal and part.change is None):
        return part
    size = len(part) * _samples(part, np.arange(1)).nbytes
    free, _ = torch.cuda.mem_get_info(device)
    return DevicePart(part, device) if size <= _LARGEST_SHARE * free else part


def _samples(part: Part, indices: Indices) -> Tensor:
    """Return samples on the CPU, prepared unless they are augmented first."""
    augmented = part.augmentation is not None
    return part.table.take(part.rows[indices]) if augmented else part.cut(indices)[0]
