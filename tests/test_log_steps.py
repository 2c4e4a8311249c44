import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from dg_lightning.log_steps import (
    forget_logged,
    log_figures,
    log_of_step,
    logs_now,
    steps_done,
)


def trainer_of(tmp_path: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        limit_train_batches=7,
        limit_val_batches=1,
        accelerator="cpu",
        logger=CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


class Both(pl.Callback):
    """Logs numbers and tensors in several hooks, by Lightning's way and by ours."""

    def _log(self, pl_module: Any, hook: str, value: float) -> None:
        for kind, logged in (("number", value), ("tensor", torch.tensor(value))):
            pl_module.log(f"theirs/{hook}/{kind}", logged)
            log_of_step(pl_module, f"ours/{hook}/{kind}", logged)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if logs_now(trainer):
            self._log(pl_module, "start", float(trainer.global_step))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step != 5:  # a step that has none
            self._log(pl_module, "backward", 1 / (1 + trainer.global_step))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.current_epoch == 1:  # a key that comes late
            self._log(pl_module, "end", -float(trainer.global_step))


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_value_of_a_step_is_seen_by_everybody_as_if_lightning_had_logged_it(
    interval: int, accumulate: int, tmp_path: Path
) -> None:
    trainer = trainer_of(
        tmp_path,
        max_epochs=3,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=interval,
        callbacks=[Both()],
    )
    trainer.fit(BoringModel())
    rows = list(csv.DictReader((Path(trainer.log_dir or "") / "metrics.csv").open()))
    theirs = [key for key in rows[0] if key.startswith("theirs")]
    assert len(theirs) == 6
    for key in theirs:
        ours = key.replace("theirs", "ours")
        assert [row[ours] for row in rows] == [row[key] for row in rows]
        assert any(row[key] for row in rows)
        for seen in (trainer.callback_metrics, trainer.logged_metrics):
            assert (ours in seen) == (key in seen)
            assert ours not in seen or seen[ours] == seen[key]


class Manual(BoringModel):
    """Steps its optimizer itself, within the reach of a half-precision default type."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.layer(batch).sum())
        optimizer.step()


class LogsTenth(pl.Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        log_of_step(pl_module, "tenth", 0.1)


def test_a_number_is_not_rounded_to_half_precision(tmp_path: Path) -> None:
    options: Any = {"max_epochs": 1, "log_every_n_steps": 1, "precision": "bf16-true"}
    trainer = trainer_of(tmp_path, callbacks=[LogsTenth()], **options)
    trainer.fit(Manual())
    assert trainer.callback_metrics["tenth"] == torch.tensor(0.1)


def test_a_module_with_its_own_way_to_log_is_asked(tmp_path: Path) -> None:
    class Counts(BoringModel):
        seen = 0

        def log(self, name: str, *args: Any, **kwargs: Any) -> None:
            self.seen += name == "tenth"
            super().log(name, *args, **kwargs)

    model = Counts()
    trainer_of(tmp_path, max_epochs=1, callbacks=[LogsTenth()]).fit(model)
    assert model.seen == 7


class Counts(pl.Callback):
    """Compares our count of steps with Lightning's, at every hook of a step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def _compare(self, trainer: Any, pl_module: Any) -> None:
        assert steps_done(trainer, pl_module) == trainer.global_step
        self.seen.append(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._compare(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._compare(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._compare(trainer, pl_module)


@pytest.mark.parametrize("model", [BoringModel, Manual])
def test_steps_are_counted_as_lightning_counts_them(model: Any, tmp_path: Path) -> None:
    parts = 2 if model is BoringModel else 1
    counts = Counts()
    options: Any = {"max_epochs": 2, "accumulate_grad_batches": parts, "callbacks": [counts]}
    trainer_of(tmp_path, **options).fit(model())
    assert max(counts.seen) == {1: 14, 2: 8}[parts]


class LogsFigures(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step in (2, 5):
            log_figures(trainer, {"a": 1 / trainer.global_step, "b": 2.0}, to_loggers=True)


def test_figures_reach_loggers_and_those_who_monitor(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_epochs=1, callbacks=[LogsFigures()])
    trainer.fit(BoringModel())
    rows = list(csv.DictReader((Path(trainer.log_dir or "") / "metrics.csv").open()))
    seen = [(row["step"], float(row["a"]), float(row["b"])) for row in rows if row.get("a")]
    assert seen == [("1", 0.5, 2.0), ("4", pytest.approx(0.2), 2.0)]
    assert trainer.callback_metrics["a"] == torch.tensor(0.2)
    without = pl.Trainer(
        max_steps=2,
        logger=False,
        callbacks=[LogsFigures()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    without.fit(BoringModel())
    assert without.callback_metrics["b"] == 2


class LogsAndForgets(pl.Callback):
    """Counts the keys that Lightning goes over when a batch ends."""

    def __init__(self, forgets: bool) -> None:
        self.forgets = forgets
        self.kept: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.forgets:
            forget_logged(trainer)
        if logs_now(trainer):
            log_of_step(pl_module, "gates/ours", 1.0)
            pl_module.log("theirs", 1.0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.kept.append(len(trainer._results.metrics(on_step=True)["log"]))


def test_what_loggers_have_seen_of_ours_is_not_gone_over_again(tmp_path: Path) -> None:
    rows = []
    for forgets in (True, False):
        callback = LogsAndForgets(forgets)
        options: Any = {"max_epochs": 1, "log_every_n_steps": 3, "callbacks": [callback]}
        trainer = trainer_of(tmp_path / str(forgets), **options)
        trainer.fit(BoringModel())
        assert callback.kept == ([2, 2, 2, 1, 1, 2, 1] if forgets else [2] * 7)
        rows.append((Path(trainer.log_dir or "") / "metrics.csv").read_text())
    assert rows[0] == rows[1]
