"""Sequences of tasks, built from any image DataModule."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from ._files import Indices, Save, Tables
from ._loader import BatchLoader
from ._splits import Batch, Split
from .base import BaseDataModule, check_choice

Change: TypeAlias = Callable[[Tensor, Indices], Tensor]  # (images, their rows) -> images
Drift: TypeAlias = Literal["noise", "blur", "contrast", "occlusion"]
Course: TypeAlias = Literal["abrupt", "gradual", "recurring"]


def permuted(seed: int, task: int) -> Change:
    """Return a change that permutes the pixels of all images in the same way."""

    def permute(images: Tensor, rows: Indices) -> Tensor:
        flat = images.flatten(1)
        order = np.random.default_rng([seed, task]).permutation(flat.shape[1])
        return flat[:, torch.from_numpy(order)].view(images.shape)

    return permute


def rotated(degrees: float) -> Change:
    """Return a change that rotates images about their centre. Exposed corners are black."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))

    def rotate(images: Tensor, rows: Indices) -> Tensor:
        height, width = images.shape[-2:]
        # Coordinates range over [-1, 1], so a pixel spans more of the shorter side.
        matrix = [[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]
        theta = torch.tensor(matrix).expand(len(images), -1, -1)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return F.grid_sample(images.float(), grid, align_corners=False)

    return rotate


def drifted(kind: Drift, severity: float, seed: int) -> Change:
    """Return a drift of a severity from 0 to 1.

    The change of an image depends only on the seed and on its row.
    """

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
    """Black out a square in every image, up to half as wide as the image's shorter side."""
    height, width = x.shape[-2:]
    side = round(severity * min(height, width) / 2)
    for image, generator in zip(x, generators, strict=True):
        top, left = generator.integers(0, (height - side + 1, width - side + 1)).tolist()
        image[:, top : top + side, left : left + side] = 0
    return x


def severities(course: Course, tasks: int) -> list[float]:
    """Return the severity of the drift in each task.

    >>> severities("gradual", 3), severities("recurring", 4)
    ([0.0, 0.5, 1.0], [0.0, 1.0, 0.0, 1.0])
    """
    if course == "gradual":
        return [task / (tasks - 1) for task in range(tasks)]
    return [float(task % 2 if course == "recurring" else task > 0) for task in range(tasks)]


class TaskParts:
    """The samples of several tasks, one task after another.

    Args:
        parts: The samples of each task.
    """

    def __init__(self, parts: Sequence[Split]) -> None:
        self.parts = list(parts)
        self.ends = list(accumulate(map(len, self.parts)))
        self.labels = torch.cat([part.labels for part in self.parts])

    def __len__(self) -> int:
        return self.ends[-1]

    def get_batch(self, indices: Indices, seed: int = 0, epoch: int = 0) -> Batch:
        """Return the inputs and labels of the given samples, grouped by task."""
        starts = [0, *self.ends[:-1]]
        of = np.searchsorted(self.ends, indices, side="right")
        batches = [
            self.parts[task].get_batch(indices[of == task] - starts[task], seed, epoch)
            for task in np.unique(of).tolist()
        ]
        inputs, labels = zip(*batches, strict=True)
        return torch.cat(inputs), torch.cat(labels)


class TaskLoader(BatchLoader):
    """Loads `TaskParts` in batches that contain samples from only one task."""

    part: TaskParts

    def _batch_ends(self, samples: int) -> list[int]:
        ends: list[int] = []
        for start, part in zip([0, *self.part.ends], self.part.parts, strict=False):
            ends += [start + end for end in super()._batch_ends(len(part))]
        return ends

    def task_of(self, batch: int) -> int:
        """Return the task that a batch belongs to, as a position in `TaskParts`."""
        return bisect_right(self.part.ends, self._batch_ends(0)[batch] - 1)


Kind: TypeAlias = Literal["split", "permuted", "rotated", "drift"]
Labels: TypeAlias = Literal["task", "domain", "class"]

_LARGEST_ANGLE = 180.0


class TaskSequence(BaseDataModule):
    """A sequence of tasks from another DataModule, learned in a single Trainer run.

    The Trainer's epochs are divided evenly among the tasks. It must reload the data for each task:
    `Trainer(max_epochs=10, reload_dataloaders_every_n_epochs=1)`. Validation and test cover the
    tasks one after another, and each batch belongs to a single task. A run can be resumed at any
    step.

    Args:
        data: The DataModule with the images.
        kind: `split`: each task has different classes. `permuted`: each task but the first permutes
            the pixels differently. `rotated`: each task rotates images further by the same angle,
            always by less than 180 degrees. `drift`: images are degraded; see `drift` and `course`.
        tasks: Number of tasks.
        labels: `task`: a model may know the task of every sample. `domain`: the task is unknown,
            and the classes of each task are numbered from 0. `class`: the task is unknown, and each
            task has different classes. `class` needs the kind `split`.
        evaluate: Tasks to validate on: `all` tasks, the tasks `seen` so far, or the `current` task.
        joint: Whether every task trains on the samples of all tasks, as an upper bound.
        task_seed: Seed for the permutations and drifts, and for the samples to replay.
        drift: How images are degraded: `noise`, `blur`, `contrast` or `occlusion`.
        course: `abrupt`: all tasks but the first are degraded. `gradual`: each task is degraded
            more than the one before. `recurring`: every second task is degraded.
        replay: Number of stored training samples, divided evenly among the earlier tasks. They are
            repeated until each task has at least as many samples from earlier tasks as of its own.

    >>> from dg_lightning.datamodules import DigitsDataModule
    >>> data = TaskSequence(DigitsDataModule(), tasks=5)
    >>> data.setup("fit")
    >>> _, labels = next(iter(data.train_dataloader()))
    >>> data.classes_of(1), sorted(set(labels.tolist()))  # classes of the first task
    ((2, 3), [0, 1])
    """

    def __init__(
        self,
        data: BaseDataModule,
        kind: Kind = "split",
        tasks: int = 5,
        labels: Labels = "task",
        evaluate: Literal["all", "seen", "current"] = "all",
        joint: bool = False,
        task_seed: int = 0,
        drift: Drift = "noise",
        course: Course = "abrupt",
        replay: int = 0,
    ) -> None:
        if not isinstance(data, BaseDataModule):
            raise TypeError(f"`data` must be a DataModule of this package, got {data!r}.")
        if not isinstance(tasks, int) or tasks < 2:
            raise ValueError(f"`tasks` must be an integer of at least 2, got {tasks!r}.")
        sizes = data.batch_size, data.eval_batch_size, str(data.root), str(data.cache_dir)
        loading = data.split_seed, data.num_workers, data.pin_memory, data.device_cache
        super().__init__(*sizes, *loading)
        self.data = data
        self.kind = check_choice("kind", kind, "split", "permuted", "rotated", "drift")
        self.labels = check_choice("labels", labels, "task", "domain", "class")
        self.evaluate = check_choice("evaluate", evaluate, "all", "seen", "current")
        self.tasks, self.joint, self.task_seed = tasks, joint, task_seed
        self.drift = check_choice("drift", drift, "noise", "blur", "contrast", "occlusion")
        self.course = check_choice("course", course, "abrupt", "gradual", "recurring")
        if labels == "class" and kind != "split":
            raise ValueError(
                f"`labels: class` needs `kind: split`, got {kind!r}, where all tasks have the same "
                "classes: use `labels: task` or `labels: domain`."
            )
        if isinstance(replay, bool) or not isinstance(replay, int) or 0 != replay < tasks - 1:
            raise ValueError(
                f"`replay` must be 0, or store at least one sample for each of {tasks - 1} earlier "
                f"tasks, got {replay!r}."
            )
        if replay and joint:
            raise ValueError("`replay` has no effect with `joint`, which trains on all tasks.")
        if replay and kind == "split" and labels == "task":
            raise ValueError(
                "`replay` needs `labels: class` or `labels: domain`: with `labels: task`, training "
                "is restricted to the classes of the current task."
            )
        self.replay = replay
        self._by_task: list[dict[str, Split]] = []
        self._seed: int | None = None  # determines the sample order; a resumed run keeps it
        self._loaders: dict[str, TaskLoader] = {}

    # Interface for callbacks; see `dg_lightning.continual.TaskData`.

    @property
    def tells_task(self) -> bool:
        """Whether a model may know the task of a sample."""
        return self.labels == "task"

    @property
    def current_task(self) -> int:
        """The task of the current epoch, or the first task without a Trainer."""
        if self.trainer is None or not self.trainer.max_epochs:
            return 0
        return self._task_at(self.trainer.current_epoch, self.trainer.max_epochs)

    def _task_at(self, epoch: int, epochs: int) -> int:
        return min(epoch * self.tasks // epochs, self.tasks - 1)

    def batches_by_epoch(self, epochs: int) -> list[int]:
        """Return the number of training batches in each epoch of a run of this length."""
        loader = super()._loader("train")
        lengths = []
        for task in range(self.tasks):
            loader.part = self._training_part(task)
            lengths.append(len(loader))
        return [lengths[self._task_at(epoch, epochs)] for epoch in range(epochs)]

    def task_of(self, part: str, batch: int) -> int:
        """Return the task that a batch of `val` or `test` belongs to."""
        if part not in self._loaders:
            self._loader(part)
        return self._evaluated(part).start + self._loaders[part].task_of(batch)

    def classes_of(self, task: int) -> tuple[int, ...] | None:
        """Return the classes of a task, or None if all tasks have the same classes."""
        if self.kind != "split" or self.labels == "domain":
            return None
        return tuple(self._groups()[task].tolist())

    def _groups(self) -> list[Any]:
        """Return the classes of each task, in label order."""
        if self.tasks > self.data.num_classes:
            raise ValueError(
                f"`tasks` must be at most the {self.data.num_classes} classes of "
                f"{type(self.data).__name__}, got {self.tasks}: use fewer, or `kind: permuted`."
            )
        return np.array_split(np.arange(self.data.num_classes), self.tasks)

    # Interface of a DataModule.

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.data.input_shape

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names. If classes from several tasks share a label, their names are joined."""
        names = self.data.class_names
        if self.kind != "split" or self.labels != "domain":
            return names
        groups = self._groups()
        shared = [[names[g[i]] for g in groups if i < len(g)] for i in range(len(groups[0]))]
        return tuple("/".join(of_label) for of_label in shared)

    @override
    def sources(self) -> Sequence[Path | str]:
        return self.data.sources()

    @override
    def settings(self) -> Mapping[str, Any]:
        return self.data.settings()

    @override
    def decode(self, save: Save) -> None:
        self.data.decode(save)

    @override
    def prepare_data(self) -> None:
        self.data.prepare_data()

    @override
    def _tables(self) -> Tables:
        return self.data._tables()

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._check_trainer()
        if len(self.input_shape) != 3 and self.kind != "split":
            raise ValueError(
                f"`kind: {self.kind}` needs images, got samples of shape {self.input_shape}: use "
                "`kind: split`."
            )
        super().setup(stage)

    def _check_trainer(self) -> None:
        if (trainer := self.trainer) is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        epochs, reload = trainer.max_epochs, trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if not epochs or epochs < 0 or epochs % self.tasks:
            raise ValueError(
                f"`max_epochs` must be a multiple of the {self.tasks} tasks, so that each task "
                f"gets the same number of epochs, got {epochs}."
            )
        if reload < 1 or epochs // self.tasks % reload:
            raise ValueError(
                "`reload_dataloaders_every_n_epochs` must reload the data for each task, got "
                f"{reload}: set it to 1."
            )

    @override
    def split(self, tables: Tables) -> dict[str, Split]:
        parts = self.data.split(tables)
        self._by_task = [
            {name: self._of_task(part, task) for name, part in parts.items()}
            for task in range(self.tasks)
        ]
        for task, of_task in enumerate(self._by_task):
            for name, part in of_task.items():
                if not len(part):
                    raise ValueError(
                        f"Task {task} has no samples in the {name} split: the dataset is "
                        "incomplete."
                    )
        return self._by_task[0]

    def _of_task(self, part: Split, task: int) -> Split:
        """Return the samples of a task."""
        if self.kind != "split":
            return replace(part, change=self._change(task))
        classes = torch.from_numpy(self._groups()[task])
        chosen = torch.isin(part.labels, classes)
        labels = part.labels[chosen]
        if self.labels == "domain":
            labels = labels - int(classes[0])
        return replace(part, rows=part.rows[chosen.numpy()], labels=labels)

    def _change(self, task: int) -> Change | None:
        if self.kind == "permuted":
            return permuted(self.task_seed, task) if task else None
        if self.kind == "rotated":
            return rotated(_LARGEST_ANGLE * task / self.tasks) if task else None
        severity = severities(self.course, self.tasks)[task]
        return drifted(self.drift, severity, self.task_seed) if severity else None

    @override
    def check_parts(self, parts: Mapping[str, Split]) -> None:
        """Accept all splits, because a task does not have to contain every class."""

    @override
    def describe_parts(self) -> str:
        sizes = ", ".join(
            f"{name} {sum(len(of_task[name]) for of_task in self._by_task):,}"
            for name in self._by_task[0]
        )
        return f"{self.tasks} tasks ({self.kind}), {sizes} samples across all tasks"

    def _evaluated(self, part: str) -> range:
        """Return the tasks whose samples a split contains."""
        fits = self.trainer is not None and self.trainer.state.fn == "fit"
        if part == "test" or self.evaluate == "all" or not fits:
            return range(self.tasks)
        return range(0 if self.evaluate == "seen" else self.current_task, self.current_task + 1)

    @override
    def part(self, name: str) -> Any:
        """Return the samples of all tasks, or for `val` those of the tasks to evaluate now."""
        super().part(name)
        tasks = range(self.tasks) if name == "train" else self._evaluated(name)
        return TaskParts([self._by_task[task][name] for task in tasks])

    @override
    def part_to_load(self, name: str) -> Any:
        return self._training_part(self.current_task) if name == "train" else self.part(name)

    def _training_part(self, task: int) -> Any:
        if self.joint:
            return self.part("train")
        own = self._by_task[task]["train"]
        stored = self._stored(task, len(own)) if self.replay else []
        return TaskParts([*stored, own]) if stored else own

    def _stored(self, earlier: int, samples: int) -> list[Split]:
        """Return the stored samples of each earlier task, repeated to this many in total."""
        parts = []
        for task in range(earlier):
            part = self._by_task[task]["train"]
            order = np.random.default_rng([self.task_seed, task]).permutation(len(part))
            kept = order[: self.replay // earlier]
            repeated = np.resize(kept, max(len(kept), samples // earlier))
            labels = part.labels[torch.from_numpy(repeated)]
            parts.append(replace(part, rows=part.rows[repeated], labels=labels))
        return parts

    @override
    def part_to_predict(self) -> Split:
        if self.kind != "split":
            return self._by_task[0]["test"]
        every = TaskParts([of_task["test"] for of_task in self._by_task])
        rows = np.concatenate([part.rows for part in every.parts])
        return replace(every.parts[0], rows=rows, labels=every.labels)

    @override
    def _loader(self, part: str, shuffle: bool = False) -> BatchLoader:
        if part == "train":
            loader = super()._loader(part, shuffle)
            self._seed = loader.seed if self._seed is None else self._seed
            loader.seed = self._seed
            return loader
        size = self.eval_batch_size or self.batch_size
        self._loaders[part] = TaskLoader(
            self.part(part),
            size,
            place=self._rank_and_world_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        return self._loaders[part]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self._seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._seed = state_dict["seed"]
