"""Train and compare a gated MLP and its dense baseline on the digits, using the command line."""

import csv
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

RUNS = Path("runs/demo")


def run(*arguments: str) -> None:
    """Run the program as a user would."""
    subprocess.run([sys.executable, "-m", "dg_lightning", *arguments], check=True)


def train_and_test(variant: str) -> dict[str, float]:
    """Fit and test a variant; return its test metrics."""
    options = ["--config", f"digits/{variant}", "--trainer.logger.save_dir", str(RUNS)]
    run("fit", *options)
    run("test", *options)
    newest = max((RUNS / "digits" / variant).glob("version_*/metrics.csv"), key=_modified)
    with newest.open() as file:
        (row,) = csv.DictReader(file)
    return {key: float(value) for key, value in row.items()}


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def main() -> None:
    """Print one line per variant."""
    start = time.perf_counter()
    table = Table(title="Digits, test set, hard gates")
    for column in ("variant", "accuracy", "executed MACs", "of dense", "open hidden units"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for variant in ("baseline", "dynamicgate"):
        metrics = train_and_test(variant)
        macs, dense = metrics["compute/macs"], metrics["compute/macs_dense"]
        table.add_row(
            variant,
            f"{metrics['test/accuracy']:.2%}",
            f"{macs:,.0f}",
            f"{macs / dense:.1%}",
            f"{metrics['compute/proxy_g']:.1%}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{time.perf_counter() - start:.0f} s; configs, logs and checkpoints are in {RUNS}"
    )


if __name__ == "__main__":
    main()
