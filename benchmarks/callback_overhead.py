"""What the gate callbacks cost: the time of a training step with them against the one without.

    python benchmarks/callback_overhead.py
    python benchmarks/callback_overhead.py --device cuda

A step is one of Lightning's Trainer on a module with gates. Variants are timed in turns, in
stretches of steps that hold two checks of the slow callbacks, and compared by their medians.
"""

import argparse
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from dg_lightning import GatedMLP
from dg_lightning.callbacks import (
    BudgetController,
    CollapseDetector,
    ExactResume,
    GatePenalty,
    MinimumActivity,
    TemperatureAnnealing,
    ThresholdPhases,
)
from dg_lightning.schedules import Schedule

STEPS = 100  # of a stretch; the slow callbacks check every 50
WARM_UP = 20


class Module(pl.LightningModule):
    """Somebody's module, with gates in it."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = GatedMLP(3072, [1024, 512], 10, gate=gate)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Repeated:
    """A loader that gives one batch again and again, without any cost."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 10_000

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, len(self))


class Stopwatch(pl.Callback):
    """Times a stretch of steps and ends the training."""

    seconds = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start or stop."""
        if trainer.global_step in (WARM_UP, WARM_UP + STEPS):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.seconds
            trainer.should_stop = trainer.global_step > WARM_UP


def variants() -> dict[str, list[pl.Callback]]:
    """Return what is compared; the first one has no callback."""
    ramp = Schedule(0.01, 0.1)
    schedules: list[Any] = [TemperatureAnnealing(), ThresholdPhases()]
    guards: list[Any] = [CollapseDetector(), MinimumActivity(0.05), ExactResume()]
    penalty = GatePenalty(ramp, "expected_macs")
    return {
        "none": [],
        "GatePenalty": [GatePenalty(ramp, "expected_macs")],
        "BudgetController": [BudgetController(0.25, begin=0)],
        "schedules": schedules,
        "guards": guards,
        "all, with GatePenalty": [penalty, *schedules, *guards],
        "all, with BudgetController": [BudgetController(0.25, begin=0), *schedules, *guards],
    }


def stretch(gate: Any, callbacks: list[pl.Callback], batch: Any, device: str) -> float:
    """Return the seconds of a step."""
    stopwatch = Stopwatch()
    trainer = pl.Trainer(
        accelerator=device,
        devices=1,
        max_steps=10_000,  # schedules and checks as in a training of this length
        callbacks=[*callbacks, stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(gate), Repeated(batch))
    return stopwatch.seconds / STEPS


def main() -> None:
    """Time every variant and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = arguments.device
    batch = (
        torch.randn(arguments.batch, 3072, device=device),
        torch.randint(10, (arguments.batch,), device=device),
    )
    gates: dict[str, Any] = {
        "static": {"kind": "static"},
        "low-rank 32": {"kind": "dynamic", "network": "low_rank", "rank": 32},
    }
    bar = 1.05 if device == "cpu" else 1.10
    for kind, gate in gates.items():
        seconds: dict[str, list[float]] = {name: [] for name in variants()}
        for _ in range(arguments.rounds):
            for name, callbacks in variants().items():
                seconds[name].append(stretch(gate, callbacks, batch, device))
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        table = Table(title=f"3072-1024-512-10, {kind} gates, batch {arguments.batch}, {device}")
        for column in ("callbacks", "median ms a step", "ratio to none", "at most"):
            table.add_column(column, justify="left" if column == "callbacks" else "right")
        for name, median in medians.items():
            limit = f"{bar}" if name.startswith("all") else ""
            ratio = median / medians["none"]
            table.add_row(name, f"{median * 1e3:.3f}", f"{ratio:.3f}", limit)
        Console().print(table)


if __name__ == "__main__":
    main()
