from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import DynamicGate, GatedLinear, gate_layers
from dg_lightning.callbacks import GatePenalty
from dg_lightning.compute import linear_maps
from dg_lightning.penalties import expected_macs_usage, mean_probabilities

WEIGHT = 0.7


class Foreign(pl.LightningModule):
    """Somebody's module: it knows nothing of gates, and keeps the first gradients it sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        gates = [DynamicGate(4, 8), DynamicGate(8, 6, network="low_rank", rank=2)]
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

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]


def samples() -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def analytic_gradient(usage: str, micro_batches: int) -> dict[str, Tensor]:
    """The gradient of the mean over micro-batches of loss and penalty, with no Trainer."""
    model = Foreign()
    for x in samples().chunk(micro_batches):
        loss = model.training_step([x], 0)
        gates = gate_layers(model)
        means = mean_probabilities(gates)
        if usage == "linear":
            term = means.sum()
        else:
            term = expected_macs_usage(means, list(gates.values()), linear_maps(model))
        ((loss + WEIGHT * term) / micro_batches).backward()
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
    usage: Any, micro_batches: int = 1, cls: type[Foreign] = Foreign, **trainer: Any
) -> Foreign:
    model = cls()
    loader = DataLoader(TensorDataset(samples()), batch_size=16 // micro_batches)
    trainer_for(
        callbacks=[GatePenalty(WEIGHT, usage)], accumulate_grad_batches=micro_batches, **trainer
    ).fit(model, loader)
    return model


@pytest.mark.parametrize("usage", ["linear", "expected_macs"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradient_equals_the_analytic_one(usage: str, micro_batches: int) -> None:
    model = fitted(usage, micro_batches)
    expected = analytic_gradient(usage, micro_batches)
    assert model.grads.keys() == expected.keys()
    for name, grad in model.grads.items():
        torch.testing.assert_close(grad, expected[name], msg=name)


def test_manual_optimization_gets_the_same_gradient() -> None:
    model = fitted("linear", cls=ForeignByHand)
    for name, grad in analytic_gradient("linear", 1).items():
        torch.testing.assert_close(model.grads[name], grad, msg=name)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_with_and_without_a_loss_scaler(precision: str) -> None:
    plugins = []
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
        plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
    model = fitted("linear", precision=None if plugins else precision, plugins=plugins)
    for name, grad in analytic_gradient("linear", 1).items():
        torch.testing.assert_close(model.grads[name], grad, msg=name, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("usage", ["linear", "expected_macs"])
def test_two_processes_equal_one_with_twice_the_batch(
    usage: str, in_two_processes: Callable[[str], list[Any]]
) -> None:
    ranks = in_two_processes(f"""
sys.path.insert(0, sys.path[0] + "/callbacks")
from test_gate_penalty import *
class MeanSquare(Foreign):  # a mean over samples, so that halves average to the whole
    def training_step(self, batch, batch_idx):
        return self.backbone(batch[0]).square().mean()
model = MeanSquare()
loader = DataLoader(TensorDataset(samples()), batch_size=8)
penalty = GatePenalty(WEIGHT, {usage!r})
trainer_for(callbacks=[penalty], strategy="ddp", devices=2).fit(model, loader)
result = {{name: grad.tolist() for name, grad in model.grads.items()}}
""")
    model = Foreign()
    loss = model.backbone(samples()).square().mean()
    gates = gate_layers(model)
    means = mean_probabilities(gates)
    term = means.sum()
    if usage == "expected_macs":
        term = expected_macs_usage(means, list(gates.values()), linear_maps(model))
    (loss + WEIGHT * term).backward()
    for grads in ranks:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.tensor(grads[name]), parameter.grad, msg=name)


def test_logs_the_usage_and_lets_go_of_the_graph() -> None:
    model = Foreign()
    trainer = trainer_for(callbacks=[GatePenalty(WEIGHT)])
    trainer.fit(model, DataLoader(TensorDataset(samples()), batch_size=16))
    fresh = Foreign()
    fresh.backbone(samples())
    usage = mean_probabilities(gate_layers(fresh)).sum().item()
    assert trainer.callback_metrics["gates/penalty"].item() == pytest.approx(usage)
    assert trainer.callback_metrics["gates/penalty_weight"].item() == pytest.approx(WEIGHT)
    gate = gate_layers(model)["backbone.0.gate"]
    assert gate.probability is not None
    assert not gate.probability.requires_grad


def test_presses_only_on_the_gates_that_are_named() -> None:
    model = Foreign()
    callback = GatePenalty(WEIGHT, "expected_macs", layers=["backbone.1.*"])
    trainer = trainer_for(callbacks=[callback])
    trainer.fit(model, DataLoader(TensorDataset(samples()), batch_size=16))
    fresh = Foreign()
    fresh.backbone(samples())
    second = gate_layers(fresh)["backbone.1.gate"].probability
    assert second is not None
    # backbone.2 is a plain layer, whose inputs nobody has declared closed.
    by_hand = (32 + 48 * second.mean().item() + 6) / 86
    assert trainer.callback_metrics["gates/penalty"].item() == pytest.approx(by_hand)


class TwoLosses(ForeignByHand):
    """One forward pass and two backward passes, the second one without the gates."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        hidden = self.backbone(batch[0])
        self.manual_backward(hidden.square().mean().sqrt())
        self.manual_backward(self.backbone[2](torch.ones(1, 6)).sum() * 0)
        self.optimizers().step()  # type: ignore[union-attr]


def test_a_forward_pass_is_penalised_once_however_many_losses_it_has() -> None:
    model = fitted("linear", cls=TwoLosses)
    for name, grad in analytic_gradient("linear", 1).items():
        torch.testing.assert_close(model.grads[name], grad, msg=name)


class WithoutGraph(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.backbone(batch[0])
        return loss


class VectorLoss(ForeignByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.backbone(batch[0]), gradient=torch.ones(16, 1))


def test_what_would_make_it_act_wrongly_or_not_at_all_is_refused() -> None:
    with pytest.raises(RuntimeError, match="found no graph behind the gates' last forward pass"):
        fitted("linear", cls=WithoutGraph)
    with pytest.raises(ValueError, match=r"needs a scalar loss, got shape \(16, 1\)"):
        fitted("linear", cls=VectorLoss)
    model = Foreign()
    model.backbone[1] = GatedLinear(8, 6, gate={"kind": "static"}, norm="layer")
    loader = DataLoader(TensorDataset(samples()), batch_size=16)
    with pytest.raises(ValueError, match=r"knows no linear map of backbone.1.gate"):
        trainer_for(callbacks=[GatePenalty(1.0, "expected_macs")]).fit(model, loader)


def test_runs_in_a_pytorch_lightning_trainer() -> None:
    import pytorch_lightning

    class Theirs(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = GatedLinear(4, 2, gate={"kind": "static"})

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out: Tensor = self.layer(batch[0]).mean()
            return out

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    model = Theirs()
    before = model.layer.gate.logit.detach().clone()  # type: ignore[union-attr,operator]
    pytorch_lightning.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[GatePenalty(100.0)],  # type: ignore[list-item]
    ).fit(model, DataLoader(TensorDataset(samples()), batch_size=16))
    assert (model.layer.gate.logit < before).all()  # type: ignore[union-attr,operator]


def test_bad_arguments_and_a_module_without_gates_are_named() -> None:
    with pytest.raises(ValueError, match="`weight` must be at least 0 and finite, got -1"):
        GatePenalty(-1)
    with pytest.raises(ValueError, match="`usage` must be linear or expected_macs, got 'l0'"):
        GatePenalty(1, "l0")  # type: ignore[arg-type]
    model = Foreign()
    model.backbone = nn.Sequential(nn.Linear(4, 1))
    with pytest.raises(ValueError, match="Foreign has no gate"):
        trainer_for(callbacks=[GatePenalty(1)]).fit(model, DataLoader(TensorDataset(samples())))
