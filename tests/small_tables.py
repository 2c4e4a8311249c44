"""A small table in which one number and one category decide, with missing values."""

from typing import Any

import numpy as np
import pandas as pd

from dg_lightning.datamodules import TabularDataModule

ROWS = 240
IGNORE = ["person", "day", "rent"]  # where `home` is the label


def people(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    """Return a table: `rent` follows from `age` and `city`, `home` from `rent`."""
    draw = np.random.default_rng(seed)
    age = draw.normal(40, 10, rows)
    city = draw.choice(["Aachen", "Bonn", "Emden"], rows)
    worth = {"Aachen": 0.0, "Bonn": 300.0, "Emden": -200.0}
    rent = 500 + 20 * (age - 40) + np.array([worth[name] for name in city])
    table = pd.DataFrame(
        {
            "person": np.arange(rows) // 4,
            "day": pd.date_range("2024-01-01", periods=rows).astype(str),
            "age": age,
            "height": draw.normal(170, 8, rows),
            "city": city,
            "smokes": draw.random(rows) < 0.3,
            "rent": rent + draw.normal(0, 20, rows),
            "home": np.where(rent > 500, "large", "small"),
        }
    )
    table.loc[::7, "height"] = np.nan
    table.loc[::11, "city"] = None
    return table


def ready(table: Any = None, stage: str = "fit", **settings: Any) -> TabularDataModule:
    """Return the table as data that is set up, with `home` as its label."""
    settings = {"label": "home", "ignore": IGNORE, "batch_size": 16, **settings}
    data = TabularDataModule.from_frame(people() if table is None else table, **settings)
    data.setup(stage)
    return data
