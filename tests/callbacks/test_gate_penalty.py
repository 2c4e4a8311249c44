"""GatePenalty: which gates it penalises, what it logs and what it rejects."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from penalised_nets import (
    WEIGHT,
    Foreign,
    ForeignByHand,
    analytic_gradient,
    fitted,
    samples,
    trainer_for,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedLinear, gate_layers
from dg_lightning.budget.penalty import mean_rates
from dg_lightning.callbacks import GatePenalty
from dg_lightning.gates.state import shared_state
from dg_lightning.schedules.schedule import Schedule


def test_logs_the_usage_and_lets_go_of_the_graph() -> None:
    model = Foreign()
    trainer = trainer_for(callbacks=[GatePenalty(WEIGHT)])
    trainer.fit(model, DataLoader(TensorDataset(samples()), batch_size=16))
    fresh = Foreign()
    fresh.backbone(samples())
    usage = mean_rates(gate_layers(fresh)).sum().item()
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
    model = fitted({"usage": "open_rate"}, cls=TwoLosses)
    for name, grad in analytic_gradient({"usage": "open_rate"}, 1).items():
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
    with pytest.raises(RuntimeError, match="the last forward pass recorded no graph"):
        fitted({"usage": "open_rate"}, cls=WithoutGraph)
    with pytest.raises(ValueError, match=r"needs a scalar loss, got shape \(16, 1\)"):
        fitted({"usage": "open_rate"}, cls=VectorLoss)
    model = Foreign()
    model.backbone[1] = GatedLinear(8, 6, gate={"kind": "static"}, norm="layer")
    loader = DataLoader(TensorDataset(samples()), batch_size=16)
    with pytest.raises(ValueError, match=r"`usage='expected_macs'`.* backbone.1.gate"):
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


def test_the_weight_follows_its_schedule_by_optimizer_steps() -> None:
    weights = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            weights.append(trainer.callback_metrics["gates/penalty_weight"].item())

    ramp = Schedule(0.0, 1.0, begin=2, until=6)
    trainer = trainer_for(
        max_steps=8,
        accumulate_grad_batches=2,
        callbacks=[GatePenalty(ramp), Watch()],
        log_every_n_steps=1,
    )
    trainer.fit(Foreign(), DataLoader(TensorDataset(samples()), batch_size=2))
    assert weights[::2] == weights[1::2] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]


def test_phases_and_rescues_scale_the_gradient_on_their_gates() -> None:
    callback = GatePenalty(WEIGHT)

    class Factor(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            gates = list(callback.term.gates.values())
            shared_state(trainer, gates[0]).phase_factor = 0.0
            shared_state(trainer, gates[1]).phase_factor = 2.0
            shared_state(trainer, gates[1]).rescue_factor = 0.25

    model = Foreign()
    trainer = trainer_for(callbacks=[callback, Factor()])
    trainer.fit(model, DataLoader(TensorDataset(samples()), batch_size=16))
    fresh = Foreign()
    loss = fresh.training_step([samples()], 0)
    rates = mean_rates(gate_layers(fresh))
    (loss + WEIGHT * 0.5 * rates[1]).backward()
    for name, parameter in fresh.named_parameters():
        torch.testing.assert_close(model.grads[name], parameter.grad, msg=name)
    assert trainer.callback_metrics["gates/penalty_weight"].item() == pytest.approx(WEIGHT / 4)


def test_several_penalties_add_up_and_log_under_their_names() -> None:
    model = Foreign()
    penalties: list[Any] = [
        GatePenalty(0.3, name="all"),
        GatePenalty(2.0, "hinge_below", target=0.9, layers=["*0*"], name="floor"),
    ]
    trainer = trainer_for(callbacks=penalties)
    trainer.fit(model, DataLoader(TensorDataset(samples()), batch_size=16))
    fresh = Foreign()
    loss = fresh.training_step([samples()], 0)
    rates = mean_rates(gate_layers(fresh))
    (loss + 0.3 * rates.sum() + 2.0 * (0.9 - rates[0]).relu() ** 2).backward()
    for name, parameter in fresh.named_parameters():
        torch.testing.assert_close(model.grads[name], parameter.grad, msg=name)
    logged = {"gates/penalty/all", "gates/penalty/floor", "gates/penalty_weight/floor"}
    assert logged <= set(trainer.callback_metrics)
    with pytest.raises(ValueError, match="have no `name`: give each"):
        trainer_for(callbacks=[GatePenalty(1), GatePenalty(1)]).fit(
            Foreign(), DataLoader(TensorDataset(samples()))
        )


def test_a_penalty_reaches_gates_that_the_loss_does_not() -> None:
    model = Foreign()
    model.backbone.append(nn.Linear(1, 1))

    def without_gates(batch: Any, batch_idx: int) -> Tensor:
        model.backbone[:3](batch[0])
        out: Tensor = model.backbone[3](torch.ones(1, 1)).sum()
        return out

    model.training_step = without_gates  # type: ignore[method-assign]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.on_before_optimizer_step = lambda optimizer: None  # type: ignore[method-assign]
    trainer_for(callbacks=[GatePenalty(10.0)]).fit(
        model, DataLoader(TensorDataset(samples()), batch_size=16)
    )
    bias = "backbone.0.gate.network.0.bias"
    assert (dict(model.named_parameters())[bias] < before[bias]).all()


def test_bad_arguments_and_a_module_without_gates_are_named() -> None:
    with pytest.raises(ValueError, match="`weight` must be at least 0, got -1"):
        GatePenalty(-1)
    with pytest.raises(ValueError, match=r"`usage` must be open_rate.* or hinge_above, got 'l0'"):
        GatePenalty(1, "l0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`target` .* `usage='open_rate'`"):
        GatePenalty(1, target=0.5)
    with pytest.raises(ValueError, match=r"`weight` takes start, end, .*, got from"):
        GatePenalty({"from": 1})  # type: ignore[arg-type]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"usage": "target"}, "needs a `target` for backbone.0.gate, backbone.1.gate"),
        ({"layer_weights": {"no": 1.0}}, "`layer_weights`.*'no'"),
        ({"unit_costs": {"*0*": [1.0]}}, "must be 8 numbers, at least 0 and not all 0, got 1"),
        ({"layer_weights": {"*": -1.0}}, "`layer_weights` must be at least 0, got -1.0"),
        ({"layers": []}, r"`layers` must be .*got \[\]"),
    ]
    for settings, message in wrong:
        with pytest.raises(ValueError, match=message):
            fitted(settings)
    model = Foreign()
    model.backbone = nn.Sequential(nn.Linear(4, 1))
    with pytest.raises(ValueError, match="Foreign has no gate"):
        trainer_for(callbacks=[GatePenalty(1)]).fit(model, DataLoader(TensorDataset(samples())))
