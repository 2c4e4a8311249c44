"""The interface for sequential tasks, and measures of learning and forgetting."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import TypeIs, get_protocol_members, override

from dg_lightning.compute.macs import as_matrix, linear_maps

_CLOSED = -1e4  # masks a class in a softmax, finite in half precision


class TaskData(Protocol):
    """Interface of a DataModule with sequential tasks, such as `TaskSequence`."""

    tasks: int
    joint: bool  # whether all tasks are trained jointly, which gives an upper bound

    @property
    def num_classes(self) -> int:
        """Number of model outputs."""

    @property
    def tells_task(self) -> bool:
        """Whether the task label of a sample is known."""

    @property
    def current_task(self) -> int:
        """Index of the task being trained."""

    def task_of(self, part: str, batch: int) -> int:
        """Return the task that a `val` or `test` batch belongs to. Batches never mix tasks."""

    def classes_of(self, task: int) -> Sequence[int] | None:
        """Return the classes of a task, or None if all tasks have the same classes."""


_MEMBERS = get_protocol_members(TaskData)


def _has_tasks(data: object) -> TypeIs[TaskData]:
    return all(hasattr(data, name) for name in _MEMBERS)


def task_data(trainer: Any, callback: object) -> TaskData:
    """Return a Trainer's DataModule, which must have tasks.

    Raises:
        ValueError: If the Trainer's DataModule has no tasks.
    """
    data: object = getattr(trainer, "datamodule", None)
    if not _has_tasks(data):
        raise ValueError(
            f"{type(callback).__name__} needs a DataModule with tasks, got {type(data).__name__}: "
            "wrap it in dg_lightning.datamodules.TaskSequence."
        )
    return data


def find_head(module: nn.Module, data: TaskData, name: str | None = None) -> nn.Module | None:
    """Return the layer that computes the logits, or None if all tasks have the same classes.

    By default, this is the last linear layer with as many outputs as there are classes.

    Raises:
        ValueError: If no such layer exists, or none with the given name.
    """
    if data.classes_of(0) is None:
        return None
    maps = {m.name: m.linear for m in linear_maps(module) if m.output_gate is None}
    outputs = {n: as_matrix(linear, linear.weight).shape[0] for n, linear in maps.items()}
    fitting = [n for n in maps if outputs[n] == data.num_classes and name in (None, n)]
    if not fitting:
        there = ", ".join(f"{n} with {count} outputs" for n, count in outputs.items())
        raise ValueError(
            f"`head` must name a linear layer with {data.num_classes} outputs, got {name!r}. "
            f"Available: {there or 'none'}."
        )
    head: nn.Module = maps[fitting[-1]]
    return head


def mask_classes(logits: Tensor, classes: Sequence[int] | None) -> Tensor:
    """Mask the logits of all classes except the given ones, if any are given.

    >>> mask_classes(torch.zeros(1, 3), [0, 2]).softmax(-1).tolist()
    [[0.5, 0.0, 0.5]]
    """
    if classes is None:
        return logits
    others = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
    others[list(classes)] = False
    return logits.masked_fill(others, _CLOSED)


class Heads:
    """Restricts a model to some of its classes through a hook on the layer for the logits.

    Args:
        module: The model.
        data: The tasks.
        name: Name of the layer, or None for the last layer that fits.
    """

    def __init__(self, module: nn.Module, data: TaskData, name: str | None = None) -> None:
        self.map = find_head(module, data, name)
        self.classes: Sequence[int] | None = None  # allowed classes, None for all
        self._handle = self.map.register_forward_hook(self._mask) if self.map is not None else None

    def _mask(self, module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        return mask_classes(logits, self.classes)

    def remove(self) -> None:
        """Remove the hook, so that the model uses all classes again."""
        if self._handle is not None:
            self._handle.remove()


def least_uncertain(logits: Sequence[Tensor]) -> Tensor:
    """Return the logits with the lowest entropy for each sample.

    >>> least_uncertain([torch.tensor([[0.0, 1.0]]), torch.tensor([[9.0, 0.0]])]).tolist()
    [[9.0, 0.0]]
    """
    every = torch.stack(list(logits))
    entropy = torch.special.entr(every.float().softmax(-1)).sum(-1)
    index = entropy.argmin(0)[None, ..., None].expand(1, *every.shape[1:])
    return every.gather(0, index)[0]


def logits_of(outputs: Any, callback: object) -> Tensor:
    """Return the class logits from a step's outputs.

    Raises:
        TypeError: If the outputs contain no logits.
    """
    logits = outputs.get("logits") if isinstance(outputs, dict) else outputs
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"{type(callback).__name__} needs class logits, got {type(outputs).__name__}: return "
            "them from `validation_step` and `test_step`, as a tensor or under the key 'logits'."
        )
    return logits


def task_progress(trainer: Any, data: TaskData, batch_idx: int) -> float:
    """Return the current task's progress from 0 to 1. All tasks take the same number of epochs."""
    epochs: float = trainer.max_epochs / data.tasks
    done: float = trainer.current_epoch + batch_idx / trainer.num_training_batches
    return min(max(done / epochs - data.current_task, 0.0), 1.0)


class AccuracyMatrix(Metric):
    """Accuracy on every task (columns) after learning each task (rows).

    Accuracies that were not measured are NaN.

    Args:
        tasks: Number of tasks.
        **options: Arguments of `torchmetrics.Metric`.

    >>> matrix = AccuracyMatrix(2)
    >>> matrix.update(1, 0, torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    >>> matrix.compute().tolist()
    [[nan, nan], [0.5, nan]]
    """

    full_state_update = False
    correct: Tensor
    counted: Tensor

    def __init__(self, tasks: int, **options: Any) -> None:
        super().__init__(**options)
        for name in ("correct", "counted"):
            self.add_state(name, torch.zeros(tasks, tasks, dtype=torch.long), dist_reduce_fx="sum")

    @override
    def update(self, learned: int, task: int, logits: Tensor, target: Tensor) -> None:
        """Count the correct samples for `task` after learning all tasks up to `learned`."""
        self.correct[learned, task] += (logits.argmax(-1) == target).sum()
        self.counted[learned, task] += target.numel()

    @override
    def compute(self) -> Tensor:
        """Return the matrix of accuracies, as float64."""
        return self.correct.double() / self.counted


def average_accuracy(matrix: Tensor, learned: int) -> float:
    """Return the mean accuracy on the tasks learned so far.

    >>> matrix = torch.tensor([[0.9, 0.5], [0.7, 0.8]])
    >>> round(average_accuracy(matrix, 1), 6)
    0.75
    """
    return float(matrix[learned, : learned + 1].mean())


def forgetting(matrix: Tensor, learned: int) -> float:
    """Return the mean accuracy that earlier tasks have lost since they were learned.

    >>> matrix = torch.tensor([[0.9, 0.5], [0.7, 0.8]])
    >>> round(forgetting(matrix, 1), 6)
    0.2
    """
    if learned == 0:
        return 0.0
    first = matrix.diagonal()[:learned]
    return float((first - matrix[learned, :learned]).mean())


def backward_transfer(matrix: Tensor, learned: int) -> float:
    """Return the mean accuracy that earlier tasks have gained (the negative of `forgetting`)."""
    return 0.0 - forgetting(matrix, learned)


def forward_transfer(matrix: Tensor, learned: int, chance: Tensor) -> float:
    """Return the mean accuracy above chance on tasks before they are learned.

    >>> matrix = torch.tensor([[0.9, 0.6], [0.7, 0.8]])
    >>> round(forward_transfer(matrix, 1, torch.tensor([0.5, 0.5])), 6)
    0.1
    """
    if learned == 0:
        return 0.0
    before = matrix.diagonal(1)[:learned]
    return float((before - chance[1 : learned + 1].to(before)).mean())


def overlap(rates: Tensor) -> float:
    """Return the share of units that two tasks have in common, averaged over all pairs.

    Args:
        rates: The open rate of each unit for each task, with the shape ``(tasks, units)``.

    >>> overlap(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])) == 1 / 3
    True
    """
    pairs = torch.combinations(torch.arange(len(rates)))
    if not len(pairs):
        return 0.0
    first, second = rates.double()[pairs].unbind(1)
    shared, either = torch.minimum(first, second).sum(-1), torch.maximum(first, second).sum(-1)
    return float((shared / either.clamp_min(1e-12)).mean())


def plasticity(matrix: Tensor, learned: int, tasks: int = 10) -> float:
    """Return how much better the last tasks are learned than the first ones.

    The accuracy on each task is measured right after learning it. The result is the mean over the
    last `tasks` tasks minus the mean over the first `tasks` tasks. It is NaN if fewer than
    ``2 * tasks`` tasks have been learned. A negative value means that the network learns new tasks
    less well than it did at first.

    >>> matrix = torch.diag(torch.tensor([0.9, 0.9, 0.8, 0.7]))
    >>> round(plasticity(matrix, 3, tasks=2), 6)
    -0.15
    """
    right_after = matrix.diagonal()[: learned + 1]
    if len(right_after) < 2 * tasks:
        return math.nan
    return float(right_after[-tasks:].mean() - right_after[:tasks].mean())
