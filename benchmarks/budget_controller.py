"""How well BudgetController hits a budget: executed MACs over seeds, on several datasets.

    python benchmarks/budget_controller.py --root DIR

Trains the config <dataset>/dynamicgate for every budget and seed, and tests it. MACs are those of
the test part, from the compute ledger, as a share of the dense ones; accuracy is of the validation
and of the test part.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table


def run(dataset: str, budget: float | None, seed: int, options: list[str]) -> dict[str, float]:
    """Train and test in a process of its own; return what it logged last."""
    with tempfile.TemporaryDirectory() as folder:
        variant = "baseline" if budget is None else "dynamicgate"
        shipped = files("dg_lightning.configs").joinpath(f"{dataset}/{variant}.yaml")
        config = yaml.safe_load(shipped.read_text())
        config["seed_everything"] = seed
        config["trainer"]["logger"]["init_args"]["save_dir"] = folder
        if budget is not None:
            controller = config["trainer"]["callbacks"][-1]
            assert controller["class_path"].endswith("BudgetController")
            controller["init_args"]["budget"] = budget
        path = Path(folder, "config.yaml")
        path.write_text(yaml.safe_dump(config))
        options = [f"--config={path}", "--trainer.enable_progress_bar=false", *options]
        for name in ("fit", "test"):
            command = [sys.executable, "-m", "dg_lightning", name, *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        last: dict[str, float] = {}
        logs = sorted(Path(folder).rglob("metrics.csv"), key=lambda log: log.stat().st_mtime)
        for log in logs:
            for row in csv.DictReader(log.open()):
                last |= {key: float(value) for key, value in row.items() if value}
        return last


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=os.environ.get("DG_DATA", "data"))
    parser.add_argument("--datasets", nargs="+", default=["mnist", "cifar10", "pbmc3k"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25, 0.1])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="passed on to the program")
    arguments = parser.parse_args()
    options = [f"--data.root={arguments.root}", *arguments.option]
    table = Table(title=f"BudgetController, {arguments.seeds} seeds, mean ± standard deviation")
    for column in ("dataset", "budget", "MACs of dense", "off by", "val accuracy", "test accuracy"):
        table.add_column(column, justify="left" if column == "dataset" else "right")
    with ThreadPoolExecutor(arguments.processes) as pool:
        for dataset in arguments.datasets:
            jobs = {
                budget: [
                    pool.submit(run, dataset, budget, seed, options)
                    for seed in range(arguments.seeds)
                ]
                for budget in (None, *arguments.budgets)
            }
            for budget, runs in jobs.items():
                results = [job.result() for job in runs]
                macs = [r["compute/macs"] / r["compute/macs_dense"] for r in results]
                cells = [_figure(macs)]
                cells += ["" if budget is None else f"{statistics.mean(macs) / budget - 1:+.2%}"]
                for key in ("val/accuracy", "test/accuracy"):
                    cells.append(_figure([r[key] for r in results]))
                table.add_row(dataset, "dense" if budget is None else f"{budget:.0%}", *cells)
    Console().print(table)


def _figure(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2%} ± {spread:.2%}"


if __name__ == "__main__":
    main()
