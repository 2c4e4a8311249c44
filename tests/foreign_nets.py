"""Somebody's modules, and arguments for every exported callback."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import dg_lightning.callbacks
from dg_lightning import DynamicGate, GatedLinear, StaticGate, SwitchMoE
from dg_lightning.datamodules import DigitsDataModule
from dg_lightning.schedules import Schedule

ARGUMENTS: dict[str, dict[str, Any]] = {
    "AddGates": {"feed_forward": {"kind": "static"}},
    "BudgetController": {"budget": 0.6},
    "CollapseDetector": {"action": "rescue"},
    "ContinualBackprop": {"rate": 0.02, "maturity": 2},
    "Distill": {"teacher": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))},
    "ExactResume": {},
    "GateMonitor": {"every_n_epochs": 1},
    "GatePenalty": {"weight": Schedule(0.0, 0.5, "cosine", begin=2), "usage": "expected_macs"},
    "MinimumActivity": {"min_open": "10%", "revive_after": 10},
    "MagnitudePruning": {"sparsity": 0.5, "begin": 4, "layers": ["*3"]},
    "ReviveDormant": {"threshold": 0.5, "every_n_steps": 4, "maturity": 2},
    "RigL": {"sparsity": 0.8, "every_n_steps": 3, "layers": ["*1.linear"], "gate_aware": "grow"},
    "RoutingMonitor": {},
    "SET": {"sparsity": 0.8, "every_n_steps": 3, "layers": ["*2.linear"]},
    "StaticSparse": {"sparsity": 0.8},
    "TemperatureAnnealing": {},
    "ThresholdPhases": {},
    "ThresholdRamp": {"start": 0.5, "end": 0.6},
}
OF_TASKS: dict[str, dict[str, Any]] = {  # which need a DataModule of tasks
    "Adapt": {"batches": 20},
    "EWC": {"weight": 10.0},
    "SynapticIntelligence": {"weight": 0.1},
    "TaskGates": {},
    "TaskHeads": {},
    "TaskMonitor": {},
}
each = pytest.mark.parametrize("name", ARGUMENTS)


def make(name: str) -> Any:
    return getattr(dg_lightning.callbacks, name)(**ARGUMENTS[name])


def together(pressing: str = "GatePenalty") -> list[Any]:
    # RoutingMonitor follows routers, which have an open rate of their own.
    others = {"BudgetController", "GatePenalty", "StaticSparse", "RoutingMonitor"} - {pressing}
    others |= {"AddGates", "ContinualBackprop", "ReviveDormant"}  # there are gates already
    others |= {"ThresholdRamp"}  # phases set the threshold
    return [make(name) for name in ARGUMENTS if name not in others]


class Foreign(pl.LightningModule):
    """Somebody's module: gates of both kinds in a submodule, one of them drawn, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        dynamic = DynamicGate(32, 16, network="low_rank", rank=4)
        nn.init.normal_(dynamic.network[-1].weight, std=0.1)  # type: ignore[arg-type]
        self.body = nn.Sequential(
            nn.Flatten(),
            GatedLinear(64, 32, gate=StaticGate(32, policy="bernoulli"), dropout=0.1),
            GatedLinear(32, 16, gate=dynamic),
            nn.Linear(16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self.body(batch[0])
        self.log("val", nn.functional.cross_entropy(logits, batch[1]))
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Mixture(Foreign):
    """Somebody's mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), SwitchMoE(64, 10, width=16, expert_width=8))


class Ungated(Foreign):
    """Somebody's module without gates."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def module_for(name: str) -> Foreign:
    ungated = dict.fromkeys(("AddGates", "ContinualBackprop", "ReviveDormant"), Ungated)
    return {"RoutingMonitor": Mixture, **ungated}.get(name, Foreign)()


def trainer_for(callbacks: list[Any], root: Path, **arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 12,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 1,
        "log_every_n_steps": 2,
        "default_root_dir": root,
    }
    return pl.Trainer(callbacks=callbacks, **{**defaults, **arguments})


def data() -> DigitsDataModule:
    return DigitsDataModule(batch_size=64, split_seed=0)
