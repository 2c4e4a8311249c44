"""Draw accuracy by learning speed of gates and rewiring interval, from study tables.

dg-lightning study --config studies/time_scales_pbmc3k --output runs/time_scales_pbmc3k
dg-lightning study --config studies/time_scales_cifar10 --output runs/time_scales_cifar10
python benchmarks/time_scales.py runs/time_scales_*/results.csv --output time_scales.png
"""

import argparse
import csv
import statistics
from pathlib import Path

from matplotlib import pyplot as plt

GATES = ["slow", "usual", "fast"]
CONNECTIONS = ["often", "usual", "seldom"]
ORDERS = {
    "gates first": "gates_usual_connections_usual",
    "together": "together",
    "connections first": "connections_first",
}


def accuracies(table: Path) -> dict[str, list[float]]:
    """Return the test accuracies of each variant, in percent."""
    found: dict[str, list[float]] = {}
    for row in csv.DictReader(table.open()):
        if row["status"] == "complete":
            found.setdefault(row["variant"], []).append(100 * float(row["accuracy"]))
    return found


def main() -> None:
    """Draw a heat map for each table, and print the accuracy of each order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("time_scales.png"))
    given = parser.parse_args()
    figure, axes = plt.subplots(
        1, len(given.tables), figsize=(4.6 * len(given.tables), 3.8), squeeze=False
    )
    for axis, table in zip(axes[0], given.tables, strict=True):
        found = accuracies(table)
        names = [[f"gates_{g}_connections_{c}" for c in CONNECTIONS] for g in GATES]
        means = [[statistics.mean(found[name]) for name in row] for row in names]
        axis.imshow(means, cmap="viridis", aspect="auto")
        middle = (max(map(max, means)) + min(map(min, means))) / 2
        for i, row in enumerate(names):
            for j, name in enumerate(row):
                spread = statistics.stdev(found[name]) if len(found[name]) > 1 else 0.0
                text = f"{means[i][j]:.2f}\n± {spread:.2f}"
                colour = "black" if means[i][j] > middle else "white"
                axis.text(j, i, text, ha="center", va="center", color=colour)
        axis.set_xticks(range(3), CONNECTIONS)
        axis.set_yticks(range(3), GATES)
        with table.open() as file:
            dataset = next(csv.DictReader(file))["dataset"]
        axis.set(xlabel="connections move", ylabel="gates learn", title=f"{dataset}, accuracy in %")
        for order, name in ORDERS.items():
            values = found[name]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"{dataset}, {order}: {statistics.mean(values):.2f} ± {spread:.2f}")
    figure.tight_layout()
    figure.savefig(given.output, dpi=120)


if __name__ == "__main__":
    main()
