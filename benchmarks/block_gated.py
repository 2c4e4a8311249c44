"""Speed-up over the dense net when only the open blocks of each sample are computed.

    python benchmarks/block_gated.py
    python benchmarks/block_gated.py --device cuda

The net is a feed-forward d-H-d whose linear gate opens a quarter of the blocks, different ones for
each sample. Gate and routing are included. Dense is two linear layers with a ReLU in between,
without gates. Variants are measured alternately and compared by their medians.

CPUs use float32, GPUs bfloat16. On a GPU, `graph` is the net captured as a CUDA graph, and dense is
the faster of eager and captured. A training step is forward and backward, for inputs and all
parameters, with the gate in evaluation mode.
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from random_nets import random_net
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dg_lightning import GatedMLP
from dg_lightning.runtime import lay_out_by_unit, skip_closed_blocks
from dg_lightning.runtime.timing import median_seconds

OPEN = 0.25
LEAST = 0.05  # seconds per measurement, so that work is queued as in a real loop


class Case(NamedTuple):
    """A net, a batch and the required speed-ups."""

    batch: int
    width: int
    hidden: int
    block: int
    least: float | None  # forward speed-up over dense
    least_training: float | None = None


CPU = [
    Case(2048, 1024, 4096, 256, 3.2),
    Case(256, 1024, 4096, 256, 2.4),
    Case(1, 2048, 8192, 64, 2.0),
]
CUDA = [
    Case(8192, 4096, 16384, 256, 1.8),
    Case(8192, 4096, 16384, 512, 2.3),
    Case(8192, 4096, 16384, 1024, 2.9, 2.4),
    Case(32768, 1024, 4096, 256, None),
    Case(32768, 1024, 4096, 512, 2.0, None),
    Case(32768, 1024, 4096, 1024, 2.0, None),
    Case(8192, 1024, 4096, 256, 1.0),
    Case(8192, 1024, 4096, 512, 1.0),
]


def captured(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    """Capture a net as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x)
    return graph.replay


@torch.no_grad()
def forward_times(net: GatedMLP, dense: nn.Module, x: Tensor, rounds: int) -> dict[str, float]:
    fast = copy.deepcopy(net)
    if not x.is_cuda:
        lay_out_by_unit(fast)
    skip_closed_blocks(fast)
    runs: dict[str, Callable[[], object]] = {
        "dense": lambda: dense(x),
        "masked": lambda: net(x),
        "ours": lambda: fast(x),
    }
    if x.is_cuda:
        triton = copy.deepcopy(net)
        skip_closed_blocks(triton, "triton")
        runs |= {"dense graph": captured(dense, x), "graph": captured(triton, x)}
    return median_seconds(runs, x.device, rounds, LEAST)


def training_times(net: GatedMLP, dense: nn.Module, x: Tensor, rounds: int) -> dict[str, float]:
    fast = copy.deepcopy(net)
    if not x.is_cuda:
        lay_out_by_unit(fast)
    skip_closed_blocks(fast)
    x = x.detach().requires_grad_()
    gradient = torch.randn_like(x)

    def step(run: nn.Module) -> Callable[[], None]:
        def go() -> None:
            x.grad = None
            run.zero_grad(set_to_none=True)
            run(x).backward(gradient)

        return go

    runs = {"dense": step(dense), "masked": step(net), "ours": step(fast)}
    return median_seconds(runs, x.device, rounds, LEAST)


@torch.no_grad()
def open_exactly(share: float, gate: Any, x: Tensor) -> float:
    """Shift a gate until this batch opens the given share of blocks; return the actual share.

    A single sample may deviate: with a quarter open on average, it may open a third.
    """
    edge = torch.quantile(gate.logits(x).float().flatten(), 1 - share)
    gate.shift_bias(-float(edge))
    return float((gate.decide(x) != 0).float().mean())


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    table = Table(title=f"{OPEN:.0%} of the blocks open, {str(dtype).removeprefix('torch.')}")
    columns = ["batch", "d", "H", "block", "open", "dense ms", "masked", "ours", "graph", "bar"]
    for column in ["what", *columns]:
        table.add_column(column, justify="right")
    for case in CPU if device.type == "cpu" else CUDA:
        net = random_net(
            [case.width, case.hidden, case.width],
            OPEN,
            dynamic=True,
            block_size=case.block,
            device=device,
            dtype=dtype,
        )
        layer: Any = net.hidden[0]
        dense = nn.Sequential(layer.linear, nn.ReLU(), net.output)
        x = torch.randn(case.batch, case.width, device=device, dtype=dtype)
        share = open_exactly(OPEN, layer.gate, x)
        measured = {"forward": forward_times(net, dense, x, arguments.rounds)}
        measured["training"] = training_times(net, dense, x, max(arguments.rounds // 2, 3))
        for what, taken in measured.items():
            best = min(taken["dense"], taken.get("dense graph", float("inf")))
            bar = case.least if what == "forward" else case.least_training
            cells = [f"{best / taken[way]:.2f}" if way in taken else "" for way in columns[6:9]]
            sizes = [f"{size:,}" for size in case[:4]]
            shown = "" if bar is None else f">= {bar}"
            timed = [f"{share:.1%}", f"{best * 1e3:.3f}", *cells, shown]
            table.add_row(what, *sizes, *timed)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
