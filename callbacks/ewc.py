"""Elastic weight consolidation: earlier tasks hold their weights by a spring."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.continual import TaskData, task_data

__all__ = ["EWC"]


class EWC(pl.Callback):
    """Pulls weights back to what earlier tasks have learned, the more they mattered.

    How much a weight mattered is the mean square of its gradients in the last epoch of a task (a
    diagonal of the empirical Fisher information), summed over tasks. The pull is added to the
    gradient of a step, so the logged loss is that of the task.

    (Kirkpatrick et al.: "Overcoming catastrophic forgetting in neural networks",
    arXiv:1612.00796.)

    Args:
        weight: Weight of the quadratic penalty, λ of the publication.

    >>> EWC(weight=100.0).weight
    100.0
    """

    @checked
    def __init__(self, weight: float = 100.0) -> None:
        if weight < 0:
            raise ValueError(f"`weight` must be at least 0, got {weight}.")
        self.weight = weight
        self._data: TaskData | None = None
        self._start_anew()

    def _start_anew(self) -> None:
        self.task = 0
        # By name of the weight: importance, importance times the weights of each task, and squares.
        self._importance: dict[str, Tensor] = {}
        self._anchored: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._data = task_data(trainer, self)
        if stage == "fit":
            self._start_anew()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._data is not None
        if self.task < self._data.current_task:
            for name, parameter in _learned(pl_module).items():
                if name in self._squares:
                    importance = self._squares[name] / self._steps[name]
                    anchored = importance * parameter.detach().to(importance.dtype)
                    _add(self._importance, name, importance)
                    _add(self._anchored, name, anchored)
            self.task = self._data.current_task
        self._squares, self._steps = {}, {}

    @override
    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in _learned(pl_module).items():
            if parameter.grad is None or id(parameter) not in held:
                continue
            # In half precision squares would vanish, and what is anchored would be rounded away.
            wide = torch.promote_types(parameter.dtype, torch.float32)
            square = parameter.grad.to(wide).square()  # not where a loss scaler will skip the step
            _add(self._squares, name, torch.where(square.isfinite().all(), square, 0))
            self._steps[name] = self._steps.get(name, 0) + 1
            if name in self._importance:
                importance = self._importance[name].to(parameter.device)
                anchored = self._anchored[name].to(parameter.device)
                pull = self.weight * (importance * parameter.to(wide) - anchored)
                parameter.grad += pull.to(parameter.grad.dtype)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "steps": self._steps,
            "importance": self._importance,
            "anchored": self._anchored,
            "squares": self._squares,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.task, self._steps = state_dict["task"], dict(state_dict["steps"])
        self._importance = dict(state_dict["importance"])
        self._anchored = dict(state_dict["anchored"])
        self._squares = dict(state_dict["squares"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None}


def _learned(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = value if name not in sums else sums[name].to(value.device) + value
