"""What TabularDataModule refuses, in one clear line each."""

import bz2
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hostile import memory_limit, time_limit
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
        (people(), {"label": None}, "`label` .*; the table has person"),
        (people(), {"label": "Hme"}, "of the table, perhaps 'home', got 'Hme'"),
        (people(), {"ignore": ["size"]}, "`ignore` must name a column"),
        (people(), {"label": "rent"}, "240 different labels, too many for classes: .*regression"),
        (
            people(),
            {"task": "regression"},
            "'home' must contain numbers, got '.*: correct it",
        ),
        (people(), {"split_by": "person", "time_column": "day"}, "`split_by` and `time_column`"),
        (
            people(),
            {"time_column": "city", "ignore": []},
            "`time_column` must contain numbers or dates",
        ),
        (people(), {"val_share": 0.9}, "`val_share` .* got 0.9 and 0.2"),
        (people(0), {}, "has no rows"),
        (NONE, {}, "'empty' has no values in the training rows: .*`ignore`"),
        (DATES, {"ignore": ["person"]}, "'day' contains dates"),
        (INFINITE, {}, "'age' has infinite values"),
        (PARTS, {"split_by": "part"}, "train, val, test.*'else'"),
        (PRICES, {}, "'price' contains numbers or dates as text, such as '1,000'"),
        (ENDLESS, {"label": "rent", "task": "regression"}, "'rent' has infinite values"),
        (people().assign(day=0), {"time_column": "day"}, "too few different times"),
        (FEW, {}, "'note' has .* levels in 28 rows"),
        (TEXTS, {}, "'note' has .* levels.*add it to `ignore`"),
        (people()[["home"]], {"ignore": []}, "No column is left .*`ignore`"),
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
        ("a.parquet", b"no", "is not a Parquet file"),
        ("a.csv", b"", "is not a table"),
        ("b.csv", b"x;y\n1;2\n", "seem to be separated by ';'"),
        ("c.csv", "x,y\n1,\xe4\n".encode("latin-1"), "is not UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            TabularDataModule(path=str(tmp_path / name), label="x").setup("fit")


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.csv", content)
    return buffer.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zip": zipped,
}
LINES = b"a,b,x\n" + b"1.5,2.5,yes\n0.5,3.5,no\n" * 4000


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("damage", ["cut", "changed", "another kind"])
def test_a_packed_table_that_is_damaged_is_one_line(kind: str, damage: str, tmp_path: Path) -> None:
    packed = PACKERS[kind](LINES)
    content = {
        "cut": packed[:-20],
        "changed": packed[:35] + bytes(25) + packed[60:],
        "another kind": LINES,
    }[damage]
    path = tmp_path / f"a.csv.{kind}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"a.csv.{kind}") as caught:
        TabularDataModule(path=str(path), label="x", root=str(tmp_path)).setup("fit")
    assert "\n" not in str(caught.value)


def parquet_bomb(path: Path) -> None:
    """Write 3.2 GB of missing numbers as less than 2 MB."""
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    rows = 10**7
    table = pyarrow.table({name: pyarrow.nulls(rows, pyarrow.float64()) for name in "ax"})
    with parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
        for _ in range(20):
            writer.write_table(table)


def packed_bomb(path: Path) -> None:
    """Write 4 GB of text as less than 10 MB."""
    pack = PACKERS[path.suffix[1:]]
    block = pack(b"1.5,2.5,yes\n" * 10**6)
    with path.open("wb") as file:
        file.write(pack(b"a,b,x\n"))
        for _ in range(350):  # what is appended is unpacked too
            file.write(block)


BOMBS: dict[str, Callable[[Path], None]] = {
    "a.parquet": parquet_bomb,
    "a.csv.gz": packed_bomb,
    "a.csv.bz2": packed_bomb,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_of_a_huge_table_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    BOMBS[name](path)
    assert path.stat().st_size < 10**7
    data = TabularDataModule(path=str(path), label="x", root=str(tmp_path))
    with (
        time_limit(120),
        memory_limit(1.5),
        pytest.raises(ValueError, match=name) as caught,
    ):
        data.setup("fit")
    assert "\n" not in str(caught.value)
