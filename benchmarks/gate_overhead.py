"""Overhead of gates: time of a training step against that of the dense net.

    python benchmarks/gate_overhead.py

A step consists of forward, loss, backward and optimizer. Variants are timed alternately, so that
noise affects all of them, and compared by their medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from dg_lightning import GatedMLP

VARIANTS: dict[str, tuple[Any, float | None]] = {
    "dense": (None, None),
    "static": ({"kind": "static"}, 1.15),
    "dynamic, low-rank 32": ({"kind": "dynamic", "network": "low_rank", "rank": 32}, 1.35),
    "dynamic, linear": ({"kind": "dynamic", "network": "linear"}, None),
    "static, top-k 50 %": ({"kind": "static", "policy": "top_k", "k": "50%"}, None),
    "dynamic, low-rank, top-k 50 %": (
        {"kind": "dynamic", "network": "low_rank", "policy": "top_k", "k": "50%"},
        None,
    ),
    "static, bernoulli": ({"kind": "static", "policy": "bernoulli"}, None),
}


def training_step(gate: Any, batch: int, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    net = GatedMLP(3072, [1024, 512], 10, gate=gate).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.randn(batch, 3072, device=device)
    y = torch.randint(10, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    """Time every variant and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    steps = {
        name: training_step(gate, arguments.batch, arguments.device)
        for name, (gate, _) in VARIANTS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.rounds + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 3:  # warm-up
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    setting = f"batch {arguments.batch}, {arguments.device}"
    table = Table(title=f"Training step, 3072-1024-512-10, {setting}")
    for column in ("gates", "median ms", "ratio to dense", "at most"):
        table.add_column(column, justify="left" if column == "gates" else "right")
    for name, median in medians.items():
        bar = VARIANTS[name][1]
        ratio = median / medians["dense"]
        table.add_row(name, f"{median * 1e3:.2f}", f"{ratio:.3f}", "" if bar is None else str(bar))
    Console().print(table)


if __name__ == "__main__":
    main()
