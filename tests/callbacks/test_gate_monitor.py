"""GateMonitor on a tiny Trainer, against the net asked directly."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from dg_lightning import GatedClassifier, GatedLinear, gate_layers
from dg_lightning.callbacks import CollapseDetector, GateMonitor, GatePenalty
from dg_lightning.datamodules import DigitsDataModule

INPUT, FIRST = "net.input_gate", "net.hidden.0.gate"


def classifier() -> GatedClassifier:
    torch.manual_seed(0)
    gate = {"kind": "dynamic", "network": "linear", "initial_open_rate": 0.55}
    net: Any = {
        "class_path": "GatedMLP",
        "init_args": {"hidden": [32], "gate": gate, "input_gate": {"kind": "static"}},
    }
    model = GatedClassifier(net, input_shape=[1, 8, 8], num_classes=10, gate_lr_factor=10.0)
    torch.nn.init.normal_(model.net.hidden[0].gate.network[-1].weight, std=0.3)  # type: ignore[index, union-attr]
    return model


def trainer_for(root: Path, *callbacks: Any, **arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
        "log_every_n_steps": 5,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **arguments})


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def validation() -> tuple[Tensor, Tensor]:
    data = DigitsDataModule(batch_size=500)
    data.prepare_data()
    data.setup("fit")
    x, y = next(iter(data.val_dataloader()))
    return x, y


def test_logs_and_writes_what_the_gates_do_in_the_last_validation(tmp_path: Path) -> None:
    model = classifier()
    trainer = trainer_for(tmp_path, GateMonitor(), GatePenalty(0.5))
    trainer.fit(model, DigitsDataModule(batch_size=64))
    x, y = validation()
    logits = model.eval()(x)
    gates = gate_layers(model)
    g = {name: (gate.gate != 0).float().detach() for name, gate in gates.items()}  # type: ignore[union-attr]
    p = {name: gate.probability.detach() for name, gate in gates.items()}  # type: ignore[union-attr]
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    for name in (INPUT, FIRST):
        assert logged[f"gates/open_rate/{name}"] == pytest.approx(g[name].mean().item())
        assert logged[f"gates/mean_probability/{name}"] == pytest.approx(
            p[name].mean().item(), rel=1e-5
        )
    both = (64 * g[INPUT].mean() + 32 * g[FIRST].mean()) / 96
    assert logged["gates/open_rate"] == pytest.approx(both.item())
    hardness = (1 - logits.softmax(-1).amax(-1)).detach().numpy()
    expected = np.corrcoef(hardness, g[FIRST].mean(-1).numpy())[0, 1]
    assert logged["gates/hardness_correlation"] == pytest.approx(expected, abs=1e-4)
    assert logged["gates/active_ratio"] == pytest.approx(g[FIRST].mean().item())

    units = [row for row in rows(tmp_path / "gates" / "units.csv") if row["epoch"] == "1"]
    own = [float(row["g"]) for row in units if row["layer"] == FIRST]
    np.testing.assert_allclose(own, g[FIRST].mean(0), atol=1e-5)
    own = [float(row["p"]) for row in units if row["layer"] == INPUT]
    np.testing.assert_allclose(own, p[INPUT], atol=1e-4)
    classes = rows(tmp_path / "gates" / "classes.csv")
    assert {row["layer"] for row in classes} == {FIRST}  # a static gate has no classes
    np.testing.assert_allclose(
        [float(row["3"]) for row in classes], g[FIRST][y == 3].mean(0), atol=1e-5
    )
    layers = rows(tmp_path / "gates" / "layers.csv")
    assert [(row["epoch"], row["layer"]) for row in layers] == [
        ("0", INPUT), ("0", FIRST), ("1", INPUT), ("1", FIRST)
    ]  # fmt: skip
    assert float(layers[3]["open_rate_g"]) == pytest.approx(g[FIRST].mean().item())
    assert layers[0]["churn"] == ""
    before = [r for r in rows(tmp_path / "gates" / "units.csv") if r["epoch"] == "0"]
    previous = torch.tensor([float(row["g"]) for row in before if row["layer"] == FIRST])
    churn = (g[FIRST].mean(0) - previous).abs().mean().item()
    assert logged[f"gates/churn/{FIRST}"] == pytest.approx(churn, abs=1e-5)
    shares = [float(value) for key, value in rows(tmp_path / "gates" / "histogram.csv")[-1].items()
              if key.startswith("p_")]  # fmt: skip
    counts, _ = np.histogram(p[FIRST].numpy(), 20, (0, 1))
    np.testing.assert_allclose(shares, counts / counts.sum(), atol=2 / counts.sum())


class Foreign(pl.LightningModule):
    """Somebody's module, which knows nothing of us but a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Flatten(), GatedLinear(64, 16, gate={"kind": "static"}), nn.Linear(16, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.body(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_foreign_module_gets_the_ledger_too(tmp_path: Path) -> None:
    model = Foreign()
    with torch.no_grad():
        gate_layers(model)["body.1.gate"].logit[:4] = -9.0  # type: ignore[attr-defined]
    trainer = trainer_for(tmp_path, GateMonitor(), max_epochs=1)
    trainer.fit(model, DigitsDataModule(batch_size=64))
    assert trainer.callback_metrics["compute/macs_dense"] == 64 * 16 + 16 * 10
    # Nobody has said what reads the closed units, so only their own rows are saved for certain.
    assert trainer.callback_metrics["compute/macs"] == 64 * 12 + 16 * 10
    assert trainer.callback_metrics["gates/open_rate"] == pytest.approx(12 / 16)


def test_without_a_validation_it_looks_at_logged_steps_of_training(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    model = Foreign()
    trainer = trainer_for(tmp_path, GateMonitor(), max_epochs=2, logger=logger, limit_val_batches=0)
    trainer.fit(model, DigitsDataModule(batch_size=64))
    logged = rows(Path(logger.log_dir) / "metrics.csv")
    steps = [int(row["step"]) for row in logged if row["gates/open_rate/body.1.gate"]]
    assert steps[:4] == [4, 9, 14, 19]
    layers = rows(Path(logger.log_dir) / "gates" / "layers.csv")
    assert [row["epoch"] for row in layers] == ["0", "1"]
    assert layers[0]["open_rate_g"] == "1.0"


def test_a_resumed_run_has_all_looks_in_its_files(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
    trainer_for(tmp_path / "a", GateMonitor(), saving, max_epochs=2).fit(
        classifier(), DigitsDataModule(batch_size=64)
    )
    trainer_for(tmp_path / "b", GateMonitor(), max_epochs=4).fit(
        classifier(), DigitsDataModule(batch_size=64), ckpt_path=tmp_path / "last.ckpt"
    )
    trainer_for(tmp_path / "whole", GateMonitor(), max_epochs=4).fit(
        classifier(), DigitsDataModule(batch_size=64)
    )
    for name in ("layers.csv", "units.csv", "classes.csv", "histogram.csv"):
        resumed = (tmp_path / "b" / "gates" / name).read_text()
        assert resumed == (tmp_path / "whole" / "gates" / name).read_text(), name


def test_a_test_has_files_of_its_own_and_leaves_the_history_alone(tmp_path: Path) -> None:
    monitor = GateMonitor()
    trainer = trainer_for(tmp_path, monitor, max_epochs=1)
    model = classifier()
    trainer.fit(model, DigitsDataModule(batch_size=64))
    trainer.test(model, DigitsDataModule(batch_size=64), verbose=False)
    assert len(monitor.history.entries) == 1
    assert len(rows(tmp_path / "gates" / "layers.csv")) == 2
    assert len(rows(tmp_path / "gates_test" / "layers.csv")) == 2
    assert f"gates/open_rate/{FIRST}" in trainer.callback_metrics
    # What has changed since a validation is no figure of a test.
    assert not [key for key in trainer.callback_metrics if key.startswith("gates/churn")]


def test_verdicts_on_gates_are_written(tmp_path: Path) -> None:
    detector = CollapseDetector()
    with pytest.warns(UserWarning, match="Gate collapse"):
        trainer_for(tmp_path, GateMonitor(), GatePenalty(50.0), detector, max_epochs=3).fit(
            classifier(), DigitsDataModule(batch_size=64)
        )
    written = rows(tmp_path / "gates" / "collapse.csv")
    assert [(int(r["step"]), r["layer"], r["mode"]) for r in written] == [
        (v["step"], v["layer"], v["mode"]) for v in detector.verdicts
    ]
    assert written


def test_files_can_be_left_out_and_a_sanity_check_is_no_look(tmp_path: Path) -> None:
    monitor = GateMonitor(files=False)
    trainer_for(tmp_path, monitor, max_epochs=1, num_sanity_val_steps=2).fit(
        classifier(), DigitsDataModule(batch_size=64)
    )
    assert not (tmp_path / "gates").exists()
    assert len(monitor.history.entries) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_epochs": -1}, "`every_n_epochs` must be at least 0, got -1"),
        ({"stage": "test"}, "`stage` must be validation, train or None, got 'test'"),
    ],
)
def test_refuses_what_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GateMonitor(**arguments)


def test_says_that_there_is_no_validation_to_look_at(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, GateMonitor(stage="validation"), limit_val_batches=0)
    with pytest.raises(ValueError, match="`stage"):
        trainer.fit(classifier(), DigitsDataModule(batch_size=64))


class Labelled(Foreign):
    """Returns logits of a chosen width, and has labels that are none."""

    def __init__(self, outputs: int, labels: Tensor) -> None:
        super().__init__()
        gate: Any = {"kind": "dynamic", "network": "linear"}
        self.body = nn.Sequential(GatedLinear(8, 16, gate=gate), nn.Linear(16, outputs))
        self.labels = labels

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.body(batch[0])  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        data = torch.utils.data.TensorDataset(torch.randn(len(self.labels), 8), self.labels)
        return torch.utils.data.DataLoader(data, batch_size=4)

    val_dataloader = train_dataloader


def test_one_logit_is_no_class_and_a_label_may_stand_for_none(tmp_path: Path) -> None:
    binary = Labelled(1, torch.tensor([0, 1, 1, 0]))
    trainer_for(tmp_path / "binary", GateMonitor(), max_epochs=1).fit(binary)
    assert not (tmp_path / "binary" / "gates" / "classes.csv").exists()
    ignored = Labelled(3, torch.tensor([0, -100, 2, 2, 255, 0]))
    trainer_for(tmp_path / "ignored", GateMonitor(), max_epochs=1).fit(ignored)
    classes = rows(tmp_path / "ignored" / "gates" / "classes.csv")
    assert classes[0]["1"] == "nan"  # no sample of class 1
    assert 0 <= float(classes[0]["2"]) <= 1


class Bare(pl.loggers.Logger):
    """A logger that can do nothing but take scalars."""

    name, version = "bare", 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.seen |= set(metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Take nothing."""


def test_a_logger_that_takes_scalars_alone_gets_them(tmp_path: Path) -> None:
    logger = Bare()
    trainer_for(tmp_path, GateMonitor(every_n_epochs=1), logger=logger, max_epochs=1).fit(
        classifier(), DigitsDataModule(batch_size=64)
    )
    assert f"gates/open_rate/{FIRST}" in logger.seen


def test_a_gate_that_takes_no_part_can_be_left_out(tmp_path: Path) -> None:
    model = Foreign()
    model.idle = GatedLinear(4, 4, gate={"kind": "static"})
    trainer = trainer_for(tmp_path, GateMonitor(layers=["body*"]), max_epochs=1)
    trainer.fit(model, DigitsDataModule(batch_size=64))
    assert "gates/open_rate/body.1.gate" in trainer.callback_metrics
    assert "compute/macs" not in trainer.callback_metrics  # not known for all of the module


def test_looks_between_two_optimizer_steps_are_looks_of_their_own(tmp_path: Path) -> None:
    from dg_lightning.monitoring.report.page import read_run

    trainer_for(
        tmp_path, GateMonitor(), max_epochs=1, accumulate_grad_batches=6, val_check_interval=2
    ).fit(classifier(), DigitsDataModule(batch_size=64))
    units = read_run(tmp_path).units
    assert units[FIRST].g.shape == (32, 10)
    assert units[INPUT].g.shape == (64, 10)


def test_two_monitors_are_refused(tmp_path: Path) -> None:
    trainer = trainer_for(
        tmp_path, GateMonitor(layers=["net.input*"]), GateMonitor(layers=["net.h*"])
    )
    with pytest.raises(ValueError, match="Two GateMonitors"):
        trainer.fit(classifier(), DigitsDataModule(batch_size=64))


def test_the_files_of_a_long_training_are_thinned_and_end_with_the_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dg_lightning.monitoring.report.page import read_run

    monitor = GateMonitor()
    monitor.history.max_entries = 4
    monkeypatch.setattr(GateMonitor, "_reset", lambda self: None)
    trainer_for(tmp_path, monitor, max_epochs=8, limit_train_batches=2).fit(
        classifier(), DigitsDataModule(batch_size=64)
    )
    assert read_run(tmp_path).units[FIRST].epochs == [0, 2, 4, 6, 7]
    assert len(rows(tmp_path / "gates" / "layers.csv")) == 16  # of layers all


def test_pictures_come_in_intervals_whenever_validations_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def send(self: Any, trainer: Any) -> None:
        sent.append(trainer.current_epoch)

    monkeypatch.setattr(GateMonitor, "_send_media", send)
    data = DigitsDataModule(batch_size=64)
    trainer_for(
        tmp_path, GateMonitor(every_n_epochs=3), max_epochs=12, check_val_every_n_epoch=2,
        limit_train_batches=2,
    ).fit(classifier(), data)  # fmt: skip
    assert sent == [3, 7, 11]
    sent.clear()
    trainer_for(
        tmp_path, GateMonitor(every_n_epochs=1), max_epochs=2, val_check_interval=3
    ).fit(classifier(), data)  # fmt: skip
    assert sent == [0, 1]


def test_a_router_in_training_counts_what_it_would_choose() -> None:
    from dg_lightning.layers.feed_forward import SwitchMoE
    from dg_lightning.monitoring.activity import GateActivity

    torch.manual_seed(0)
    moe = SwitchMoE(8, 2, width=4, experts=4, expert_width=4, capacity_factor=0.3)
    moe(torch.randn(64, 8))
    activity = GateActivity(gate_layers(moe))
    activity.update(64, training=True)
    assert activity.snapshots()[0].g.sum().item() == pytest.approx(1.0)  # one expert a sample


@pytest.mark.filterwarnings("ignore:.*jit.script")
def test_a_count_that_fails_does_not_fail_the_test(tmp_path: Path) -> None:
    class Scripted(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = GatedLinear(64, 8, gate={"kind": "static"})
            self.scripted = torch.jit.script(nn.Linear(8, 10))

        def test_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits: Tensor = self.scripted(self.hidden(batch[0].flatten(1)))
            return logits

    trainer = trainer_for(tmp_path, GateMonitor())
    with pytest.warns(UserWarning, match="cannot be counted"):
        (logged,) = trainer.test(Scripted(), DigitsDataModule(batch_size=64), verbose=False)
    assert "gates/open_rate/hidden.gate" in logged
