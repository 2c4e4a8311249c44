import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from dg_lightning.training.step_logging import (
    is_logged_step,
    log_step,
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
            log_step(pl_module, {f"ours/{hook}/{kind}": logged})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if is_logged_step(trainer):
            self._log(pl_module, "start", float(trainer.global_step))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
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
            if ours in seen and interval == 1:
                assert seen[ours] == seen[key]


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
        log_step(pl_module, {"tenth": 0.1})


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
    options: Any = {"max_epochs": 1, "log_every_n_steps": 1}
    trainer_of(tmp_path, callbacks=[LogsTenth()], **options).fit(model)
    assert model.seen == 7
