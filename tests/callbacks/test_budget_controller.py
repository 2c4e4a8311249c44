from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from foreign_nets import Foreign, data, trainer_for
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from dg_lightning import GatedClassifier, gate_layers
from dg_lightning.callbacks import (
    BudgetController,
    ExactResume,
    GatePenalty,
    RigL,
    ThresholdPhases,
)
from dg_lightning.datamodules import DigitsDataModule

STATIC: Any = {"kind": "static"}
DYNAMIC: Any = {"kind": "dynamic", "network": "low_rank", "rank": 8}


def fitted(
    callbacks: list[Any],
    root: Path,
    gate: Any = STATIC,
    epochs: int = 8,
    of_trainer: Any = None,
    **net: Any,
) -> tuple[GatedClassifier, pl.Trainer]:
    pl.seed_everything(0, verbose=False)
    arguments = {"hidden": [64, 32], "gate": gate, **net}
    spec: Any = {"class_path": "GatedMLP", "init_args": arguments}
    model = GatedClassifier(spec, input_shape=[1, 8, 8], num_classes=10, gate_lr_factor=30.0)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=root,
        **{"enable_checkpointing": False, **(of_trainer or {})},
    )
    trainer.fit(model, DigitsDataModule(batch_size=64))
    return model, trainer


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pi", "dual"])
@pytest.mark.parametrize("budget", [0.5, 0.15])
def test_static_gates_use_the_budget_and_not_more(
    budget: float, method: Any, tmp_path: Path
) -> None:
    """Measured by the ledger of the validation, not by the controller."""
    controller = BudgetController(budget, method=method)
    model, trainer = fitted([controller], tmp_path, input_gate=STATIC)
    assert model.compute_report is not None
    share = model.compute_report.macs / model.compute_report.macs_dense
    one_unit = (64 + 32) / model.compute_report.macs_dense
    assert budget - one_unit <= share <= budget
    assert controller.reached == pytest.approx(share, abs=1e-6)
    assert trainer.callback_metrics["val/accuracy"] > 0.5  # 8 epochs


def test_gate_nets_pay_for_their_decisions(tmp_path: Path) -> None:
    controller = BudgetController(0.6)
    model, _ = fitted([controller], tmp_path, DYNAMIC, epochs=12)
    report = model.compute_report
    assert report is not None
    assert report.gate_macs > 0.1 * report.macs_dense
    assert report.macs / report.macs_dense == pytest.approx(0.6, rel=0.02)


def test_what_is_used_is_monitored_as_it_was_last_measured(tmp_path: Path) -> None:
    controller = BudgetController(0.5, every_n_steps=7)  # steps that are not logged
    _, trainer = fitted([controller], tmp_path, epochs=2)
    assert trainer.callback_metrics["gates/budget_used"].item() == pytest.approx(
        controller.reached, rel=1e-6
    )


def test_open_rates_per_group_of_gates(tmp_path: Path) -> None:
    controller = BudgetController({"*hidden.0*": 0.5, "*hidden.1*": 0.25}, "open_rate")
    model, trainer = fitted([controller], tmp_path)
    rates = [gate.gate.mean().item() for gate in gate_layers(model).values()]  # type: ignore[union-attr]
    assert rates == [0.5, 0.25]
    assert "gates/penalty_weight/*hidden.1*" in trainer.callback_metrics
    assert controller.reached == {"*hidden.0*": 0.5, "*hidden.1*": 0.25}


def test_macs_per_group_are_those_of_the_maps_behind_their_gates(tmp_path: Path) -> None:
    controller = BudgetController({"*hidden.0*": 0.5}, "macs")
    model, _ = fitted([controller], tmp_path)
    first = gate_layers(model)["net.hidden.0.gate"].gate
    assert first is not None
    assert first.sum().item() == 32


def test_frozen_gates_stand_still_while_the_net_learns(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if controller.landed:
                seen.append([p.detach().clone() for p in pl_module.parameters()])

    controller = BudgetController(0.3)
    # The watch comes last: a callback sees what the ones before it have done.
    model, _ = fitted([controller, Watch()], tmp_path)
    names = [name for name, _ in model.named_parameters()]
    for name, first, last in zip(names, seen[1], seen[-1], strict=True):
        assert torch.equal(first, last) == ("gate" in name), name


def test_a_budget_that_cannot_be_met_is_refused_with_the_figure(tmp_path: Path) -> None:
    # GateNets: 64 * 8 + 8 * 64 for the first; 8 * 32 for the second, none of whose inputs is open.
    dense = 64 * 64 + 64 * 32 + 32 * 10
    least = (64 * 8 + 8 * 64 + 8 * 32) / dense
    with pytest.raises(ValueError, match=f"0.1 cannot be met: .* {least:.4g}, .* {least:.4g}"):
        fitted([BudgetController(0.1)], tmp_path, DYNAMIC)
    floors = {"kind": "static", "min_open": "50%"}
    with pytest.raises(ValueError, match=r"0.2 cannot be met: .*`min_open`"):
        fitted([BudgetController(0.2)], tmp_path, floors)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="GatePenalty and BudgetController both penalise"):
        fitted([GatePenalty(1.0), BudgetController(0.5)], tmp_path)
    with pytest.raises(ValueError, match=r"`budget` .* net.hidden.0"):
        fitted([BudgetController({"*0*": 0.5, "*": 0.5})], tmp_path)
    with pytest.raises(ValueError, match=r"`policy: top_k`.* `k`"):
        fitted([BudgetController(0.5)], tmp_path, {"kind": "static", "policy": "top_k", "k": 9})
    for arguments, message in [
        ({"budget": 0.0}, r"`budget` must be in \(0, 1\], got 0.0"),
        ({"budget": 0.5, "measure": "flops"}, "`measure` must be macs or open_rate, got 'flops'"),
        ({"budget": 0.5, "initial_weight": 0.0}, "`initial_weight` must be above 0 and at most"),
        ({"budget": {"a": 0.5}, "layers": ["b"]}, "`layers` .* `budget`"),
        ({"budget": 0.5, "freeze_at": "late"}, "`freeze_at` must be a number of steps"),
    ]:
        with pytest.raises(ValueError, match=message):
            BudgetController(**arguments)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("epochs", [5, 10])
@pytest.mark.filterwarnings("ignore:.*Swapping scheduler")
def test_the_average_of_swa_uses_what_was_reached(epochs: int, first: bool, tmp_path: Path) -> None:
    """It averages from before the landing on, when all gates were open."""
    controller = BudgetController(0.4)
    swa = StochasticWeightAveraging(swa_lrs=0.02)
    both: list[Any] = [swa, controller] if first else [controller, swa]
    model, trainer = fitted(both, tmp_path, epochs=epochs)
    trainer.validate(model, DigitsDataModule(batch_size=64), verbose=False)
    assert model.compute_report is not None
    share = model.compute_report.macs / model.compute_report.macs_dense
    assert controller.landed
    assert share == pytest.approx(controller.reached, abs=1e-6)
    assert share <= 0.4


class ClosesAll(pl.Callback):
    """Closes all gates in the beginning, as a penalty that is too strong does, and looks later."""

    def __init__(self) -> None:
        self.opened: list[float] = []  # after each epoch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, idx: int) -> None:
        if trainer.global_step == 1:
            for gate in gate_layers(pl_module).values():
                gate.shift_bias(-4.0)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        gates: Any = gate_layers(pl_module).values()
        rates = [float(gate.gate.detach().mean()) * gate.units for gate in gates]
        self.opened.append(sum(rates) / sum(gate.units for gate in gates))


@pytest.mark.parametrize("method", ["pi", "shift"])
def test_a_shift_opens_gates_that_use_too_little(method: Any, tmp_path: Path) -> None:
    """The loss does not reach gates that scale where they are closed, and a penalty only closes."""
    gate = {"kind": "dynamic", "scale": "probability", "initial_spread": 1.0, "temperature": 0.5}
    times: Any = {"begin": "0%", "until": "20%", "freeze_at": "90%"}
    controller = BudgetController(0.4, "open_rate", method, **times)
    closing = ClosesAll()
    fitted([closing, controller], tmp_path, gate, epochs=5)
    if method == "pi":
        assert max(closing.opened[1:4]) < 0.1
    else:
        assert closing.opened[1:4] == pytest.approx([0.4] * 3, abs=0.1)
        assert controller._regulators[""].multiplier.value == pytest.approx(0.1)  # not moved
    assert controller.reached == pytest.approx(0.4, abs=0.02)  # by the landing


@pytest.mark.slow
def test_all_ranks_reach_and_save_the_same(
    in_two_processes: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    """GateNets use another share of the samples of each rank."""
    ranks = in_two_processes(f"""
sys.path.insert(0, sys.path[0] + "/callbacks")
from test_budget_controller import *
class Steps(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        reached.append(controller.reached)
result = []
times = {{"begin": "0%", "until": "20%", "freeze_at": "40%"}}
two = {{"strategy": "ddp", "devices": 2}}
for method, measure in (("pi", "macs"), ("shift", "open_rate"), ("balance", "open_rate")):
    scale = None if method == "pi" else "probability"
    gate = {{**DYNAMIC, "initial_spread": 1.0, "scale": scale}}
    reached = []
    controller = BudgetController(0.6, measure, method, **times)
    model, trainer = fitted([controller, Steps()], {str(tmp_path)!r}, gate, 2, two)
    state = controller.state_dict()
    logged = {{k: float(v) for k, v in trainer.callback_metrics.items() if "gates/" in k}}
    result.append([reached, state, logged, controller.landed])
""")
    for own, other in zip(*ranks, strict=True):
        assert own[3]
        assert own == other


def test_a_budget_above_what_sparse_connections_use_names_that_cause(tmp_path: Path) -> None:
    callbacks = [RigL(0.9, every_n_steps=5), BudgetController(0.5)]
    with pytest.warns(UserWarning, match="BudgetController") as caught:
        fitted(callbacks, tmp_path, epochs=2)
    messages = {str(w.message) for w in caught if "BudgetController" in str(w.message)}
    assert all("With every gate open, the connections use only 9.9" in text for text in messages)
    assert any("for a budget of 50.00%" in text for text in messages)  # at the end of the run


def test_a_checkpoint_from_before_the_landing_is_warned_of(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, monitor="val/loss")
    with pytest.warns(UserWarning, match=r"monitor='val/loss'.* before step 27, when the gates"):
        fitted(
            [saving, BudgetController(0.5)],
            tmp_path,
            epochs=2,
            of_trainer={"enable_checkpointing": True},
        )


def test_a_keep_target_that_no_penalty_follows_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="The keep target of ThresholdPhases has no effect"):
        fitted([ThresholdPhases(), BudgetController(0.5)], tmp_path, epochs=1)


class GatesLater(BaseFinetuning):
    """Trains gates from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        gates: Any = list(gate_layers(pl_module).values())
        self.freeze(gates)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            gates: Any = list(gate_layers(pl_module).values())
            self.make_trainable(gates)


def test_gates_that_are_trained_later_are_budgeted(tmp_path: Path) -> None:
    controller = BudgetController(0.5, begin="30%")
    model, _ = fitted([GatesLater(), controller], tmp_path, epochs=6)
    assert model.compute_report is not None
    share = model.compute_report.macs / model.compute_report.macs_dense
    assert share == pytest.approx(0.5, abs=0.02)


class Stops(pl.Callback):
    """Ends training early, as `EarlyStopping` does."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True


def test_a_run_that_ends_before_its_landing_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="fewer steps than were planned"):
        fitted([BudgetController(0.25), Stops()], tmp_path, epochs=8)


def apart(rate: float = 0.25) -> Any:
    """Settings of gates that scale, start at a rate, and differ."""
    start = {"initial_open_rate": rate, "initial_spread": 1.0}
    return {**DYNAMIC, "block_size": 4, "scale": "probability", **start}


@pytest.mark.filterwarnings("ignore:BudgetController")
def test_a_bias_moves_by_the_missing_load(tmp_path: Path) -> None:
    """A single step with a learning rate of 0, against the formula."""
    controller = BudgetController(0.3, "open_rate", "balance", begin="0%", until="0%")
    before: dict[str, torch.Tensor] = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 0.0

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            for name, gate in gate_layers(pl_module).items():
                before[name] = gate.network[-1].bias.detach().clone()  # type: ignore[attr-defined]

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            for name, gate in gate_layers(pl_module).items():
                assert gate.gate is not None
                load = (gate.gate != 0).double().mean(0)
                moved = gate.network[-1].bias - before[name]  # type: ignore[attr-defined]
                assert load.std() > 0
                torch.testing.assert_close(moved.double(), 0.2 * (0.3 - load), atol=1e-6, rtol=1e-4)

    options = {"max_steps": 1, "limit_val_batches": 0}
    fitted([controller, Look()], tmp_path, apart(0.5), 1, options)
    assert before


def test_a_share_of_blocks_need_not_be_written_to_the_last_digit(tmp_path: Path) -> None:
    gate = {**apart(), "block_size": 1, "policy": "top_k", "k": "15%", "min_open": 0}
    controller = BudgetController(0.1563, "open_rate", "balance", begin="0%", freeze_at="100%")
    fitted([controller], tmp_path, gate, 2)  # 5 of 32, and 10 of 64
    assert controller.reached == pytest.approx(5 / 32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:BudgetController")
def test_a_balanced_run_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    def run(stop: int, **options: Any) -> tuple[Any, Any]:
        times = {"begin": "0%", "until": "30%", "freeze_at": "80%"}
        controller = BudgetController(0.25, "open_rate", "balance", **times)  # type: ignore[arg-type]
        pl.seed_everything(0, verbose=False)
        spec: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [64, 32], "gate": apart()}}
        model = GatedClassifier(spec, input_shape=[1, 8, 8], num_classes=10)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=6,
            callbacks=[controller, ExactResume(), StopAt(stop)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
        )
        trainer.fit(model, DigitsDataModule(batch_size=64), **options)
        return model, trainer

    whole, _ = run(6)
    _, trainer = run(2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _ = run(6, ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


class StopAt(pl.Callback):
    """Ends training after some epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


@pytest.mark.parametrize(
    ("gate", "measure", "message"),
    [
        (DYNAMIC, "macs", "needs `measure='open_rate'`"),
        (STATIC, "open_rate", "needs gates that depend on the input"),
        ({**DYNAMIC, "policy": "top_k", "k": "25%"}, "open_rate", "must be 0.25.* got 0.5"),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    gate: Any, measure: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        fitted([BudgetController(0.5, measure, "balance")], tmp_path, gate)


def test_a_checkpoint_of_an_epochs_last_batch_is_warned_of(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=21, save_top_k=-1)
    whole: Any = {"enable_checkpointing": True, "max_epochs": 1, "max_steps": -1}

    def controller() -> BudgetController:
        return BudgetController(0.6, measure="open_rate")

    trainer_for([controller(), saving], tmp_path, **whole).fit(Foreign(), data())
    (path,) = tmp_path.glob("*.ckpt")
    again = trainer_for([controller()], tmp_path, max_epochs=2, max_steps=-1)
    with pytest.warns(UserWarning, match="ExactResume"):
        again.fit(Foreign(), data(), ckpt_path=str(path), weights_only=True)
