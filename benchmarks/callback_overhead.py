"""Overhead of the gate callbacks: time of a training step with and without them.

    python benchmarks/callback_overhead.py
    python benchmarks/callback_overhead.py --device cuda --hidden 8192 4096 --batch 2048
    python benchmarks/callback_overhead.py --device cuda  # launch-bound: no limit

Measures a training run of a GatedClassifier as in the shipped configs, with Lightning's Trainer, a
CSV logger and checkpoints. Callbacks are switched on and off (see alternating.py) in blocks of
steps on a CPU and every ten steps on a GPU. Callbacks with periodic checks run them once per block.
"""

import argparse
import itertools
import logging
import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from alternating import Repeated, StepTimes, turns
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
from dg_lightning.schedules.schedule import Schedule

BLOCK = 50  # steps between the checks of periodic callbacks
TOTAL = 100_000  # length of the schedules; training ends earlier


class Switch(pl.Callback):
    """Alternates between sets of callbacks and times the steps."""

    def __init__(self, variants: dict[str, list[Any]], rounds: int, stretch: int) -> None:
        self.variants = variants
        base, *others = variants
        self.turns = turns(others, base, BLOCK, stretch, rounds)
        self.times = StepTimes(base, BLOCK, stretch, len(others))
        self.now: str | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Record the step time and choose the callbacks of the next step."""
        if self.now is not None:
            self.times.end(self.now)
        elif trainer.global_step % BLOCK:
            return
        others = [c for c in trainer.callbacks if c is self or isinstance(c, ModelCheckpoint)]  # type: ignore[attr-defined]
        self.now = next(self.turns, None)
        acting = [] if self.now is None else self.variants[self.now]
        floor: Any = next((c.min_open for c in acting if isinstance(c, MinimumActivity)), 0)
        for gate in gate_layers(pl_module).values():
            gate.set_min_open(floor)
        if trainer.global_step % BLOCK == 0:  # do not catch up on missed checks
            for callback in itertools.chain(*self.variants.values()):
                if isinstance(callback, CollapseDetector):
                    callback._checked_at = trainer.global_step
                elif isinstance(callback, BudgetController):
                    callback._measured_at = trainer.global_step
        trainer.callbacks = [*acting, *others]  # type: ignore[attr-defined]
        trainer.should_stop = self.now is None
        self.times.begin()


def stretch(device: str) -> int:
    """Return the number of consecutive steps of the same variant."""
    return 10 if device == "cuda" else BLOCK


def variants(pressing: Any) -> dict[str, list[Any]]:
    """Return the variants to compare; the first has no gate callbacks."""
    schedules = [TemperatureAnnealing(), ThresholdPhases()]
    guards = [CollapseDetector(), ExactResume()]
    floor = [MinimumActivity("5%")]
    return {
        "none": [],
        type(pressing).__name__: [pressing],
        "TemperatureAnnealing, ThresholdPhases": schedules,
        "CollapseDetector, ExactResume": guards,
        "MinimumActivity": floor,
        "all": [pressing, *schedules, *guards, *floor],
    }


def measure(gate: Any, pressing: Any, batch: Any, arguments: Any) -> dict[str, float]:
    """Return step times relative to `none`, and as `ms` the step time of `none`."""
    torch.manual_seed(0)
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": arguments.hidden, "gate": gate}}
    model = GatedClassifier(net, input_shape=[3072], num_classes=10)
    compared = variants(pressing)
    if arguments.only_all:
        compared = {name: compared[name] for name in ("none", "all")}
    switch = Switch(compared, arguments.rounds, stretch(arguments.device))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator=arguments.device,
            devices=1,
            max_steps=TOTAL,
            callbacks=[*compared["all"], ModelCheckpoint(folder), switch],
            # Flush in every block. The default would flush in every second one.
            logger=CSVLogger(folder, flush_logs_every_n_steps=BLOCK),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, Repeated(batch))
    return {"ms": switch.times.seconds() * 1e3, **switch.times.ratios()}


def main() -> None:
    """Time every variant and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 512])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only-all", action="store_true", help="only compare `none` and `all`")
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
    for kind in arguments.gates:
        for pressing in (
            GatePenalty(Schedule(0.01, 0.1), "expected_macs"),
            BudgetController(0.25, begin=0, every_n_steps=BLOCK),
        ):
            measured = measure(gates[kind], pressing, batch, arguments)
            milliseconds = measured.pop("ms")
            bar = "1.05" if arguments.device == "cpu" or milliseconds >= 10 else ""
            shape = "-".join(map(str, [3072, *arguments.hidden, 10]))
            title = f"{shape}, {kind} gates, batch {arguments.batch}, {arguments.device}"
            table = Table(title=f"{title}, {milliseconds:.3f} ms per step")
            for column in ("callbacks", "ratio to none", "at most"):
                table.add_column(column, justify="left" if column == "callbacks" else "right")
            for name, ratio in measured.items():
                table.add_row(name, f"{ratio:.3f}", bar if name == "all" else "")
            Console().print(table)


if __name__ == "__main__":
    main()
