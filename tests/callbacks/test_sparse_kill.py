"""A run that is killed again and again ends as one that was not."""

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from dg_lightning.callbacks import SET, ExactResume, MagnitudePruning, RigL
from dg_lightning.datamodules import DigitsDataModule


class Dropped(pl.LightningModule):
    """Somebody's module, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 32),
            nn.Dropout(0.2),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, amsgrad=True)


class Kill(pl.Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, kill_at: int | None, every_n_steps: int) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    saving = ModelCheckpoint(
        folder, save_last=True, every_n_train_steps=every_n_steps, save_top_k=0
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=5,
        callbacks=[
            RigL(0.8, layers=["net.1"], every_n_steps=4, grow="mean_gradient", until="90%"),
            SET(0.8, layers=["net.4"], every_n_steps=5, until="90%"),
            MagnitudePruning(0.6, begin=20, until=80, every_n_steps=7, layers=["net.6"]),
            ExactResume(),
            Kill(kill_at),
            saving,
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    last = Path(folder, "last.ckpt")
    loader = DigitsDataModule(batch_size=64, split_seed=0)
    trainer.fit(Dropped(), loader, ckpt_path=str(last) if last.exists() else None)
    trainer.save_checkpoint(Path(folder, "end.ckpt"))


# An epoch has 21 batches: every third checkpoint of the second case is of an epoch's last one.
KILLS = {5: sorted(random.Random(0).sample(range(6, 105), 10)), 7: [22, 30, 43, 50, 64, 65, 85]}


@pytest.mark.slow
@pytest.mark.parametrize("every_n_steps", KILLS)
def test_a_run_killed_many_times_ends_bit_by_bit_as_the_uninterrupted_one(
    every_n_steps: int, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "dg_lightning.callbacks", "lightning.pytorch"])

    def run(folder: str, kill_at: int | None) -> int | None:
        process = context.Process(
            target=train, args=(str(tmp_path / folder), kill_at, every_n_steps)
        )
        process.start()
        process.join(180)
        return process.exitcode

    assert run("whole", None) == 0
    for step in KILLS[every_n_steps]:
        assert run("killed", step) == -signal.SIGKILL, step
    assert run("killed", None) == 0
    ends = [
        torch.load(tmp_path / folder / "end.ckpt", weights_only=True)
        for folder in ("whole", "killed")
    ]
    assert [end["global_step"] for end in ends] == [105, 105]
    for key, value in ends[0]["state_dict"].items():
        assert torch.equal(value, ends[1]["state_dict"][key]), key
    for key, state in ends[0]["callbacks"].items():
        for name, layer in state.get("connections", {}).items():
            other = ends[1]["callbacks"][key]["connections"][name]
            assert torch.equal(layer["mask"], other["mask"]), name
            assert torch.equal(layer["explored"], other["explored"]), name
    slots = [end["optimizer_states"][0]["state"] for end in ends]
    for index, state in slots[0].items():
        for name, value in state.items():
            assert torch.equal(value, slots[1][index][name]), name
