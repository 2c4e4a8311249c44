"""Accuracy of BudgetController: executed MACs against the budget, over datasets and seeds.

    python benchmarks/budget_controller.py --root DIR

Trains and tests the config <dataset>/dynamicgate for every budget and seed. MACs are a share of
the dense MACs, measured by the compute ledger on the test set; accuracy is reported for validation
and test.
"""

import argparse
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from _runs import figure, run
from rich.console import Console
from rich.table import Table


def run_with(dataset: str, budget: float | None, seed: int, options: list[str]) -> dict[str, float]:
    """Train and test with a budget, or the dense baseline if it is None."""

    def set_budget(config: dict[str, Any]) -> None:
        if budget is not None:
            controller = config["trainer"]["callbacks"][-1]
            assert controller["class_path"].endswith("BudgetController")
            controller["init_args"]["budget"] = budget

    variant = "baseline" if budget is None else "dynamicgate"
    return run(f"{dataset}/{variant}", seed, options, set_budget)


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=os.environ.get("DG_DATA", "data"))
    parser.add_argument("--datasets", nargs="+", default=["mnist", "cifar10", "pbmc3k"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25, 0.1])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="passed to the program")
    arguments = parser.parse_args()
    options = [f"--data.root={arguments.root}", *arguments.option]
    table = Table(title=f"BudgetController, {arguments.seeds} seeds, mean ± standard deviation")
    for column in ("dataset", "budget", "MACs of dense", "off by", "val accuracy", "test accuracy"):
        table.add_column(column, justify="left" if column == "dataset" else "right")
    with ThreadPoolExecutor(arguments.processes) as pool:
        for dataset in arguments.datasets:
            jobs = {
                budget: [
                    pool.submit(run_with, dataset, budget, seed, options)
                    for seed in range(arguments.seeds)
                ]
                for budget in (None, *arguments.budgets)
            }
            for budget, runs in jobs.items():
                results = [job.result() for job in runs]
                macs = [r["compute/macs"] / r["compute/macs_dense"] for r in results]
                cells = [figure(macs)]
                cells += ["" if budget is None else f"{statistics.mean(macs) / budget - 1:+.2%}"]
                for key in ("val/accuracy", "test/accuracy"):
                    cells.append(figure([r[key] for r in results]))
                table.add_row(dataset, "dense" if budget is None else f"{budget:.0%}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
