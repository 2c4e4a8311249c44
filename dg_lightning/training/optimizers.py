"""The optimizer and the learning-rate scheduler of a net with gates, from plain values."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dg_lightning.training.spec import OptimizerSpec, SchedulerSpec, build

__all__ = ["build_optimizers"]


def build_optimizers(
    parameters: Iterable[nn.Parameter],
    gate_parameters: Sequence[nn.Parameter],
    optimizer: OptimizerSpec,
    gate_lr_factor: float = 1.0,
    scheduler: SchedulerSpec | None = None,
    interval: str = "epoch",
    monitor: str = "val/loss",
) -> OptimizerLRScheduler:
    """Return what `configure_optimizers` returns.

    Args:
        parameters: All parameters.
        gate_parameters: Those of them that get a group of their own, without weight decay.
        optimizer: Class path and arguments.
        gate_lr_factor: Learning rate of that group, as a multiple of the optimizer's.
        scheduler: Class path and arguments.
        interval: Whether the scheduler steps with every epoch or every optimizer step.
        monitor: The logged value that a `ReduceLROnPlateau` monitors.
    """
    of_gates = {id(parameter) for parameter in gate_parameters}
    groups = [{"params": [p for p in parameters if id(p) not in of_gates]}]
    if gate_parameters:
        groups.append({"params": list(gate_parameters)})
    built = build(optimizer, "optimizer", torch.optim.Optimizer, groups)
    for group in built.param_groups[1:]:
        group["lr"] = group["lr"] * gate_lr_factor
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    if scheduler is None:
        return built
    scheduling = build(scheduler, "lr_scheduler", LRScheduler, built)
    rates = [group["lr"] for group in built.param_groups]
    if gate_parameters and not math.isclose(rates[1], rates[0] * gate_lr_factor):
        raise ValueError(
            f"{type(scheduling).__name__} sets learning rates itself and ignores "
            f"`gate_lr_factor={gate_lr_factor}`: give it a list, for weights and for "
            "gates, and leave the factor at 1."
        )
    config: dict[str, Any] = {"scheduler": scheduling, "interval": interval}
    if isinstance(scheduling, ReduceLROnPlateau):
        config["monitor"] = getattr(scheduling, "monitor", monitor)
    return {"optimizer": built, "lr_scheduler": config}  # type: ignore[return-value]
