"""Pull important weights towards their values after earlier tasks: EWC, synaptic intelligence."""

from abc import abstractmethod
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.continual import TaskData, task_data


class _Consolidation(pl.Callback):
    """Adds `pull * (importance * weight - anchored)` to the gradients, for each weight.

    Subclasses estimate importances. The logged loss is the task loss alone.
    """

    pull: float  # strength

    def __init__(self) -> None:
        self._data: TaskData | None = None
        self._reset()

    def _reset(self) -> None:
        self.task = 0
        # The keys of these dicts are weight names.
        self._importance: dict[str, Tensor] = {}  # summed over tasks
        self._anchored: dict[str, Tensor] = {}  # importance times the value to return to

    @abstractmethod
    def _end_task(self, weights: dict[str, nn.Parameter]) -> None:
        """Update importances and anchors after a task."""

    @abstractmethod
    def _observe(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        """Take note of the task's gradient right before a step."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._data = task_data(trainer, self)
        if stage == "fit":
            self._reset()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._data is not None
        if self.task < self._data.current_task:
            self._end_task(_learned(pl_module))
            self.task = self._data.current_task

    @override
    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in _learned(pl_module).items():
            if parameter.grad is None or id(parameter) not in held:
                continue
            # In half precision, squares would underflow and the anchors would be rounded away.
            wide = _wide(parameter)
            self._observe(name, wide, parameter.grad.to(wide.dtype))
            if name in self._importance:
                importance = self._importance[name].to(parameter.device)
                anchored = self._anchored[name].to(parameter.device)
                pull = self.pull * (importance * wide - anchored)
                parameter.grad += pull.to(parameter.grad.dtype)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"task": self.task, "importance": self._importance, "anchored": self._anchored}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.task = state_dict["task"]
        self._importance = dict(state_dict["importance"])
        self._anchored = dict(state_dict["anchored"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None}


class EWC(_Consolidation):
    """Pulls important weights towards their values after earlier tasks.

    The importance of a weight is the mean square of its gradients in the last epoch of a task (the
    diagonal of the empirical Fisher information), summed over tasks. The pull is added to the
    gradients, so the logged loss is the task loss alone.

    (Kirkpatrick et al.: "Overcoming catastrophic forgetting in neural networks",
    arXiv:1612.00796.)

    Args:
        weight: Weight of the quadratic penalty, λ in the paper.

    >>> EWC(weight=100.0).weight
    100.0
    """

    @checked
    def __init__(self, weight: float = 100.0) -> None:
        if weight < 0:
            raise ValueError(f"`weight` must be at least 0, got {weight}.")
        self.weight = self.pull = weight
        super().__init__()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._squares: dict[str, Tensor] = {}  # squared gradients, summed over an epoch
        self._steps: dict[str, int] = {}  # number of squared gradients in each sum

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._squares, self._steps = {}, {}

    @override
    def _end_task(self, weights: dict[str, nn.Parameter]) -> None:
        for name, squares in self._squares.items():
            if name not in weights:  # frozen meanwhile
                continue
            importance = squares / self._steps[name]
            _add(self._importance, name, importance)
            weight = _wide(weights[name])
            _add(self._anchored, name, importance.to(weight.device) * weight)

    @override
    def _observe(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        square = gradient.square()  # not finite if a loss scaler skips the step
        _add(self._squares, name, torch.where(square.isfinite().all(), square, 0))
        self._steps[name] = self._steps.get(name, 0) + 1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps, "squares": self._squares}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._steps, self._squares = dict(state_dict["steps"]), dict(state_dict["squares"])


class SynapticIntelligence(_Consolidation):
    """Pulls weights that have lowered the loss towards their values after the last task.

    The importance of a weight is how much its steps during a task have lowered the loss, by its
    gradients, divided by the square of its total change plus `damping`, summed over tasks. Weights
    whose steps have raised the loss get no importance from that task.

    (Zenke et al.: "Continual Learning Through Synaptic Intelligence", arXiv:1703.04200.)

    Args:
        weight: Weight of the quadratic penalty, c in the paper.
        damping: Added to the square of a weight's total change, ξ in the paper.

    >>> SynapticIntelligence(weight=0.1).damping
    0.001
    """

    @checked
    def __init__(self, weight: float = 1.0, damping: float = 1e-3) -> None:
        if weight < 0:
            raise ValueError(f"`weight` must be at least 0, got {weight}.")
        if damping <= 0:
            raise ValueError(f"`damping` must be above 0, got {damping}.")
        self.weight, self.damping = weight, damping
        self.pull = 2 * weight
        super().__init__()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._start: dict[str, Tensor] = {}  # values at the start of the task
        self._gains: dict[str, Tensor] = {}  # how much each weight has lowered the loss
        self._step: dict[str, tuple[Tensor, Tensor]] = {}  # (value, gradient) before a step

    @override
    def _observe(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        self._start.setdefault(name, weight.clone())
        if name in self._step:  # the second step of a batch
            self._credit(name, weight)
        self._step[name] = weight.clone(), gradient.clone()

    def _credit(self, name: str, weight: Tensor) -> None:
        """Credit a weight with what its last step has gained."""
        before, gradient = self._step.pop(name)
        # Gradients are not finite if a loss scaler skips the step.
        finite = torch.where(gradient.isfinite().all(), gradient, 0)
        _add(self._gains, name, finite * (before - weight))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        weights = _learned(pl_module)
        for name in list(self._step):
            if name in weights:
                self._credit(name, _wide(weights[name]))
        self._step = {}

    @override
    def _end_task(self, weights: dict[str, nn.Parameter]) -> None:
        for name, gains in self._gains.items():
            if name not in weights:  # frozen meanwhile
                continue
            value = _wide(weights[name])
            change = value - self._start[name].to(value.device)
            importance = gains.clamp(min=0).to(value.device) / (change.square() + self.damping)
            _add(self._importance, name, importance)
            self._anchored[name] = self._importance[name] * value
        self._gains, self._start = {}, {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "start": self._start, "gains": self._gains}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._start, self._gains = dict(state_dict["start"]), dict(state_dict["gains"])


def _learned(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _wide(parameter: nn.Parameter) -> Tensor:
    """Return a weight in single precision or more."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = value if name not in sums else sums[name].to(value.device) + value
