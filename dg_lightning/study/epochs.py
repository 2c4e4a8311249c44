"""Metrics of a study by epoch: one file for plots, and the paper's MoE table."""

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
    """Return the logged metrics of a run, one row per epoch; step values are averaged.

    Test metrics are left out.
    """
    epochs: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with metrics.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line.get("test/accuracy"):
                continue
            for key, value in line.items():
                if value and key not in ("epoch", "step"):
                    epochs[int(line["epoch"])][key].append(float(value))
    return [
        {"epoch": epoch, **{key: statistics.fmean(values) for key, values in keys.items()}}
        for epoch, keys in sorted(epochs.items())
    ]


def epochs_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the paper's table, for variants that logged their gate activity.

    Accuracy is validation accuracy. Values are averaged over routers and seeds.
    """
    parts = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        variant_rows = [row for row in rows if row["variant"] == variant]
        if not any("gates/active_ratio" in row for row in variant_rows):
            continue
        columns = {
            name: prefix
            for name, prefix in _TABLE.items()
            if any(key.startswith(prefix) for row in variant_rows for key in row)
        }
        lines = [["epoch", *columns], ["---:"] * (len(columns) + 1)]
        for epoch in sorted({row["epoch"] for row in variant_rows}):
            same_epoch = [row for row in variant_rows if row["epoch"] == epoch]
            cells = [_mean(same_epoch, prefix) for prefix in columns.values()]
            lines.append([str(epoch), *cells])
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        seeds = len({row["seed"] for row in variant_rows})
        parts.append(f"## `{variant}`, mean over {seeds} seeds\n\n{table}\n")
    return "\n".join(parts)


def _mean(rows: Sequence[dict[str, Any]], prefix: str) -> str:
    values = [v for row in rows for key, v in row.items() if key.startswith(prefix)]
    return f"{statistics.fmean(values):.4g}" if values else ""
