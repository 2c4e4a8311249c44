"""What the gate callbacks cost: the time of a training step with them against the one without.

    python benchmarks/callback_overhead.py
    python benchmarks/callback_overhead.py --device cuda

One training of a GatedClassifier, as the shipped configs have it: Lightning's Trainer, a CSV
logger, checkpoints. The callbacks come and go in blocks of steps, each of which holds one check of
the slow ones. A block with callbacks is compared with the two beside it, which have none, so that
slow spells of the machine hit both; shown are medians.
"""

import argparse
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table

from dg_lightning import GatedClassifier, gate_layers
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

BLOCK = 50  # steps; the slow callbacks check every 50
TOTAL = 100_000  # steps that schedules are made for; the training ends earlier


class Repeated:
    """A loader that gives one batch again and again, without any cost."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return TOTAL

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, len(self))


def ratios(blocks: list[tuple[str, float]], base: str) -> dict[str, float]:
    """Return by name the median over blocks of the time, over the mean of the two beside it.

    Those are of the base; a block at the end has only one, and is left out.
    """
    found: dict[str, list[float]] = {}
    for before, (name, seconds), after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        if name != base:
            found.setdefault(name, []).append(2 * seconds / (before[1] + after[1]))
    return {name: statistics.median(each) for name, each in found.items()}


class Switch(pl.Callback):
    """Lets callbacks act in every second block of steps, in turns, and times the blocks."""

    def __init__(self, variants: dict[str, list[Any]], rounds: int) -> None:
        self.variants = variants
        none, *others = variants
        in_turns = [name for other in others for name in (none, other)]
        self.turns = iter([*in_turns * (rounds + 1), none])
        self.blocks: list[tuple[str, float]] = []
        self.now: str | None = None
        self.started = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Take the time of a block that ends, and begin the next one."""
        if trainer.global_step % BLOCK:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.now is not None:
            self.blocks.append((self.now, (time.perf_counter() - self.started) / BLOCK))
        others = [c for c in trainer.callbacks if c is self or isinstance(c, ModelCheckpoint)]  # type: ignore[attr-defined]
        self.now = next(self.turns, None)
        acting = [] if self.now is None else self.variants[self.now]
        floor: Any = next((c.min_open for c in acting if isinstance(c, MinimumActivity)), 0)
        for gate in gate_layers(pl_module).values():
            gate.set_min_open(floor)
        for callback in acting:  # else what was missed while it was away would be made up for
            if isinstance(callback, CollapseDetector):
                callback._checked_at = trainer.global_step
            elif isinstance(callback, BudgetController):
                callback._measured_at = trainer.global_step
        trainer.callbacks = [*acting, *others]  # type: ignore[attr-defined]
        trainer.should_stop = self.now is None
        self.started = time.perf_counter()


def variants(pressing: Any) -> dict[str, list[Any]]:
    """Return what is compared; the first one has no gate callback."""
    schedules = [TemperatureAnnealing(), ThresholdPhases()]
    guards = [CollapseDetector(), ExactResume()]
    floor = [MinimumActivity(0.05)]
    return {
        "none": [],
        type(pressing).__name__: [pressing],
        "TemperatureAnnealing, ThresholdPhases": schedules,
        "CollapseDetector, ExactResume": guards,
        "MinimumActivity": floor,
        "all": [pressing, *schedules, *guards, *floor],
    }


def measure(gate: Any, pressing: Any, batch: Any, arguments: Any) -> dict[str, tuple[float, float]]:
    """Return by variant the median seconds of a step, and the ratio to none."""
    torch.manual_seed(0)
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [1024, 512], "gate": gate}}
    model = GatedClassifier(net, input_shape=[3072], num_classes=10)
    compared = variants(pressing)
    switch = Switch(compared, arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator=arguments.device,
            devices=1,
            max_steps=TOTAL,
            callbacks=[*compared["all"], ModelCheckpoint(folder), switch],
            # Written to the disk in every block: else it would be in every second one.
            logger=CSVLogger(folder, flush_logs_every_n_steps=BLOCK),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, Repeated(batch))
    after_the_first_round = switch.blocks[2 * (len(compared) - 1) :]
    found = {"none": 1.0, **ratios(after_the_first_round, "none")}
    times = {name: [s for n, s in after_the_first_round if n == name] for name in found}
    return {name: (statistics.median(times[name]), ratio) for name, ratio in found.items()}


def main() -> None:
    """Time every variant and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gates", nargs="+", default=["static", "low-rank"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    batch = (
        torch.randn(arguments.batch, 3072, device=arguments.device),
        torch.randint(10, (arguments.batch,), device=arguments.device),
    )
    gates: dict[str, Any] = {
        "static": {"kind": "static"},
        "low-rank": {"kind": "dynamic", "network": "low_rank", "rank": 32},
    }
    bar = 1.05 if arguments.device == "cpu" else 1.10
    for kind in arguments.gates:
        for pressing in (
            GatePenalty(Schedule(0.01, 0.1), "expected_macs"),
            BudgetController(0.25, begin=0, every_n_steps=BLOCK),
        ):
            measured = measure(gates[kind], pressing, batch, arguments)
            title = f"3072-1024-512-10, {kind} gates, batch {arguments.batch}, {arguments.device}"
            table = Table(title=title)
            for column in ("callbacks", "median ms a step", "ratio to none", "at most"):
                table.add_column(column, justify="left" if column == "callbacks" else "right")
            for name, (median, ratio) in measured.items():
                limit = f"{bar}" if name == "all" else ""
                table.add_row(name, f"{median * 1e3:.3f}", f"{ratio:.3f}", limit)
            Console().print(table)


if __name__ == "__main__":
    main()
