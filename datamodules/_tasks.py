"""Parts of a sequence of tasks: changed images, and batches of one task each."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ._loader import BatchLoader
from ._part import Batch, Indices, Part

__all__ = [
    "Change",
    "Course",
    "Drift",
    "TaskLoader",
    "TaskParts",
    "drifted",
    "permuted",
    "rotated",
    "severities",
]

Change: TypeAlias = Callable[[Tensor, Indices], Tensor]  # images and their rows -> images
Drift: TypeAlias = Literal["noise", "blur", "contrast", "occlusion"]
Course: TypeAlias = Literal["abrupt", "gradual", "recurring"]


def permuted(seed: int, task: int) -> Change:
    """Return a change that permutes pixels, alike for all images."""

    def permute(images: Tensor, rows: Indices) -> Tensor:
        flat = images.flatten(1)
        order = np.random.default_rng([seed, task]).permutation(flat.shape[1])
        return flat[:, torch.from_numpy(order)].view(images.shape)

    return permute


def rotated(degrees: float) -> Change:
    """Return a change that rotates images about their centre; what comes in is black."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))

    def rotate(images: Tensor, rows: Indices) -> Tensor:
        height, width = images.shape[-2:]
        # In units of half an image, along which a pixel is longer on the shorter side.
        matrix = [[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]
        theta = torch.tensor(matrix).expand(len(images), -1, -1)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return F.grid_sample(images.float(), grid, align_corners=False)

    return rotate


def drifted(kind: Drift, severity: float, seed: int) -> Change:
    """Return a change of a severity from 0 to 1, fixed for every image by the seed and its row."""

    def change(images: Tensor, rows: Indices) -> Tensor:
        largest = 1.0 if images.is_floating_point() else 255.0
        x = images.float() / largest
        generators = [np.random.default_rng([seed, row]) for row in rows.tolist()]
        if kind == "noise":
            drawn = [g.standard_normal(x.shape[1:], np.float32) for g in generators]
            x = x + severity * torch.from_numpy(np.stack(drawn)).view_as(x)
        elif kind == "blur":
            x = torch.lerp(x, _mean_of_neighbours(x), severity)
        elif kind == "contrast":
            mean = x.mean((1, 2, 3), keepdim=True)
            x = torch.lerp(x, mean, 0.9 * severity)
        else:
            x = _occluded(x, severity, generators)
        return x.clamp(0, 1) * largest

    return change


def _mean_of_neighbours(x: Tensor) -> Tensor:
    size = 2 * max(1, round(min(x.shape[-2:]) / 10)) + 1
    edge = size // 2
    padded = F.pad(x, (edge, edge, edge, edge), mode="replicate")
    return F.avg_pool2d(padded, size, stride=1)


def _occluded(x: Tensor, severity: float, generators: Sequence[np.random.Generator]) -> Tensor:
    """Return images with a black square each, of up to half of their sides."""
    height, width = x.shape[-2:]
    side = round(severity * min(height, width) / 2)
    for image, generator in zip(x, generators, strict=True):
        top, left = generator.integers(0, (height - side + 1, width - side + 1)).tolist()
        image[:, top : top + side, left : left + side] = 0
    return x


def severities(course: Course, tasks: int) -> list[float]:
    """Return the severity of a drift in each task.

    >>> severities("gradual", 3), severities("recurring", 4)
    ([0.0, 0.5, 1.0], [0.0, 1.0, 0.0, 1.0])
    """
    if course == "gradual":
        return [task / (tasks - 1) for task in range(tasks)]
    return [float(task % 2 if course == "recurring" else task > 0) for task in range(tasks)]


class TaskParts:
    """The samples of several tasks, one task after the other.

    Args:
        parts: The samples of each task.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.ends = list(accumulate(map(len, self.parts)))
        self.labels = torch.cat([part.labels for part in self.parts])

    def __len__(self) -> int:
        return self.ends[-1]

    def cut(self, indices: Indices, seed: int = 0, epoch: int = 0) -> Batch:
        """Return inputs and labels of the given samples, task by task."""
        starts = [0, *self.ends[:-1]]
        of = np.searchsorted(self.ends, indices, side="right")
        batches = [
            self.parts[task].cut(indices[of == task] - starts[task], seed, epoch)
            for task in np.unique(of).tolist()
        ]
        inputs, labels = zip(*batches, strict=True)
        return torch.cat(inputs), torch.cat(labels)


class TaskLoader(BatchLoader):
    """A loader of `TaskParts` whose batches hold samples of one task each."""

    part: TaskParts

    def _batch_ends(self, samples: int) -> list[int]:
        ends: list[int] = []
        for start, part in zip([0, *self.part.ends], self.part.parts, strict=False):
            ends += [start + end for end in super()._batch_ends(len(part))]
        return ends

    def task_of(self, batch: int) -> int:
        """Return the task of a batch, among the tasks of the part."""
        return bisect_right(self.part.ends, self._batch_ends(0)[batch] - 1)
