"""Somebody's module with gates, and the gradient that a penalty on them must have."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import DynamicGate, GatedLinear, gate_layers
from dg_lightning.budget.penalty import MacsCost, mean_rates, usage_term
from dg_lightning.callbacks import GatePenalty
from dg_lightning.compute.macs import linear_maps
from dg_lightning.gates import Policy

WEIGHT = 0.7
# Every usage term, with settings that make it act: rates start at 0.8 or so.
USAGES: dict[str, dict[str, Any]] = {
    "linear": {"usage": "open_rate"},
    "linear of g": {"usage": "open_rate", "rate": "g"},
    "linear with weights": {"usage": "open_rate", "layer_weights": {"*1*": 3.0}},
    "linear with costs": {"usage": "open_rate", "unit_costs": {"*1*": [1.0, 2, 3, 4, 5, 6]}},
    "expected MACs": {"usage": "expected_macs"},
    "target": {"usage": "target", "target": 0.3},
    "target of g": {"usage": "target", "rate": "g", "target": {"*0*": 0.3, "*1*": 0.2}},
    "hinge below": {"usage": "hinge_below", "target": 0.95},
    "hinge above": {"usage": "hinge_above", "target": 0.2, "power": 1},
}
every_usage = pytest.mark.parametrize("settings", USAGES.values(), ids=USAGES)


class Foreign(pl.LightningModule):
    """Somebody's module: it knows nothing of gates, and keeps the first gradients it sees."""

    def __init__(self, policy: Policy = "threshold") -> None:
        super().__init__()
        torch.manual_seed(0)
        low_rank = DynamicGate(8, 6, network="low_rank", rank=2, policy=policy)
        gates = [DynamicGate(4, 8, policy=policy), low_rank]
        for gate in gates:
            nn.init.normal_(gate.network[-1].weight)  # type: ignore[arg-type]
        self.backbone = nn.Sequential(
            GatedLinear(4, 8, gate=gates[0]), GatedLinear(8, 6, gate=gates[1]), nn.Linear(6, 1)
        )
        self.grads: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.backbone(batch[0]).square().mean().sqrt()  # sqrt keeps its output
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not self.grads:
            self.grads = {n: p.grad.clone() for n, p in self.named_parameters()}  # type: ignore[union-attr]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ForeignByHand(Foreign):
    """The same with manual optimization."""

    def __init__(self, policy: Policy = "threshold") -> None:
        super().__init__(policy)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]


def samples() -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def term_of(model: nn.Module, settings: dict[str, Any]) -> Tensor:
    """The usage term of the last forward pass, differentiable, with no callback."""
    gates = gate_layers(model)
    shares = None
    if costs := settings.get("unit_costs"):
        shares = {name: torch.tensor(costs["*1*"]) / sum(costs["*1*"]) for name in list(gates)[1:]}
    target = settings.get("target", 0.0)
    weights = settings.get("layer_weights", {"*1*": 1.0})
    return usage_term(
        settings["usage"],
        mean_rates(gates, settings.get("rate", "p"), shares),
        targets=torch.tensor(list(target.values()) if isinstance(target, dict) else [target] * 2),
        power=settings.get("power", 2),
        layer_weights=torch.tensor([1.0, weights["*1*"]]),
        prices=MacsCost(list(gates.values()), linear_maps(model)),
    )


def analytic_gradient(
    settings: dict[str, Any], micro_batches: int, policy: Policy = "threshold"
) -> dict[str, Tensor]:
    """The gradient of the mean over micro-batches of loss and penalty, with no Trainer."""
    model = Foreign(policy)
    for x in samples().chunk(micro_batches):
        loss = model.training_step([x], 0)
        ((loss + WEIGHT * term_of(model, settings)) / micro_batches).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trainer_for(**arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **arguments})


def fitted(
    settings: dict[str, Any],
    micro_batches: int = 1,
    cls: type[Foreign] = Foreign,
    policy: Policy = "threshold",
    **trainer: Any,
) -> Foreign:
    model = cls(policy)
    loader = DataLoader(TensorDataset(samples()), batch_size=16 // micro_batches)
    trainer_for(
        callbacks=[GatePenalty(WEIGHT, **settings)],
        accumulate_grad_batches=micro_batches,
        **trainer,
    ).fit(model, loader)
    return model
