"""Adaptation to drift with a part of the weights."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from task_runs import classifier, tasks, trainer_for
from torch import Tensor

from dg_lightning.callbacks import Adapt, ExactResume, TaskMonitor

GATE = {"kind": "dynamic", "initial_open_rate": 0.6, "initial_spread": 1.0}
CLEAN = 2  # epochs


class BeforeDrift(pl.Callback):
    """Keeps the weights with which the adaptation begins."""

    weights: dict[str, Tensor]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == CLEAN:
            self.weights = copy.deepcopy(pl_module.state_dict())


def run(
    adapt: Adapt, root: Path, *others: Any, net: Any = None, ckpt_path: Any = None
) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    pl.seed_everything(0, verbose=False)
    model = classifier(gate=GATE) if net is None else net
    before = BeforeDrift()
    trainer = trainer_for([before, adapt, TaskMonitor(), *others], root, max_epochs=2 * CLEAN)
    data = tasks(kind="drift", tasks=2, drift="blur")
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    changed = {}
    if ckpt_path is None:
        changed = {
            name: after != before.weights[name] for name, after in model.state_dict().items()
        }
    return trainer, changed, model.state_dict()


def parameters(changed: dict[str, Tensor], gates: bool) -> dict[str, Tensor]:
    return {n: c for n, c in changed.items() if n.startswith("net") and ("gate." in n) == gates}


def test_each_choice_changes_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    for what in ("nothing", "gates", "inactive", "both", "all"):
        adapt = Adapt(what, batches=20, inactive=0.5)
        trainer, changed, _ = run(adapt, tmp_path)
        assert adapt.done == 20
        assert trainer.current_epoch == CLEAN + 1
        weights, gates = parameters(changed, False), parameters(changed, True)
        assert any(c.any() for c in gates.values()) == (what in ("gates", "both", "all"))
        if what in ("nothing", "gates"):
            assert not any(c.any() for c in weights.values())
        elif what == "all":
            assert all(c.any() for c in weights.values())
        else:
            # Between units that are often open, nothing moves; to and from the others, it does.
            often = [rates >= 0.5 for rates in adapt.rates.split([32, 24])]
            assert all(0 < int(mask.sum()) < len(mask) for mask in often)
            second = weights["net.hidden.1.linear.weight"]
            assert not second[often[1]][:, often[0]].any()
            assert second[~often[1]].any()
            assert second[:, ~often[0]].any()
            assert not weights["net.output.bias"].any()


def test_it_says_what_was_won_and_lost(tmp_path: Path) -> None:
    figures = {}
    for what in ("nothing", "all"):
        trainer, _, _ = run(Adapt(what, batches=40), tmp_path)
        logged = {k: float(v) for k, v in trainer.callback_metrics.items()}
        monitor = next(c for c in trainer.callbacks if isinstance(c, TaskMonitor))
        (clean, drifted), (clean_now, now) = monitor.matrix.tolist()
        assert logged["adapt/recovery"] == pytest.approx((now - drifted) / (clean - drifted))
        assert logged["adapt/clean_loss"] == pytest.approx(clean - clean_now)
        figures[what] = logged
    nothing, everything = figures["nothing"], figures["all"]
    assert nothing["adapt/recovery"] == nothing["adapt/clean_loss"] == 0
    assert nothing["adapt/drift_cost"] == everything["adapt/drift_cost"] > 0
    assert nothing["adapt/gate_flips"] == nothing["adapt/weights_free"] == 0
    assert everything["adapt/recovery"] > 0
    assert 0 < everything["adapt/gate_flips"] < 0.5
    assert everything["adapt/weights_free"] == 1


def test_a_resumed_adaptation_is_the_uninterrupted_one(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if adapt.done == 7:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

    adapt = Adapt("both", batches=20)
    trainer, _, whole = run(adapt, tmp_path, ExactResume(), Save())
    again, _, rest = run(
        Adapt("both", batches=20), tmp_path, ExactResume(), ckpt_path=tmp_path / "some.ckpt"
    )
    for name, value in whole.items():
        assert torch.equal(rest[name], value), name
    for key in ("adapt/recovery", "adapt/clean_loss", "adapt/weights_free"):
        assert again.callback_metrics[key] == trainer.callback_metrics[key]


def test_what_moves_all_the_same_is_told_of(tmp_path: Path) -> None:
    class Moves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.current_epoch == CLEAN:
                pl_module.net.hidden[0].gate.temperature *= 0.9

    with pytest.warns(UserWarning, match="gate.temperature changed although Adapt"):
        run(Adapt("nothing", batches=5), tmp_path, Moves())
    with pytest.warns(UserWarning, match="82 batches instead of 200"):
        run(Adapt("gates"), tmp_path)


def test_it_must_have_seen_the_net_before_the_drift(tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == CLEAN - 1:
                trainer.save_checkpoint(path)

    data = tasks(kind="drift", tasks=2)
    trainer_for([Save()], tmp_path, max_epochs=2 * CLEAN).fit(
        classifier(gate=GATE), datamodule=data
    )
    with pytest.raises(ValueError, match="validation on both tasks before the drift"):
        run(Adapt(), tmp_path, ckpt_path=path)
    trainer = trainer_for([Adapt()], tmp_path, check_val_every_n_epoch=2)
    with pytest.raises(ValueError, match="leave `check_val_every_n_epoch`"):
        trainer.fit(classifier(gate=GATE), datamodule=data)


def test_bad_input_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`batches` must be at least 1, got 0"):
        Adapt(batches=0)
    with pytest.raises(ValueError, match="`inactive` must be above 0"):
        Adapt(inactive=0.0)
    with pytest.raises(ValueError, match="got 3: use `tasks: 2`"):
        trainer_for([Adapt()], tmp_path).fit(classifier(), datamodule=tasks(kind="drift"))
    with pytest.raises(ValueError, match="Adapt cannot protect the running statistics"):
        run(Adapt(), tmp_path, net=classifier(gate=GATE, norm="batch"))
    with pytest.raises(ValueError, match="averaged weights"):
        run(Adapt(), tmp_path, EMAWeightAveraging())
    with pytest.warns(UserWarning, match="No unit is open for less than 1%"):
        run(Adapt("inactive", inactive=0.01), tmp_path, net=classifier(gate={"kind": "static"}))
