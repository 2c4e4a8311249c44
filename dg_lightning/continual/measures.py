"""Measures of learning in sequence, from the matrix of accuracies after each task."""

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

__all__ = [
    "AccuracyMatrix",
    "average_accuracy",
    "backward_transfer",
    "forgetting",
    "forward_transfer",
    "overlap",
    "plasticity",
]


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
