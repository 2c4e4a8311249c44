"""What TabularDataModule refuses, in one clear line each."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_tables import ROWS, people, ready

from dg_lightning.datamodules import TabularDataModule

NONE = people().assign(empty=np.nan)
DATES = people().assign(day=pd.to_datetime(people()["day"]))
INFINITE = people().assign(age=np.inf)
FEW = people(40).assign(note=[f"note {row}" for row in range(40)])
PARTS = people().assign(part=["train", "val", "test", "else"] * (ROWS // 4))
PRICES = people().assign(price=[f"1,{row:03}" for row in range(50)] * 4 + ["1,000"] * (ROWS - 200))
ENDLESS = people().assign(rent=np.inf)
TEXTS = people().assign(note=[f"note {row}" for row in range(ROWS)])


@pytest.mark.parametrize(
    ("table", "settings", "message"),
    [
        (people(), {"label": None}, "Name the column to predict with `label`; there are person"),
        (people(), {"label": "Hme"}, "of the table, perhaps 'home', got 'Hme'"),
        (people(), {"ignore": ["size"]}, "`ignore` must name a column"),
        (people(), {"label": "rent"}, "240 different labels, too many for classes: .*regression"),
        (
            people(),
            {"task": "regression"},
            "'home' must hold numbers, got '.*: correct it; classes",
        ),
        (people(), {"split_by": "person", "time_column": "day"}, "give one of the two"),
        (
            people(),
            {"time_column": "city", "ignore": []},
            "`time_column` must hold numbers or dates",
        ),
        (people(), {"val_share": 0.9}, "below 1 together, got 0.9 and 0.2"),
        (people(0), {}, "has no rows"),
        (NONE, {}, "'empty' has no value in the training rows: add it to `ignore`"),
        (DATES, {"ignore": ["person"]}, "'day' holds dates"),
        (INFINITE, {}, "'age' holds infinite values"),
        (PARTS, {"split_by": "part"}, "names parts .train, val, test., but also 'else'"),
        (PRICES, {}, "'price' holds numbers or dates as text, such as '1,000'"),
        (ENDLESS, {"label": "rent", "task": "regression"}, "'rent' holds infinite values"),
        (people().assign(day=0), {"time_column": "day"}, "too few different times"),
        (FEW, {}, "'note' has .* different texts in 28 rows"),
        (TEXTS, {}, "'note' has .* different texts.*add it to `ignore`"),
        (people()[["home"]], {"ignore": []}, "No column is left as input"),
    ],
)
def test_bad_input_gets_one_clear_line(
    table: pd.DataFrame, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ready(table, **settings)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.xlsx", b"", "must be a .csv, .tsv or .parquet file, got 'a.xlsx'"),
        ("a.parquet", b"no", "is no Parquet file"),
        ("a.csv", b"", "is no table"),
        ("b.csv", b"x;y\n1;2\n", "seem to be separated by ';'"),
        ("c.csv", "x,y\n1,\xe4\n".encode("latin-1"), "is not UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            TabularDataModule(path=str(tmp_path / name), label="x").setup("fit")
