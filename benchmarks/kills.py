"""Kill and resume a training run repeatedly, and compare its end with an uninterrupted run.

A process that has imported everything forks a training run, waits for its n-th step, end of an
epoch or checkpoint, and sends SIGKILL a random moment later. The next process resumes from the
newest checkpoint. Weights, masks, optimizer state, the state of every callback and all random
generators must end up as they do without kills.

    python benchmarks/kills.py [--kills 100]
"""

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import DynamicGate, GatedLinear, StaticGate
from dg_lightning.callbacks import (
    BudgetController,
    CollapseDetector,
    ExactResume,
    MinimumActivity,
    RigL,
    TemperatureAnnealing,
)
from dg_lightning.datamodules import DigitsDataModule
from dg_lightning.files import AtomicCheckpointIO

EVENTS = {"step": b"s", "epoch's end": b"e", "checkpoint": b"c"}


class Net(pl.LightningModule):
    """A net with static and dynamic gates, a stochastic policy and dropout."""

    def __init__(self) -> None:
        super().__init__()
        dynamic = DynamicGate(64, 32, network="low_rank", rank=2)
        self.body = nn.Sequential(
            nn.Flatten(),
            GatedLinear(64, 64, gate=StaticGate(64, policy="bernoulli"), dropout=0.1),
            GatedLinear(64, 32, gate=dynamic),
            nn.Linear(32, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Tell(pl.Callback):
    """Reports events to the process that kills the run."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_train_batch_start(self, *_: Any) -> None:
        os.write(self.pipe, EVENTS["step"])

    def on_train_epoch_end(self, *_: Any) -> None:
        os.write(self.pipe, EVENTS["epoch's end"])

    def on_save_checkpoint(self, *_: Any) -> None:
        os.write(self.pipe, EVENTS["checkpoint"])


def data(kind: str) -> Any:
    if kind == "our DataModule":
        return DigitsDataModule(batch_size=64)
    digits = DigitsDataModule()
    digits.prepare_data()
    digits.setup("fit")
    batches = list(digits.train_dataloader())
    samples = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    generator = torch.Generator().manual_seed(11)
    return DataLoader(samples, 64, shuffle=True, generator=generator)


def train(kind: str, folder: Path, pipe: int) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    # An ordinary loader can resume only at the end of an epoch, ours at any step. Avoid the last of
    # the 21 batches, because Lightning 2.6 miscounts epochs when resumed there twice.
    when: dict[str, Any] = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    if kind == "our DataModule":
        when = {"every_n_train_steps": 10}
    saved = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=7,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=folder,
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            BudgetController(0.6),
            RigL(0.5, every_n_steps=5, layers=["*linear"]),
            TemperatureAnnealing(),
            MinimumActivity("5%"),
            CollapseDetector("rescue"),
            ExactResume(),
            Tell(pipe),
            ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **when),
        ],
    )
    last = str(saved[-1]) if saved else None
    trainer.fit(Net(), data(kind), ckpt_path=last, weights_only=True)
    trainer.save_checkpoint(folder / "end.of.training")


def fork(kind: str, folder: Path) -> tuple[int, int]:
    """Start a training run in a child process; return its ID and a pipe with its events."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(folder / "log", "a", encoding="utf-8") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            train(kind, folder, writes)
            status = 0
        finally:
            os._exit(status)
    os.close(writes)
    return child, reads


def live(kind: str, folder: Path, chance: random.Random | None) -> str:
    """Let a training run finish, or kill it; return the event after which it was killed."""
    child, pipe = fork(kind, folder)
    event = "end" if chance is None else chance.choice(list(EVENTS))
    left = 0 if chance is None else chance.randint(1, 12 if event == "step" else 2)
    while (told := os.read(pipe, 1)) and left >= 0:
        left -= chance is not None and told == EVENTS[event]
        if chance is not None and left == 0:
            time.sleep(chance.random() * (0.05 if event != "step" else 0.01))
            os.kill(child, signal.SIGKILL)
            break
    os.close(pipe)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, (folder / "log").read_text(encoding="utf-8")
        return "end"
    return event


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    if isinstance(one, Tensor):
        return [] if torch.equal(one, other) else [where]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [where]
        return [d for key in one for d in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [where]
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True))
                for d in differences(a, b, f"{where}/{i}")]  # fmt: skip
    return [] if one == other else [where]


def end_of(folder: Path) -> dict[str, Any]:
    saved = torch.load(folder / "end.of.training", weights_only=True)
    kept = {key: saved[key] for key in ("state_dict", "optimizer_states", "random_generators")}
    states = saved["callbacks"].items()
    return {**kept, "callbacks": {k: v for k, v in states if "ModelCheckpoint" not in k}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    wanted = parser.parse_args().kills // 2
    chance = random.Random(0)
    for kind in ("our DataModule", "ordinary DataLoader"):
        killed: dict[str, int] = dict.fromkeys(EVENTS, 0)
        trainings = wrong = 0
        with tempfile.TemporaryDirectory() as root:
            alone = Path(root, "alone")
            alone.mkdir()
            live(kind, alone, None)
            while sum(killed.values()) < wanted:
                folder = Path(root, str(trainings))
                folder.mkdir()
                while True:
                    enough = sum(killed.values()) >= wanted
                    event = live(kind, folder, None if enough else chance)
                    if event == "end":
                        break
                    killed[event] += 1
                trainings += 1
                if found := differences(end_of(alone), end_of(folder)):
                    wrong += 1
                    print(f"{kind}: different in {', '.join(found[:5])}", flush=True)
        total = sum(killed.values())
        print(f"{kind}: {total} kills ({killed}) in {trainings} runs, {wrong} ended differently")


if __name__ == "__main__":
    main()
