"""Accuracy of sparse training methods over several seeds.

    python benchmarks/sparse_training.py --root DIR
    python benchmarks/sparse_training.py --root DIR --fused

By default, compares fixed and rewired connections at two sparsities (ERK) on MNIST and CIFAR-10.
With --fused, compares the combination of gates and sparse connections with each alone on PBMC3k.
The combination uses the paper's growth rule and the gate-aware rules, for static gates and for
GateNets (low rank, with a budget of 15 % of the dense MACs; the GateNets alone use 5.75 %). Trains
and tests the shipped configs with these changes.
"""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from _runs import figure, run
from rich.console import Console
from rich.table import Table


def set_sparsity(sparsity: float | None, interval: int | None, config: dict[str, Any]) -> None:
    """Set the sparsity and the update interval."""
    callback = config["trainer"]["callbacks"][-1]
    if sparsity is not None:
        callback["init_args"]["sparsity"] = sparsity
    if interval is not None and "every_n_steps" in callback["init_args"]:
        callback["init_args"]["every_n_steps"] = interval


def set_gate_awareness(value: str, nets: bool, config: dict[str, Any]) -> None:
    """Set RigL's `gate_aware` option, and optionally use GateNets."""
    if nets:
        set_gate_nets(config)
    (rigl,) = [c for c in config["trainer"]["callbacks"] if c["class_path"].endswith("RigL")]
    rigl["init_args"]["gate_aware"] = value


def set_gate_nets(config: dict[str, Any]) -> None:
    """Replace static gates with GateNets."""
    gate = config["model"]["init_args"]["net"]["init_args"]["gate"]
    gate |= {"kind": "dynamic", "network": "low_rank", "rank": 32}
    (controller,) = [c for c in config["trainer"]["callbacks"] if "Budget" in c["class_path"]]
    controller["init_args"]["budget"] = 0.15


def keep(config: dict[str, Any]) -> None:
    """Change nothing."""


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=os.environ.get("DG_DATA", "data"))
    parser.add_argument("--datasets", nargs="+", default=["mnist", "cifar10"])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.95])
    parser.add_argument("--interval", type=int, help="optimizer steps between updates")
    parser.add_argument("--fused", action="store_true", help="gates and connections, on PBMC3k")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="passed to the program")
    arguments = parser.parse_args()
    options = [f"--data.root={arguments.root}", *arguments.option]
    wanted: list[tuple[str, str, Any]] = []
    if arguments.fused:
        wanted += [(v, f"pbmc3k/{v}", keep) for v in ("baseline", "dynamicgate", "rigl")]
        wanted.append(("GateNets", "pbmc3k/dynamicgate", set_gate_nets))
        for nets in (False, True):
            for rule in ("no", "grow", "drop_and_grow"):
                change = partial(set_gate_awareness, rule, nets)
                name = f"fused{', GateNets' if nets else ''}, {rule}"
                wanted.append((name, "pbmc3k/dynamicgate_rigl", change))
    else:
        for dataset in arguments.datasets:
            wanted.append(("dense", f"{dataset}/baseline", keep))
            for sparsity in arguments.sparsities:
                for variant in ("static_sparse", "set", "rigl"):
                    change = partial(set_sparsity, sparsity, arguments.interval)
                    wanted.append((f"{variant} {sparsity:.0%}", f"{dataset}/{variant}", change))
    table = Table(title=f"{arguments.seeds} seeds, mean ± standard deviation")
    for column in ("config", "variant", "val accuracy", "test accuracy", "MACs of dense"):
        table.add_column(column, justify="left" if column in ("config", "variant") else "right")
    with ThreadPoolExecutor(arguments.processes) as pool:
        jobs = [
            [pool.submit(run, config, s, options, change) for s in range(arguments.seeds)]
            for _, config, change in wanted
        ]
        for (variant, config, _), runs in zip(wanted, jobs, strict=True):
            results = [job.result() for job in runs]
            cells = [figure([r[f"{part}/accuracy"] for r in results]) for part in ("val", "test")]
            cells.append(figure([r["compute/macs"] / r["compute/macs_dense"] for r in results]))
            table.add_row(config, variant, *cells)
            print(config, variant, *cells, sep=" | ", flush=True)  # the table is printed at the end
    Console().print(table)


if __name__ == "__main__":
    main()
