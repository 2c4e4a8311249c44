"""Loaders and Trainer together: a resumed run ends as the uninterrupted one."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from dg_lightning.datamodules import DigitsDataModule


class Recorder(BoringModel):
    """Learns from digits, and remembers which samples came in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.seen: list[tuple[int, float]] = []
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        self.seen.append((self.current_epoch, float(inputs.double().sum())))
        return torch.nn.functional.cross_entropy(self.layer(inputs.flatten(1)), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return

    def on_validation_end(self) -> None:
        self.validations += not self.trainer.sanity_checking

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=0.9)


def train(folder: Path, resume: Path | None = None, **options: Any) -> tuple[Recorder, pl.Trainer]:
    pl.seed_everything(7)
    every = options.pop("every", {"every_n_train_steps": 4})
    data = DigitsDataModule(batch_size=options.pop("batch_size", 128))
    keep = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **every)
    settings = {"max_epochs": 3, "callbacks": [keep], "accelerator": "cpu", "logger": False}
    settings["default_root_dir"] = folder
    trainer = pl.Trainer(
        **{**settings, **options}, enable_progress_bar=False, enable_model_summary=False
    )
    model = Recorder()
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model, trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_check_interval": 4},
        {"accumulate_grad_batches": 2, "every": {"every_n_train_steps": 2}},
        {"limit_train_batches": 9},
        {"every": {"every_n_epochs": 1}},
        {"every": {"every_n_epochs": 1, "save_on_train_epoch_end": False}},
        {"max_epochs": -1, "max_steps": 30},
    ],
    ids=str,
)
def test_a_run_resumed_anywhere_ends_as_the_uninterrupted_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model, trainer = train(tmp_path / "a", **options)
    checkpoints = sorted((tmp_path / "a").glob("*.ckpt"))
    assert len(checkpoints) >= 3
    for checkpoint in checkpoints:
        resumed, other = train(tmp_path / "b", checkpoint, **options)
        assert other.global_step == trainer.global_step
        # The samples that were left, in the same order, and nothing else.
        assert resumed.seen == model.seen[len(model.seen) - len(resumed.seen) :], checkpoint.name
        assert torch.equal(resumed.layer.weight, model.layer.weight), checkpoint.name


class Interruption(pl.Callback):
    """Saves a checkpoint at one moment, and ends the run there."""

    def __init__(self, moment: str, epoch: int, batch: int, path: Path) -> None:
        self.moment, self.epoch, self.batch, self.path = moment, epoch, batch, path

    def interrupt(self, moment: str, trainer: pl.Trainer, batch: int) -> None:
        if (moment, trainer.current_epoch, batch) == (self.moment, self.epoch, self.batch):
            raise RuntimeError("interrupted")

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        def transfer(batch: Any, dataloader_idx: int) -> Any:  # before Lightning counts the batch
            self.interrupt("transfer", trainer, len(pl_module.seen) % 11)
            return batch

        pl_module.on_before_batch_transfer = transfer

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *rest: Any) -> None:
        self.interrupt("batch", trainer, rest[-1])

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, *rest: Any) -> None:
        self.interrupt("step", trainer, trainer.fit_loop.batch_idx)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("moment", "epoch", "batch"),
    [
        ("transfer", 1, 5),
        ("batch", 1, 0),
        ("batch", 1, 5),
        ("step", 1, 0),
        ("step", 0, 10),
        ("step", 1, 4),
    ],
)
def test_a_batch_that_a_run_broke_off_in_is_trained_on_again(
    moment: str, epoch: int, batch: int, tmp_path: Path
) -> None:
    model, trainer = train(tmp_path / "a", callbacks=[])
    interruption = Interruption(moment, epoch, batch, tmp_path / "broken.ckpt")
    with pytest.raises(RuntimeError, match="interrupted"):
        train(tmp_path / "b", callbacks=[interruption])
    resumed, other = train(tmp_path / "c", tmp_path / "broken.ckpt", callbacks=[])
    assert other.global_step == trainer.global_step
    assert resumed.seen == model.seen[len(model.seen) - len(resumed.seen) :]
    assert torch.equal(resumed.layer.weight, model.layer.weight)
    assert resumed.validations == 3 - epoch


def test_batches_may_change_after_an_epoch_but_not_after_its_last_batch(tmp_path: Path) -> None:
    train(tmp_path / "step", every={"every_n_train_steps": 11}, max_epochs=1)
    train(tmp_path / "epoch", every={"every_n_epochs": 1}, max_epochs=1)
    (step,), (epoch,) = ((tmp_path / name).glob("*.ckpt") for name in ("step", "epoch"))
    model, _ = train(tmp_path / "b", epoch, batch_size=64, max_epochs=2)
    assert len(model.seen) == 21
    with pytest.raises(ValueError, match=r"batches of 128 samples in total, .* uses 64"):
        train(tmp_path / "c", step, batch_size=64, max_epochs=2)


def test_workers_end_with_the_run() -> None:
    data = DigitsDataModule(batch_size=400, num_workers=1)
    trainer = pl.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Recorder(), datamodule=data)
    assert not multiprocessing.active_children()


def test_overfitting_sees_the_same_batches_in_every_epoch(tmp_path: Path) -> None:
    model, _ = train(tmp_path, overfit_batches=2)
    sums = [value for _, value in model.seen]
    assert len(sums) == 6
    assert sums[:2] * 3 == sums


@pytest.mark.slow
def test_two_processes_train_and_test_on_every_sample_once(
    in_two_processes: Callable[[str], list[Any]],
) -> None:
    results = in_two_processes(
        """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from dg_lightning.datamodules import DigitsDataModule

class Counter(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.register_buffer("anything", torch.zeros(1))  # buffers are broadcast in every forward
        self.seen = {"train": [], "val": [], "test": []}

    def step(self, kind, batch):
        self.seen[kind] += batch[0].double().flatten(1).matmul(WEIGHTS).tolist()
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def training_step(self, batch, batch_idx):
        return self.step("train", batch)

    def validation_step(self, batch, batch_idx):
        self.step("val", batch)

    def test_step(self, batch, batch_idx):
        self.step("test", batch)

WEIGHTS = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
pl.seed_everything(3)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False,
                     num_sanity_val_steps=0, enable_model_summary=False)
model, data = Counter(), DigitsDataModule(batch_size=31)
trainer.fit(model, datamodule=data)
trainer.test(model, datamodule=data)
alone = DigitsDataModule(batch_size=31)  # its loader is made where nobody knows of ranks
alone.setup("fit")
alone_loader, first = alone.train_dataloader(), len(model.seen["train"])
trainer.fit_loop.max_epochs, trainer.limit_val_batches = 2, 0
trainer.fit(model, train_dataloaders=alone_loader)
shared = len(model.seen["train"]) - first
every = {}
for name, part in data._parts.items():
    inputs, _ = part.__getitems__(range(len(part)))
    every[name] = inputs.double().flatten(1).matmul(WEIGHTS).tolist()
model.seen["train"] = model.seen["train"][:first]
result = {"seen": model.seen, "every": every, "shared": shared}
"""
    )
    assert [result["shared"] for result in results] == [647, 646]
    for part in ("train", "val", "test"):
        seen = results[0]["seen"][part] + results[1]["seen"][part]
        assert sorted(seen) == pytest.approx(sorted(results[0]["every"][part]))
