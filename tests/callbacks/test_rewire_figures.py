"""The figures of connections: when they are logged, and that they are right."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sparse_nets import Plain, fit
from torch import Tensor
from typing_extensions import override

from dg_lightning.callbacks import RigL
from dg_lightning.rewiring import SparseLayer

KEY = "rewiring/density/net.0"


def logged_steps(logger: Any) -> list[int]:
    logger.save()
    lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    return [int(row["step"]) for row in csv.DictReader(lines) if row.get(KEY)]


def test_they_are_logged_in_every_logged_step(tmp_path: Path) -> None:
    rigl = RigL(0.7, every_n_steps=4, until="75%")
    logger = CSVLogger(tmp_path)
    fit(Plain(), [rigl], tmp_path, logger=logger)  # two epochs of 12 steps
    assert logged_steps(logger) == [2, 5, 8, 11, 14, 17, 20, 23]


def test_who_logs_no_steps_can_still_monitor_them(tmp_path: Path) -> None:
    logger, rigl = CSVLogger(tmp_path), RigL(0.7, every_n_steps=4)
    trainer = fit(Plain(), [rigl], tmp_path, logger=logger, log_every_n_steps=0)
    assert trainer.callback_metrics[KEY] == rigl.connections["net.0"].mask.float().mean()
    logger.save()
    assert not Path(logger.log_dir, "metrics.csv").exists()


def test_a_row_has_its_epoch_and_accumulated_batches_make_no_row(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    rigl = RigL(0.7, every_n_steps=2, until="100%")
    options: Any = {"accumulate_grad_batches": 3, "log_every_n_steps": 1}
    trainer = fit(Plain(), [rigl], tmp_path, logger=logger, **options)  # 2 epochs of 4 steps
    logger.save()
    lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    rows = [(row["epoch"], row["step"]) for row in csv.DictReader(lines) if row.get(KEY)]
    assert rows == [("01"[step >= 4], str(step)) for step in range(8)]
    assert KEY in trainer.logged_metrics


@pytest.mark.parametrize("same", [True, False])
def test_a_resumed_training_logs_them_too(same: bool, tmp_path: Path) -> None:
    rigl = RigL(0.7, every_n_steps=4, until="75%")
    saving = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=7, save_top_k=-1)
    model = Plain()
    fit(model, [rigl, saving], tmp_path, max_steps=7, enable_checkpointing=True)
    logger = CSVLogger(tmp_path)
    rigl = rigl if same else RigL(0.7, every_n_steps=4, until="75%")
    fit(Plain(), [rigl], tmp_path, logger=logger, ckpt_path=tmp_path / "at.ckpt")
    assert logged_steps(logger)[:2] == [8, 11]


class Growing(RigL):
    """Makes more connections than it takes."""

    sees_all_gradients = True
    seen = 0

    @override
    def see_gradients(self, *arguments: Any) -> None:
        self.seen += 1
        super().see_gradients(*arguments)

    @override
    def rewire(self, step: int, c: SparseLayer, keep: Tensor, grow: Tensor) -> Tensor:
        return super().rewire(step, c, keep, grow) | (torch.rand_like(grow) < 0.1)


def test_somebodys_own_rule_is_counted_right_and_sees_every_step(tmp_path: Path) -> None:
    growing = Growing(0.7, every_n_steps=4, until="100%")
    fit(Plain(), [growing], tmp_path)
    assert growing.seen == 24
    for c in growing.connections.values():
        assert c.count == int(c.mask.sum())
        assert c.figures()["density"] == pytest.approx(c.mask.double().mean().item())
