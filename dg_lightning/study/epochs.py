"""How the runs of a study went, epoch by epoch: one file for plots, and the paper's MoE table."""

import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["epoch_rows", "epochs_markdown"]

# The columns of the paper's comparison with a mixture of experts (section 5.5).
_TABLE = {
    "acc": "val/accuracy",
    "loss": "train/loss",
    "main": "train/task_loss",
    "aux": "train/aux_loss",
    "dropped": "routing/dropped",
    "active": "gates/active_ratio",
    "corr(h, a)": "gates/hardness_correlation",
    "entropy": "routing/entropy",
    "cv": "routing/cv",
    "MI": "routing/mutual_information",
    "cap": "routing/capacity",
}


def epoch_rows(metrics: Path) -> list[dict[str, Any]]:
    """Return what a run has logged, an epoch a row; of values of steps, the mean of an epoch.

    What a test has logged is left out.
    """
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with metrics.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line.get("test/accuracy"):
                continue
            for key, value in line.items():
                if value and key not in ("epoch", "step"):
                    found[int(line["epoch"])][key].append(float(value))
    return [
        {"epoch": epoch, **{key: statistics.fmean(values) for key, values in keys.items()}}
        for epoch, keys in sorted(found.items())
    ]


def epochs_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the paper's table, mean over seeds, of variants whose activity was followed.

    Accuracy is of the validation part. Values of several routers or seeds are averaged.
    """
    parts = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        if not any("gates/active_ratio" in row for row in own):
            continue
        columns = {
            name: prefix
            for name, prefix in _TABLE.items()
            if any(key.startswith(prefix) for row in own for key in row)
        }
        lines = [["epoch", *columns], ["---:"] * (len(columns) + 1)]
        for epoch in sorted({row["epoch"] for row in own}):
            of_epoch = [row for row in own if row["epoch"] == epoch]
            cells = [_mean(of_epoch, prefix) for prefix in columns.values()]
            lines.append([str(epoch), *cells])
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        seeds = len({row["seed"] for row in own})
        parts.append(f"## `{variant}`, mean over {seeds} seeds\n\n{table}\n")
    return "\n".join(parts)


def _mean(rows: Sequence[dict[str, Any]], prefix: str) -> str:
    values = [v for row in rows for key, v in row.items() if key.startswith(prefix)]
    return f"{statistics.fmean(values):.4g}" if values else ""
