"""Duration of an MNIST epoch: the complete program against hand-written training loops.

    python benchmarks/training_time.py --root data

Ours is `dg-lightning fit --config mnist/dynamicgate --model.optimizer.fused=true` with all gate
callbacks active from the first step, a CSV logger, and checkpoints that are written after an epoch
and not timed. It runs the first epochs of the config's schedule in this process. The usual loop is
a torchvision dataset with per-sample transforms, a DataLoader (0 or 2 workers, whichever is
faster), the same gated net, and a penalty on mean p. The raw loop indexes image tensors, never
synchronises on a value, and uses a fused optimizer. All use 54,000 images in batches of 128. Epochs
are timed alternately without validation, and the medians of the ratios are compared.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from typing_extensions import override

from dg_lightning import GatedMLP, gate_layers
from dg_lightning.cli.program import run_command
from dg_lightning.datamodules import MNISTDataModule
from dg_lightning.gates import GateSettings

BATCH = 128
LAMBDA = 1e-3
FEWEST, MOST = 3.0, 1.5  # limits: usual loop / ours, ours / raw loop
GATE: GateSettings = {"kind": "static", "initial_open_rate": 0.8, "min_open": "2%"}
# In addition to CollapseDetector, ExactResume and BudgetController of the config.
MORE = [
    "dg_lightning.callbacks.TemperatureAnnealing",
    "dg_lightning.callbacks.ThresholdPhases",
    "dg_lightning.callbacks.MinimumActivity",
]


class Lap(pl.Callback):
    """Runs the other loops between epochs and times its own epochs."""

    def __init__(self, between: Callable[[], None], rounds: int) -> None:
        self.between, self.rounds = between, rounds
        self.seconds: list[float] = []

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.between()
        self.start = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        trainer.should_stop = len(self.seconds) == self.rounds


def gated_net(fused: bool) -> tuple[GatedMLP, torch.optim.Optimizer]:
    net = GatedMLP(784, [256], 10, gate=GATE, input_gate=GATE)
    return net, torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused)


def usual_epoch(loader: DataLoader[tuple[Tensor, Tensor]]) -> float:
    """Train as most scripts do: batches from a DataLoader, and the loss summed for logging."""
    net, optimizer = gated_net(fused=False)
    criterion = nn.CrossEntropyLoss()
    start, total = time.perf_counter(), 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(net(images), labels)
        for gate in gate_layers(net).values():
            assert gate.probability is not None
            loss = loss + LAMBDA * gate.probability.mean()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(images)
    return time.perf_counter() - start


def raw_epoch(images: Tensor, labels: Tensor) -> float:
    """Train on tensors with the least possible overhead."""
    net, optimizer = gated_net(fused=True)
    gates = list(gate_layers(net).values())
    start = time.perf_counter()
    for batch in torch.randperm(len(images)).split(BATCH):
        loss = F.cross_entropy(net(images[batch]), labels[batch])
        for gate in gates:
            assert gate.probability is not None
            loss = loss + LAMBDA * gate.probability.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - start


def usual_loader(root: str, samples: int, workers: int) -> DataLoader[tuple[Tensor, Tensor]]:
    from torchvision import datasets, transforms

    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    dataset = datasets.MNIST(root, train=True, download=True, transform=transforms.Compose(steps))
    part = Subset(dataset, range(samples))
    return DataLoader(part, batch_size=BATCH, shuffle=True, num_workers=workers)


def epochs(root: str, rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Run all loops alternately; yield the seconds of each."""
    data = MNISTDataModule(root=root, batch_size=60_000)  # all images in one batch
    data.prepare_data()
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    usual = {n: usual_loader(root, len(images), n) for n in (0, 2)}
    loops: dict[str, Callable[[], float]] = {
        "usual, 0 workers": partial(usual_epoch, usual[0]),
        "usual, 2 workers": partial(usual_epoch, usual[2]),
        "raw tensors": partial(raw_epoch, images.clone(), labels.clone()),
    }
    taken: dict[str, list[float]] = {name: [] for name in loops}

    def others() -> None:
        for name, loop in loops.items():
            taken[name].append(loop())

    lap = Lap(others, rounds)
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--trainer.callbacks+={name}" for name in MORE]
        run_command(
            [
                *["fit", "--config=mnist/dynamicgate", f"--data.root={root}"],
                *["--trainer.accelerator=cpu", "--trainer.callbacks.begin=0%"],
                *[
                    "--model.optimizer.fused=true",
                    "--trainer.limit_val_batches=0",
                    "--trainer.enable_progress_bar=false",
                ],
                *[f"--trainer.default_root_dir={folder}", f"--trainer.logger.save_dir={folder}"],
                *options,
            ],
            [lap],
        )
    yield "dg-lightning fit", lap.seconds
    yield from taken.items()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="data")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    # Set here, as the program does at startup, because existing threads do not inherit it.
    torch.set_flush_denormal(True)
    # The first epoch includes one-time costs.
    taken = {name: times[1:] for name, times in epochs(arguments.root, arguments.rounds)}
    ours = taken["dg-lightning fit"]
    ratios = {
        # Ratios of consecutive epochs, so that noise affects both.
        name: statistics.median(a / b for a, b in zip(times, ours, strict=True))
        for name, times in taken.items()
    }
    table = Table(title="One epoch of MNIST, 54,000 images, batches of 128, median")
    for column in ("loop", "seconds", "of ours"):
        table.add_column(column, justify="left" if column == "loop" else "right")
    for name, times in taken.items():
        table.add_row(name, f"{statistics.median(times):.2f}", f"{ratios[name]:.2f}")
    Console().print(table)
    usual = min(ratio for name, ratio in ratios.items() if name.startswith("usual"))
    print(f"{usual:.2f} times faster than the usual loop (bar: at least {FEWEST})")
    print(f"{1 / ratios['raw tensors']:.2f} times the raw loop (bar: at most {MOST})")


if __name__ == "__main__":
    main()
