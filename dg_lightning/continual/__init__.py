"""Continual learning: task data, measures, and protection of learned weights."""

from dg_lightning.continual.protection import Protection
from dg_lightning.continual.tasks import (
    AccuracyMatrix,
    TaskData,
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
    mask_classes,
    overlap,
    plasticity,
    task_data,
)

__all__ = [
    "AccuracyMatrix",
    "Protection",
    "TaskData",
    "average_accuracy",
    "backward_transfer",
    "forgetting",
    "forward_transfer",
    "mask_classes",
    "overlap",
    "plasticity",
    "task_data",
]
