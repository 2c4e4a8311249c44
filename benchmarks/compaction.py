"""Real speed-up of static gates compared with the saved MACs, and speed of exported nets.

    python benchmarks/compaction.py
    python benchmarks/compaction.py runs/mnist runs/pbmc3k

Without arguments: a 2048-8192-2048 net on a CPU with a quarter of its hidden units open, compact
against dense. With folders: every `last.ckpt` below them is made compact and timed against the
`baseline` of its dataset (or the same net without gates), on the data of its config if available.
Nets whose gates depend on the input have a second row, with frozen gates. Variants are measured
alternately and compared by their medians.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_nets import predicted_speed_up, random_net
from rich.console import Console
from rich.table import Table
from torch import nn

from dg_lightning import compact, gate_layers
from dg_lightning.cli.runs import batches, load_data, load_inputs, load_net, scores
from dg_lightning.runtime.timing import median_seconds
from dg_lightning.surgery import freeze_gates
from dg_lightning.surgery.gating import without_gates

LEAST = 0.9  # required share of the predicted speed-up
BATCHES = (1, 32, 1024)


def wide(rounds: int) -> Table:
    """Measure the wide net."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    net = random_net(
        [2048, 8192, 2048], 0.25, dynamic=False, block_size=1, device=cpu, dtype=torch.float32
    )
    dense = nn.Sequential(net.hidden[0].linear, nn.ReLU(), net.output)  # type: ignore[arg-type]
    small = compact(net).model
    table = Table(title="2048-8192-2048, 25% of the hidden units open, CPU")
    for column in ("batch", "dense ms", "compact ms", "speed-up", "predicted", "realised", "bar"):
        table.add_column(column, justify="right")
    for batch in (1, 256):
        x = torch.randn(batch, 2048)
        with torch.inference_mode():
            runs = {"dense": partial(dense, x), "compact": partial(small, x)}
            taken = median_seconds(runs, cpu, rounds)
        gain, expected = taken["dense"] / taken["compact"], predicted_speed_up(net, x)
        cells = [f"{taken[way] * 1e3:.3f}" for way in ("dense", "compact")]
        shown = f"{gain / expected:.0%}"
        table.add_row(
            str(batch), *cells, f"{gain:.2f}", f"{expected:.2f}", shown, f">= {LEAST:.0%}"
        )
    return table


def studies(folders: list[Path], rounds: int) -> Table:
    """Measure checkpoints of trained nets."""
    table = Table(title="Exported nets against their dense baselines, CPU")
    for column in ("net", "accuracy", "predicted", *(f"batch {batch}" for batch in BATCHES)):
        table.add_column(column, justify="left" if column == "net" else "right")
    paths = sorted(path for folder in folders for path in folder.rglob("last.ckpt"))
    for path in paths:
        variant, dataset = path.parents[2].name, path.parents[3].name
        net, data = load_net(str(path)), load_data(str(path), None)
        baseline = sorted((path.parents[3] / "baseline").rglob("last.ckpt"))
        dense = load_net(str(baseline[-1])) if baseline else without_gates(net)
        gates = list(gate_layers(net, required=False).values())
        nets: dict[str, Any] = {f"{dataset}/{variant}": net}
        if data is not None and any(gate.input_dependent for gate in gates):
            seen = (x for x, _ in batches(data, "validate"))
            nets[f"{dataset}/{variant}, frozen"] = freeze_gates(net, seen)
        inputs = load_inputs(str(path), max(BATCHES))
        for name, meant in nets.items():
            ours = compact(meant, inputs[:8]).model if gates else meant
            cells = []
            for batch in BATCHES:
                x = inputs[:batch].contiguous()
                with torch.inference_mode():
                    runs = {"dense": partial(dense, x), "ours": partial(ours, x)}
                    taken = median_seconds(runs, x.device, rounds)
                cells.append(f"{taken['dense'] / taken['ours']:.2f}")
            tested = [] if data is None else scores([ours], batches(data, "test"))[1]
            right = "".join(f"{share:.2%}" for share in tested)
            table.add_row(name, right, f"{predicted_speed_up(meant, inputs):.2f}", *cells)
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    given = arguments.folders
    table = studies(given, arguments.rounds) if given else wide(arguments.rounds)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
