"""Build optimizers and learning-rate schedulers for gated nets from plain values."""

import math
from typing import Any

import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dg_lightning.gates import gate_layers
from dg_lightning.training.spec import OptimizerConfig, SchedulerConfig, build, import_class

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # can be fused on a GPU


def enable_fused(optimizer: OptimizerConfig) -> OptimizerConfig:
    """Return the config with `fused=True`, unless that is impossible or already decided.

    >>> enable_fused({"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})["init_args"]
    {'lr': 0.1, 'fused': True}
    """
    given = optimizer.get("init_args") or {}
    chosen = any(given.get(name) is not None for name in ("fused", "foreach"))
    other = given.get("capturable") or given.get("differentiable")
    if chosen or other or import_class(optimizer["class_path"], Optimizer) not in _FUSED:
        return optimizer
    return {**optimizer, "init_args": {**given, "fused": True}}


def restore_fused(optimizer: Optimizer) -> None:
    """Make an optimizer fused again after it has loaded the state of an unfused one."""
    for group in optimizer.param_groups if optimizer.defaults.get("fused") else ():
        group["fused"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(step := state.get("step"), Tensor):
                state["step"] = step.to(parameter.device, torch.float32)


def has_fused_unscale(trainer: Any, optimizer: Any) -> bool:
    """Return True if gradients stay scaled until the optimizer step."""
    return has_scaler(trainer) and any(group.get("fused") for group in optimizer.param_groups)


def may_be_fused(trainer: Any, clips_gates: bool) -> bool:
    """Return True if gradient clipping allows a fused optimizer.

    A fused optimizer unscales gradients in its step, after clipping. Lightning therefore refuses to
    clip in mixed precision, even in bfloat16, where losses are not scaled.
    """
    if trainer.gradient_clip_val and isinstance(trainer.precision_plugin, MixedPrecision):
        return False
    return not (clips_gates and has_scaler(trainer))


def has_scaler(trainer: Any) -> bool:
    """Return True if losses are scaled, as in 16-mixed precision."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def param_groups(module: nn.Module, lr: float, gate_lr_factor: float = 1.0) -> list[dict[str, Any]]:
    """Return optimizer parameter groups for weights and gates.

    Gate logits and biases get their own learning rate and no weight decay. Weight matrices of
    GateNets belong to the weights.

    Args:
        module: The module with gates.
        lr: Learning rate of the weights.
        gate_lr_factor: Learning rate of the gates, as a multiple of `lr`.

    >>> from dg_lightning import GatedLinear
    >>> net = nn.Sequential(GatedLinear(8, 4, gate={"kind": "static"}), nn.Linear(4, 2))
    >>> weights, gates = param_groups(net, lr=1e-3, gate_lr_factor=30.0)
    >>> len(weights["params"]), len(gates["params"]), gates["lr"]
    (4, 1, 0.03)
    """
    if not lr > 0 or gate_lr_factor < 0:
        raise ValueError(
            f"`lr` must be above 0 and `gate_lr_factor` at least 0, got {lr} and {gate_lr_factor}."
        )
    weights, gates = split_parameters(module)
    groups: list[dict[str, Any]] = [{"params": weights, "lr": lr}]
    if gates:
        groups.append({"params": gates, "lr": lr * gate_lr_factor, "weight_decay": 0.0})
    return groups


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return a module's weights, and the logits and biases of its gates."""
    gates = gate_layers(module, required=False).values()
    own = [p for g in gates if isinstance(g, nn.Module) for p in g.parameters() if p.ndim < 2]
    of_gates = {id(p): p for p in own}
    weights = [p for p in module.parameters() if id(p) not in of_gates]
    return weights, list(of_gates.values())


def build_optimizers(
    module: nn.Module,
    optimizer: OptimizerConfig,
    gate_lr_factor: float = 1.0,
    scheduler: SchedulerConfig | None = None,
    interval: str = "epoch",
    monitor: str = "val/loss",
) -> OptimizerLRScheduler:
    """Build the return value of `configure_optimizers`.

    Args:
        module: The module with gates, see `param_groups`.
        optimizer: Class path and arguments.
        gate_lr_factor: Learning rate of the gates, as a multiple of the optimizer's.
        scheduler: Class path and arguments.
        interval: Whether the scheduler steps every epoch or every optimizer step.
        monitor: Logged value that `ReduceLROnPlateau` monitors.
    """
    weights, gates = split_parameters(module)
    groups = [{"params": weights}, *([{"params": gates}] if gates else [])]
    built = build(optimizer, "optimizer", Optimizer, groups)
    for group in built.param_groups[1:]:
        group["lr"] = group["lr"] * gate_lr_factor
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    if scheduler is None:
        return built
    scheduling = build(scheduler, "lr_scheduler", LRScheduler, built)
    rates = [group["lr"] for group in built.param_groups]
    if gates and not math.isclose(rates[1], rates[0] * gate_lr_factor):
        raise ValueError(
            f"{type(scheduling).__name__} sets learning rates and ignores "
            f"`gate_lr_factor={gate_lr_factor}`: pass it a list of rates, first for weights and "
            "then for gates, and set the factor to 1."
        )
    config: dict[str, Any] = {"scheduler": scheduling, "interval": interval}
    if isinstance(scheduling, ReduceLROnPlateau):
        config["monitor"] = getattr(scheduling, "monitor", monitor)
    return {"optimizer": built, "lr_scheduler": config}  # type: ignore[return-value]


def warn_scheduler_length(trainer: Any) -> None:
    """Log a message for each scheduler whose length differs from the training run's.

    Nothing is logged if the length is uncertain, or if the run is resumed with its old scheduler.
    """
    ends_otherwise = trainer.max_steps != -1 or any(isinstance(c, Timer) for c in trainer.callbacks)
    ends_otherwise |= trainer.fast_dev_run or (trainer.max_epochs or 0) < 1
    if ends_otherwise or trainer.ckpt_path or not trainer.lightning_module.automatic_optimization:
        return
    for config in trainer.lr_scheduler_configs:
        by_epoch = config.interval == "epoch"
        if not by_epoch and trainer.reload_dataloaders_every_n_epochs:
            continue  # epochs may differ in length
        length = trainer.max_epochs if by_epoch else trainer.estimated_stepping_batches
        for name in ("T_max", "total_steps"):
            planned = getattr(config.scheduler, name, None)
            if planned is not None and planned * config.frequency != length:
                rank_zero_info(
                    f"{type(config.scheduler).__name__} plans {planned} "
                    f"{'epochs' if by_epoch else 'steps'}, but the training run has {length}: to "
                    f"match them, set {name}={length} "
                    f"(--model.lr_scheduler.{name}={length})."
                )
