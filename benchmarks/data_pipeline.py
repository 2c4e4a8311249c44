"""Data loading speed: an epoch of our loaders against per-sample loading, in one run.

    python benchmarks/data_pipeline.py --root data

The ordinary route is a torchvision or torchaudio dataset with transforms that give the same values,
and a torch `DataLoader` with 0 or 2 workers, whichever is faster. An epoch covers all training
samples in shuffled batches. The first epoch of both routes starts from the files on disk; ours
decodes them and writes its cache. Routes are measured alternately, each in a separate process. Peak
memory is that of the process plus its largest worker.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from dg_lightning import datamodules

BARS = {"MNIST": 5.0, "CIFAR10": 5.0, "SpeechCommands": 10.0}
BATCH = {"MNIST": 128, "CIFAR10": 128, "SpeechCommands": 256}


def ours(name: str, root: str, cache: str) -> Callable[[], Iterable[Any]]:
    options: dict[str, Any] = {"root": root, "cache_dir": cache, "batch_size": BATCH[name]}
    if name == "SpeechCommands":
        options["silence"] = 0  # the ordinary route has no silent clips
    data = getattr(datamodules, f"{name}DataModule")(**options)
    data.prepare_data()
    data.setup("fit")
    # The ordinary route has no validation split: load both, for the same number of samples.
    loaders = [data.train_dataloader()] + [data.val_dataloader()] * (name != "SpeechCommands")
    return lambda: (batch for loader in loaders for batch in loader)


class SpokenWords(Dataset[Any]):
    """Clips listed by torchaudio, read and transformed one at a time."""

    def __init__(self, root: str) -> None:
        from torchaudio.datasets import SPEECHCOMMANDS
        from torchaudio.transforms import AmplitudeToDB, MelSpectrogram

        self.clips = SPEECHCOMMANDS(root, subset="training")
        self.root = Path(root) / "SpeechCommands"
        self.mel = MelSpectrogram(16_000, n_fft=512, win_length=400, hop_length=320, n_mels=40)
        self.decibel = AmplitudeToDB("power")

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Any:
        import soundfile

        path, _, word, *_ = self.clips.get_metadata(index)
        samples, _ = soundfile.read(self.root / path, dtype="float32")
        wave = torch.zeros(12_800)
        wave[: len(samples)] = torch.from_numpy(samples)[:12_800]
        features = self.decibel(self.mel(wave))
        return (features - features.mean()) / (features.std() + 1e-5), len(word)


def ordinary(name: str, root: str, workers: int) -> Callable[[], Iterable[Any]]:
    dataset: Any
    if name == "SpeechCommands":
        dataset = SpokenWords(root)
    else:
        from torchvision import datasets, transforms

        if name == "MNIST":
            steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
        else:
            steps = [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
            ]
        dataset = getattr(datasets, name)(root, train=True, transform=transforms.Compose(steps))
    loader = DataLoader(
        dataset,
        batch_size=BATCH[name],
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: loader


def measure(route: str, name: str, root: str, cache: str, epochs: int) -> dict[str, Any]:
    """Time the epochs of a route; the first one starts from the files."""
    for package in ("sklearn.model_selection", "soundfile", "torchaudio", "torchvision"):
        import_module(package)  # do not measure imports
    times, samples = [], 0
    start = time.perf_counter()
    if route == "ours":
        epoch = ours(name, root, cache)
    else:
        epoch = ordinary(name, root, int(route.split()[1]))
    for _ in range(epochs):
        samples = sum(len(labels) for _, labels in epoch())
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak = sum(resource.getrusage(of).ru_maxrss for of in who) / 1024
    return {"times": times, "samples": samples, "peak": peak}


def main() -> None:
    """Measure the routes alternately in separate processes, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--datasets", nargs="+", default=list(BARS))
    parser.add_argument("--measure", nargs=3, help="internal: route, dataset, cache")
    arguments = parser.parse_args()
    if arguments.measure:
        route, name, cache = arguments.measure
        print(json.dumps(measure(route, name, arguments.root, cache, arguments.epochs)))
        return
    table = Table(
        "dataset", "samples", "route", "first epoch", "later epochs", "peak memory", title="seconds"
    )
    verdicts = []
    for name in arguments.datasets:
        routes = ("ours", "workers 0", "workers 2")
        found: dict[str, list[dict[str, Any]]] = {route: [] for route in routes}
        for _ in range(arguments.rounds):
            for route in routes:
                with tempfile.TemporaryDirectory() as cache:
                    command = [sys.executable, __file__, "--root", arguments.root]
                    command += ["--epochs", str(arguments.epochs), "--measure", route, name, cache]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[route].append(json.loads(done.stdout.splitlines()[-1]))
        first, later = {}, {}
        for route, runs in found.items():
            first[route] = statistics.median(run["times"][0] for run in runs)
            later[route] = statistics.median(t for run in runs for t in run["times"][1:])
            peak = statistics.median(run["peak"] for run in runs)
            columns = [f"{runs[0]['samples']:,}", route, f"{first[route]:.2f}"]
            table.add_row(name, *columns, f"{later[route]:.3f}", f"{peak:,.0f} MiB")
        best = min(routes[1:], key=later.__getitem__)
        speedup = later[best] / later["ours"]
        start = min(first[route] for route in routes[1:]) / first["ours"]
        verdicts.append(
            f"{name}: {speedup:.1f} times faster after the first epoch (bar: {BARS[name]:.0f}), "
            f"{start:.2f} times in the first one (bar: 1)"
        )
    console = Console()
    console.print(table)
    for verdict in verdicts:
        console.print(verdict)


if __name__ == "__main__":
    main()
