"""Overhead of `GateMonitor`: training with and without it.

    python benchmarks/monitor_overhead.py
    python benchmarks/monitor_overhead.py --device cuda

First, a training step as in callback_overhead.py. Then, whole epochs of the size of MNIST including
validation, alternating ten with the monitor and ten without. These use a CSV logger (scalars and
files), then TensorBoard (also figures, every ten epochs).
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from alternating import Repeated
from callback_overhead import BLOCK, Switch, stretch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from dg_lightning import GatedClassifier
from dg_lightning.callbacks import GateMonitor

EPOCHS = 10  # per group, with and without: the interval between figures
SIZES = (54_000, 6_000)  # MNIST
BATCH = 128
GATES: dict[str, Any] = {
    "static": {"kind": "static"},
    "low-rank": {"kind": "dynamic", "network": "low_rank", "rank": 32},
}


class Batches:
    """Whole batches from tensors on the model's device."""

    def __init__(self, samples: int, features: int, device: str) -> None:
        self.x = torch.randn(samples, features, device=device)
        self.y = torch.randint(10, (samples,), device=device)

    def __len__(self) -> int:
        return -(-len(self.y) // BATCH)

    def __iter__(self) -> Any:
        for start in range(0, len(self.y), BATCH):
            yield self.x[start : start + BATCH], self.y[start : start + BATCH]


class EpochSwitch(pl.Callback):
    """Enables the monitor in every second group of epochs and times the epochs."""

    def __init__(self, monitor: GateMonitor) -> None:
        self.monitor = monitor
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start an epoch with or without the monitor."""
        self.watched = trainer.current_epoch // EPOCHS % 2 == 1
        others = [c for c in trainer.callbacks if c is not self.monitor]  # type: ignore[attr-defined]
        trainer.callbacks = [self.monitor, *others] if self.watched else others  # type: ignore[attr-defined]
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Record the time of the epoch, including its validation."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[self.watched].append(time.perf_counter() - self.started)


def model_of(gate: Any, features: int, hidden: list[int]) -> GatedClassifier:
    torch.manual_seed(0)
    init = {"hidden": hidden, "gate": gate, "input_gate": {"kind": "static"}}
    net: Any = {"class_path": "GatedMLP", "init_args": init}
    return GatedClassifier(net, input_shape=[features], num_classes=10)


def quiet(folder: str, logger: Any, device: str, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator=device,
        devices=1,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )


def step_ratio(gate: Any, device: str, rounds: int, monitor: GateMonitor) -> float:
    """Return the time of a step with the monitor, relative to one without."""
    batch: tuple[Tensor, Tensor] = (
        torch.randn(256, 3072, device=device),
        torch.randint(10, (256,), device=device),
    )
    switch = Switch({"none": [], "monitor": [monitor]}, rounds, stretch(device))
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [monitor, ModelCheckpoint(folder), switch]
        logger = CSVLogger(folder, flush_logs_every_n_steps=BLOCK)  # once per block
        trainer = quiet(folder, logger, device, callbacks=callbacks, max_steps=100_000)
        # Validation is configured but never reached, so that the monitor's default applies.
        trainer.fit(
            model_of(gate, 3072, [1024, 512]), Repeated(batch), Batches(BATCH, 3072, device)
        )
    return switch.times.ratios()["monitor"]


def epoch_ratio(gate: Any, device: str, rounds: int, pictures: bool) -> tuple[float, float]:
    """Return the seconds of an epoch without the monitor, and the ratio with it."""
    monitor = GateMonitor()
    switch = EpochSwitch(monitor)
    train, val = (Batches(samples, 784, device) for samples in SIZES)
    with tempfile.TemporaryDirectory() as folder:
        logger: Any = TensorBoardLogger(folder) if pictures else CSVLogger(folder)
        saving = ModelCheckpoint(Path(folder) / "kept")
        epochs = 2 * EPOCHS * rounds + EPOCHS
        callbacks = [monitor, saving, switch]
        trainer = quiet(folder, logger, device, callbacks=callbacks, max_epochs=epochs)
        trainer.fit(model_of(gate, 784, [256]), train, val)
    off, on = switch.seconds[False][EPOCHS:], switch.seconds[True]
    # Sum within groups, because one epoch per group draws figures. Then take medians.
    sums = [
        [sum(times[start : start + EPOCHS]) for start in range(0, len(times), EPOCHS)]
        for times in (off, on)
    ]
    without, with_it = map(statistics.median, sums)
    return without / EPOCHS, with_it / without


def main() -> None:
    """Print each ratio as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="Number of blocks of steps.")
    parser.add_argument("--epoch-rounds", type=int, default=3, help="Number of groups of epochs.")
    parser.add_argument("--loggers", nargs="*", default=["csv", "tensorboard"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gates", nargs="+", default=list(GATES))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for kind in arguments.gates:
        print(f"{kind} gates, {arguments.device}; with GateMonitor over without, at most 1.03:")
        for name, monitor in {
            "default": GateMonitor(),
            "looks at training": GateMonitor(stage="train"),
        }.items():
            ratio = step_ratio(GATES[kind], arguments.device, arguments.rounds, monitor)
            print(f"  a training step, {name}: {ratio:.3f}", flush=True)
        for logger in arguments.loggers:
            seconds, ratio = epoch_ratio(
                GATES[kind], arguments.device, arguments.epoch_rounds, logger == "tensorboard"
            )
            said = "an epoch with its validation, without the monitor"
            print(f"  {said} {seconds:.2f} s, {logger}: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
