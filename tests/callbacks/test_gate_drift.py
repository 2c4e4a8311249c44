"""Drift that gates see, in trainings, tests and predictions."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from task_runs import classifier, trainer_for
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning.callbacks import GateDrift
from dg_lightning.datamodules import DigitsDataModule

GATE = {"kind": "dynamic", "initial_open_rate": 0.6, "initial_spread": 1.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> tuple[Any, Path]:
    root = tmp_path_factory.mktemp("trained")
    pl.seed_everything(0, verbose=False)
    model = classifier(gate=GATE)
    trainer = trainer_for([GateDrift()], root, max_epochs=4)
    trainer.fit(model, datamodule=DigitsDataModule(batch_size=32))
    trainer.save_checkpoint(root / "some.ckpt")
    return model, root / "some.ckpt"


def digits(change: Any = lambda x: x) -> DataLoader[Any]:
    data = DigitsDataModule(batch_size=64)
    data.setup("test")
    x, y = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    return DataLoader(TensorDataset(change(x), y), batch_size=64)


def noisy(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return x + 2 * x.std() * torch.randn(x.shape, generator=generator)


def test_a_prediction_says_whether_inputs_have_drifted(trained: Any, tmp_path: Path) -> None:
    model, path = trained
    reports = []
    for change in (lambda x: x, noisy):
        callback = GateDrift()
        trainer = trainer_for([callback], tmp_path)
        trainer.predict(model, digits(change), ckpt_path=path)
        reports.append(callback.report)
        rows = list(csv.DictReader((tmp_path / "drift.csv").open()))
        assert [row["name"] for row in rows[:2]] == ["net.hidden.0.gate", "net.hidden.1.gate"]
        assert {row["kind"] for row in rows} == {"gate", "class"}
    clean, drifted = reports
    assert clean is not None
    assert drifted is not None
    assert not clean.has_drifted
    assert drifted.has_drifted
    assert "the inputs have drifted" in str(drifted)
    assert max(drifted.by_layer.values()) > max(clean.by_layer.values())


def test_a_test_logs_it_and_needs_a_reference(trained: Any, tmp_path: Path) -> None:
    model, path = trained
    trainer = trainer_for([GateDrift()], tmp_path)
    (logged,) = trainer.test(model, digits(noisy), ckpt_path=path, verbose=False)
    assert logged["drift/score/net.hidden.0.gate"] > 1
    assert logged["drift/p"] < 1e-3
    with pytest.raises(ValueError, match="GateDrift has no reference: give the checkpoint"):
        trainer_for([GateDrift()], tmp_path).test(model, digits(), verbose=False)


class Submodules(pl.LightningModule):
    """Somebody's module, whose steps do not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier(gate=GATE).net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_without_logits_of_validation_there_are_no_classes(tmp_path: Path) -> None:
    drift = GateDrift()
    data = DigitsDataModule(batch_size=32, eval_batch_size=64)
    trainer_for([drift], tmp_path, max_epochs=1).fit(Submodules(), datamodule=data)
    assert [opened.samples.tolist() for opened in drift.reference.values()] == [[144], [144]]


def test_weights_of_another_step_are_told_of(tmp_path: Path) -> None:
    data, model = DigitsDataModule(batch_size=32), classifier(gate=GATE)
    trainer = trainer_for([GateDrift()], tmp_path, max_epochs=3, check_val_every_n_epoch=2)
    with pytest.warns(UserWarning, match="is of step 82, the weights are of step 123"):
        trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    trainer = trainer_for([GateDrift()], tmp_path)
    with pytest.warns(UserWarning, match="is of step 82, the weights are of step 123"):
        trainer.test(model, digits(), ckpt_path=tmp_path / "late.ckpt", verbose=False)
    trainer = trainer_for([GateDrift(), StochasticWeightAveraging(1e-2)], tmp_path)
    with pytest.raises(ValueError, match="StochasticWeightAveraging leaves"):
        trainer.fit(model, datamodule=data)


def test_two_processes_find_the_reference_of_one(in_two_processes: Any, tmp_path: Path) -> None:
    results = in_two_processes(
        """
import tempfile, warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl, torch

from task_runs import classifier, trainer_for
from dg_lightning.callbacks import GateDrift
from dg_lightning.datamodules import DigitsDataModule
pl.seed_everything(0, verbose=False)
gate = {"kind": "dynamic", "initial_open_rate": 0.6, "initial_spread": 1.0}
drift = GateDrift()
trainer = trainer_for([drift], tempfile.mkdtemp(), max_epochs=1, devices=2, strategy="ddp",
                      limit_train_batches=2)
trainer.fit(classifier(gate=gate), datamodule=DigitsDataModule(batch_size=32))
result = [list(opened.sums.shape) + [opened.samples.sum().item()]
          for opened in drift.reference.values()]
"""
    )
    data = DigitsDataModule(batch_size=32)
    data.setup("fit")
    samples = sum(len(y) for _, y in data.val_dataloader())
    assert results[0] == results[1]
    assert [shape[:2] for shape in results[0]] == [[10, 32], [10, 24]]
    assert samples <= results[0][0][2] <= samples + 1  # Lightning may repeat one
