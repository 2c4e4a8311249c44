"""Time and memory of captured training steps against eager ones, on a CUDA device.

    python benchmarks/captured_steps.py
    python benchmarks/captured_steps.py --mnist --root data

Training runs alternate in one process, each with Lightning's Trainer and a CSV logger. Step times
are means over 1,000 steps, after 300 warm-up steps; each figure is the median of the rounds. With
`--mnist`, measure an epoch of `dg-lightning fit` including validation: the time of 12 epochs minus
that of 2, divided by 10, each in a separate process.
"""

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from alternating import Repeated
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table

from dg_lightning import GatedClassifier
from dg_lightning.callbacks import (
    BudgetController,
    CollapseDetector,
    GateMonitor,
    MinimumActivity,
    RigL,
    TemperatureAnnealing,
)

FIRST, STEPS = 300, 1000
TOTAL = 10_000  # steps of the schedules, like 60 epochs of CIFAR-10; training ends earlier
STATIC = {"kind": "static"}
LOW_RANK = {"kind": "dynamic", "network": "low_rank", "rank": 32}
NETS: dict[str, tuple[list[int], dict[str, Any], float]] = {  # sizes, gates, bar in ms
    "3072-1024-512-10, static gates": ([3072, 1024, 512], STATIC, 0.7),
    "784-256-10, static gates": ([784, 256], STATIC, 0.4),
    "3072-1024-512-10, GateNets": ([3072, 1024, 512], LOW_RANK, 0.9),
}


class Clock(pl.Callback):
    """Times the steps of a training run after the warm-up."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Read the clock when the device has finished."""
        if trainer.global_step == FIRST:
            torch.cuda.synchronize()
            self.start = time.perf_counter()
        elif trainer.global_step == FIRST + STEPS:
            torch.cuda.synchronize()
            self.ms = (time.perf_counter() - self.start) / STEPS * 1e3
            trainer.should_stop = True


def every_callback() -> list[Any]:
    """Return the callbacks of a fused training run, with a penalty from the first step."""
    return [
        BudgetController(0.25, begin=0, until="90%", freeze_at="95%"),
        TemperatureAnnealing(),
        MinimumActivity("5%"),
        CollapseDetector(),
        GateMonitor(),
        RigL(0.9),
    ]


def step_time(sizes: list[int], gate: Any, capture: bool) -> tuple[float, float]:
    """Return the milliseconds per step and the peak memory in MiB."""
    torch.manual_seed(0)
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": sizes[1:], "gate": gate}}
    adam: Any = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "fused": True}}
    model = GatedClassifier(net, [sizes[0]], 10, optimizer=adam, cuda_graphs=capture)
    batch = (torch.randn(256, sizes[0]).cuda(), torch.randint(10, (256,)).cuda())
    clock = Clock()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cuda",
            devices=1,
            max_steps=TOTAL,
            callbacks=[*(every_callback() if gate else []), clock],
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, Repeated(batch))
    return clock.ms, torch.cuda.max_memory_reserved() / 2**20


def steps(rounds: int) -> Table:
    """Measure every net, dense and gated, eager and captured."""
    table = Table(title=f"{torch.cuda.get_device_name()}, batch 256, every callback")
    for column in ("net", "training", "ms per step", "MiB", "dense over it", "at most (ms)"):
        table.add_column(column, justify="left" if column in ("net", "training") else "right")
    for name, (sizes, gate, bar) in NETS.items():
        kinds = {
            "dense": (None, False),
            "gated": (gate, False),
            "dense, captured": (None, True),
            "gated, captured": (gate, True),
        }
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, (gates, capture) in kinds.items():
                found[kind].append(step_time(sizes, gates, capture))
        ms = {kind: statistics.median(one for one, _ in runs) for kind, runs in found.items()}
        for kind, runs in found.items():
            memory = statistics.median(mib for _, mib in runs)
            limit = f"{bar}" if kind == "gated, captured" else ""
            ratio = f"{ms['dense'] / ms[kind]:.2f}"
            table.add_row(name, kind, f"{ms[kind]:.3f}", f"{memory:,.0f}", ratio, limit)
    return table


def mnist_epoch(root: str, options: list[str]) -> float:
    """Return the seconds of an epoch of `dg-lightning fit`."""
    took = {}
    for epochs in (2, 12):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "dg_lightning", "fit", "--config=mnist/dynamicgate"]
            command += [f"--data.root={root}", f"--trainer.max_epochs={epochs}", *options]
            command += ["--trainer.enable_progress_bar=false"]
            command += [f"--trainer.logger.save_dir={folder}"]
            start = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True)
            took[epochs] = time.perf_counter() - start
    return (took[12] - took[2]) / 10


def epochs(root: str, rounds: int) -> Table:
    """Measure epochs of MNIST."""
    never, capture = "--data.device_cache=never", "--model.cuda_graphs=true"
    ways = {"ordinary": [never], "data on the device": [], "and captured": [capture]}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, options in ways.items():
            found[way].append(mnist_epoch(root, options))
    table = Table("MNIST 784-256-10, static gates", "s per epoch", "ordinary over it (bar: 4)")
    usual = statistics.median(found["ordinary"])
    for way, times in found.items():
        median = statistics.median(times)
        table.add_row(way, f"{median:.3f}", f"{usual / median:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mnist", action="store_true")
    parser.add_argument("--root", default="data")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    made = epochs(arguments.root, arguments.rounds) if arguments.mnist else steps(arguments.rounds)
    Console(width=110).print(made)


if __name__ == "__main__":
    main()
