"""Tasks in sequence: what callbacks ask of the data, and measures of learning and forgetting."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import TypeIs, get_protocol_members, override

from dg_lightning.compute.macs import as_matrix, linear_maps

_CLOSED = -1e4  # a logit that no softmax sees, finite in half precision


class TaskData(Protocol):
    """A DataModule of tasks in sequence, such as `TaskSequence`; anybody may write another."""

    tasks: int
    joint: bool  # whether all tasks are trained together, as a limit to compare with

    @property
    def num_classes(self) -> int:
        """Number of outputs of a model."""

    @property
    def tells_task(self) -> bool:
        """Whether a model may know the task of a sample."""

    @property
    def current_task(self) -> int:
        """The task that is trained now."""

    def task_of(self, part: str, batch: int) -> int:
        """Return the task of a batch of `val` or `test`; a batch holds samples of one task."""

    def classes_of(self, task: int) -> Sequence[int] | None:
        """Return the classes that a task is about; None if all tasks have the same."""


_MEMBERS = get_protocol_members(TaskData)


def _has_tasks(data: object) -> TypeIs[TaskData]:
    return all(hasattr(data, name) for name in _MEMBERS)


def task_data(trainer: Any, callback: object) -> TaskData:
    """Return the DataModule of a Trainer, or raise ValueError if it has no tasks."""
    data: object = getattr(trainer, "datamodule", None)
    if not _has_tasks(data):
        raise ValueError(
            f"{type(callback).__name__} needs a DataModule of tasks, got {type(data).__name__}: "
            "wrap yours in dg_lightning.datamodules.TaskSequence."
        )
    return data


def find_head(module: nn.Module, data: TaskData, name: str | None = None) -> nn.Module | None:
    """Return the map that makes the logits; None if all tasks have the same classes.

    Without a name it is the last one with as many outputs as there are classes.
    """
    if data.classes_of(0) is None:
        return None
    maps = {m.name: m.linear for m in linear_maps(module) if m.output_gate is None}
    outputs = {n: as_matrix(linear, linear.weight).shape[0] for n, linear in maps.items()}
    fitting = [n for n in maps if outputs[n] == data.num_classes and name in (None, n)]
    if not fitting:
        there = ", ".join(f"{n} with {count} outputs" for n, count in outputs.items())
        raise ValueError(
            f"`head` must name the linear map that makes the {data.num_classes} logits, got "
            f"{name!r}; there are {there or 'none'}."
        )
    head: nn.Module = maps[fitting[-1]]
    return head


def mask_classes(logits: Tensor, classes: Sequence[int] | None) -> Tensor:
    """Return logits that leave only some classes to choose from; all if None.

    >>> mask_classes(torch.zeros(1, 3), [0, 2]).softmax(-1).tolist()
    [[0.5, 0.0, 0.5]]
    """
    if classes is None:
        return logits
    others = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
    others[list(classes)] = False
    return logits.masked_fill(others, _CLOSED)


class Heads:
    """Leaves a model some of its classes, by a hook on the map that makes its logits.

    Args:
        module: The model.
        data: The tasks.
        name: Name of the map; None for the last one.
    """

    def __init__(self, module: nn.Module, data: TaskData, name: str | None = None) -> None:
        self.map = find_head(module, data, name)
        self.classes: Sequence[int] | None = None  # that are left; None for all
        self._handle = self.map.register_forward_hook(self._mask) if self.map is not None else None

    def _mask(self, module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        return mask_classes(logits, self.classes)

    def remove(self) -> None:
        """Leave the model all of its classes for good."""
        if self._handle is not None:
            self._handle.remove()


def least_uncertain(logits: Sequence[Tensor]) -> Tensor:
    """Return, for each sample, those of several logits whose entropy is least.

    >>> least_uncertain([torch.tensor([[0.0, 1.0]]), torch.tensor([[9.0, 0.0]])]).tolist()
    [[9.0, 0.0]]
    """
    every = torch.stack(list(logits))
    entropy = torch.special.entr(every.float().softmax(-1)).sum(-1)
    index = entropy.argmin(0)[None, ..., None].expand(1, *every.shape[1:])
    return every.gather(0, index)[0]


def logits_of(outputs: Any, callback: object) -> Tensor:
    """Return the class logits that a step has returned, or raise TypeError."""
    logits = outputs.get("logits") if isinstance(outputs, dict) else outputs
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"{type(callback).__name__} needs the class logits: return them from `validation_step` "
            f"and `test_step`, as a tensor or under the key 'logits'; got {type(outputs).__name__}."
        )
    return logits


def task_progress(trainer: Any, data: TaskData, batch_idx: int) -> float:
    """Return the share of the current task's batches that are done, if all take as many epochs."""
    epochs: float = trainer.max_epochs / data.tasks
    done: float = trainer.current_epoch + batch_idx / trainer.num_training_batches
    return min(max(done / epochs - data.current_task, 0.0), 1.0)


class AccuracyMatrix(Metric):
    """Accuracy on every task (columns) after learning each task (rows).

    What was not measured is NaN.

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
        """Count the samples of a task that a model gets right which has learned up to another."""
        self.correct[learned, task] += (logits.argmax(-1) == target).sum()
        self.counted[learned, task] += target.numel()

    @override
    def compute(self) -> Tensor:
        """Return the accuracies, float64."""
        return self.correct.double() / self.counted


def average_accuracy(matrix: Tensor, learned: int) -> float:
    """Return the mean accuracy on the tasks learned so far.

    >>> matrix = torch.tensor([[0.9, 0.5], [0.7, 0.8]])
    >>> round(average_accuracy(matrix, 1), 6)
    0.75
    """
    return float(matrix[learned, : learned + 1].mean())


def forgetting(matrix: Tensor, learned: int) -> float:
    """Return the accuracy that earlier tasks have lost since they were learned, on average.

    >>> matrix = torch.tensor([[0.9, 0.5], [0.7, 0.8]])
    >>> round(forgetting(matrix, 1), 6)
    0.2
    """
    if learned == 0:
        return 0.0
    first = matrix.diagonal()[:learned]
    return float((first - matrix[learned, :learned]).mean())


def backward_transfer(matrix: Tensor, learned: int) -> float:
    """Return what learning has added to earlier tasks: the opposite of `forgetting`."""
    return 0.0 - forgetting(matrix, learned)


def forward_transfer(matrix: Tensor, learned: int, chance: Tensor) -> float:
    """Return by how much tasks exceed chance before they are learned, on average.

    >>> matrix = torch.tensor([[0.9, 0.6], [0.7, 0.8]])
    >>> round(forward_transfer(matrix, 1, torch.tensor([0.5, 0.5])), 6)
    0.1
    """
    if learned == 0:
        return 0.0
    before = matrix.diagonal(1)[:learned]
    return float((before - chance[1 : learned + 1].to(before)).mean())


def overlap(rates: Tensor) -> float:
    """Return the share of units that two tasks have in common, over all pairs of tasks.

    Args:
        rates: How often a task opens a unit, ``(tasks, units)``.

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
    """Return by how much the last tasks are learned better than the first ones.

    It is the accuracy right after learning, of the last `tasks` tasks minus the first ones; NaN
    unless there are twice as many. Below 0, a net has lost its ability to learn.

    >>> matrix = torch.diag(torch.tensor([0.9, 0.9, 0.8, 0.7]))
    >>> round(plasticity(matrix, 3, tasks=2), 6)
    -0.15
    """
    right_after = matrix.diagonal()[: learned + 1]
    if len(right_after) < 2 * tasks:
        return math.nan
    return float(right_after[-tasks:].mean() - right_after[:tasks].mean())
