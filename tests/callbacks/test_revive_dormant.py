from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from foreign_nets import Ungated, data, trainer_for
from torch import nn

from dg_lightning import GatedClassifier, GatedMLP
from dg_lightning.callbacks import ContinualBackprop, ReviveDormant, RigL


def silent(units: list[int]) -> Any:
    model: Any = Ungated()
    with torch.no_grad():
        model.body[1].bias[units] = -1e3
    return model


def biases(model: Any) -> Any:
    return model.body[1].bias.detach()


def test_units_that_never_act_are_revived_once(tmp_path: Path) -> None:
    model, revive = silent([2, 5, 7]), ReviveDormant(threshold=0.0, every_n_steps=4, maturity=2)
    trainer = trainer_for([revive], tmp_path)
    trainer.fit(model, data())
    assert (biases(model) > -1).all()
    assert float(trainer.callback_metrics["dormant/revived/body.3"]) >= 3
    assert float(trainer.callback_metrics["dormant/share/body.3"]) == 0
    assert model.body[3].weight[:, [2, 5, 7]].abs().sum() > 0


def test_young_units_are_left_alone(tmp_path: Path) -> None:
    model, revive = silent([2]), ReviveDormant(threshold=0.0, every_n_steps=4, maturity=100)
    trainer_for([revive], tmp_path).fit(model, data())
    assert biases(model)[2] < -900


def test_the_least_useful_unit_is_replaced_at_the_given_rate(tmp_path: Path) -> None:
    model = silent([3])
    revive = ContinualBackprop(rate=1 / 16 / 5, maturity=3)  # one of 16 in 5 steps
    trainer = trainer_for([revive], tmp_path, max_steps=11)
    trainer.fit(model, data())
    assert (biases(model) > -1).all()
    assert float(trainer.callback_metrics["dormant/revived/body.3"]) == 2


def test_units_behind_gates_are_found_too(tmp_path: Path) -> None:
    model: Any = Ungated()
    model.body = nn.Sequential(GatedMLP(64, [16, 8], 10, gate={"kind": "static"}))
    with torch.no_grad():
        model.body[0].hidden[0].linear.bias[4] = -1e3
    revive = ReviveDormant(threshold=0.0, every_n_steps=4, maturity=2)
    trainer_for([revive], tmp_path).fit(model, data())
    assert set(revive.units) == {"body.0.hidden.1.linear", "body.0.output"}
    assert model.body[0].hidden[0].linear.bias[4] > -1


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

    ends = []
    for ckpt_path in (None, str(tmp_path / "some.ckpt")):
        pl.seed_everything(0, verbose=False)
        model = silent([1, 2])
        revive = ContinualBackprop(rate=0.02, maturity=2)
        saving = [] if ckpt_path else [Save()]
        trainer = trainer_for([revive, *saving], tmp_path)
        trainer.fit(model, data(), ckpt_path=ckpt_path)
        ends.append(model.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ReviveDormant, {"threshold": 1.0}),
        (ReviveDormant, {"every_n_steps": 0}),
        (ContinualBackprop, {"rate": 2.0}),
        (ContinualBackprop, {"decay": 1.0}),
    ],
)
def test_wrong_values_are_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
        kind(**options)


def test_a_pattern_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'nose'.*body\.3"):
        trainer_for([ReviveDormant(layers=["nose"])], tmp_path).fit(Ungated(), data())


def test_missing_connections_stay_missing(tmp_path: Path) -> None:
    rigl = RigL(0.5, every_n_steps=4)
    revive = ReviveDormant(threshold=0.9, every_n_steps=3, maturity=2)

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            for layer in rigl.connections.values():
                assert not layer.weight[~layer.mask].any()

    trainer_for([rigl, revive, Look()], tmp_path).fit(Ungated(), data())
    assert sum(revive._revived.values()) > 0


def test_units_behind_closed_gates_are_left_alone(tmp_path: Path) -> None:
    model: Any = Ungated()
    model.body = nn.Sequential(GatedMLP(64, [16], 10, gate={"kind": "static"}))
    gate = model.body[0].hidden[0].gate
    with torch.no_grad():
        gate.logit[:8] = -9.0
    made = model.body[0].hidden[0].linear.weight
    before = made.detach().clone()
    revive = ReviveDormant(threshold=0.0, every_n_steps=2, maturity=1)
    trainer_for([revive], tmp_path).fit(model, data())
    assert torch.equal(made[:8], before[:8])
    assert not torch.equal(made[8:], before[8:])


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("kind", [ReviveDormant, ContinualBackprop])
def test_units_are_revived_in_every_true_precision(
    kind: Any, precision: Any, tmp_path: Path
) -> None:
    model = silent([2, 5, 7])
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.02)
    by_size = {"threshold": 0.0, "every_n_steps": 4}
    options: Any = by_size if kind is ReviveDormant else {"rate": 0.05}
    revive = kind(maturity=2, **options)
    trainer_for([revive], tmp_path, precision=precision).fit(model, data())
    assert (biases(model)[[2, 5, 7]] > -1).all()
    assert model.body[1].weight.isfinite().all()


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("example", [None, [torch.zeros(2, 1, 8, 8)]], ids=["offered", "given"])
def test_examples_are_cast_to_the_precision_of_the_weights(
    example: Any, precision: Any, tmp_path: Path
) -> None:
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [16, 8]}}
    sgd: Any = {"class_path": "SGD", "init_args": {"lr": 0.02}}
    model = GatedClassifier(net, input_shape=[1, 8, 8], num_classes=10, optimizer=sgd)
    revive = ReviveDormant(threshold=0.0, every_n_steps=4, maturity=2, example=example)
    trainer_for([revive], tmp_path, precision=precision).fit(model, data())
    assert set(revive.units) == {"net.hidden.1.linear", "net.output"}
