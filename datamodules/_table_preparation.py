"""Preprocessing from columns to inputs: fitted once, applied to any table by column name."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from ._files import check_unpacked_size, unpacked

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = [
    "MISSING",
    "TablePreparation",
    "level_names",
    "listed",
    "number_columns",
    "numbers_of",
    "read_table",
    "scale_of",
]

MISSING = "(missing)"
_MAX_LEVELS = 100  # of a category, each of which becomes an input
_MAX_NAMED = 10
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_MANY, _MOSTLY = 10, 0.8  # levels, and the share of them that look like numbers


@dataclass(frozen=True)
class TablePreparation:
    """Preprocessing of a table, as plain values for checkpoints and exports.

    The inputs are, for each column of numbers, (value - mean) / std, 0 if it is missing, and if any
    was missing in training, a further input that is 1 if it is missing; then for each category and
    each of its levels, an input that is 1 if the row has this level.

    Args:
        numbers: Mean, standard deviation, and whether values were missing, by column.
        categories: Levels by column, with `(missing)` where values were missing.
        label: The label column.
        class_names: Names of the classes, in the order of the outputs; empty if labels are numbers.
        target: Mean and standard deviation of a label that is a number.
        seen: The rows of the training data, see `seen_samples`.
    """

    numbers: Mapping[str, Sequence[Any]]
    categories: Mapping[str, Sequence[str]]
    label: str
    class_names: Sequence[str] = ()
    target: Sequence[float] | None = None
    seen: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def fit(cls, table: "DataFrame", numbers: Sequence[str], label: str) -> "TablePreparation":
        """Return the preparation of training rows; columns are `numbers` or categories."""
        scales, levels = {}, {}
        for name in table.columns:
            column = table[name]
            if name in numbers:
                values = numbers_of(column)
                there = values[~np.isnan(values)]
                if not len(there):
                    raise ValueError(
                        f"Column {name!r} has no value in the training rows: add it to `ignore`."
                    )
                scales[name] = [*scale_of(there), len(there) < len(values)]
            else:
                levels[name] = sorted(set(level_names(column)))
                count = len(levels[name])
                if count > _MAX_LEVELS or (count >= _MANY and 2 * count > len(column)):
                    raise ValueError(
                        f"Column {name!r} has {count:,} different texts in {len(column):,} rows, "
                        "too many to become inputs: add it to `ignore`, or merge levels."
                    )
        return cls(scales, levels, label)

    def plain(self) -> dict[str, Any]:
        """Return the preparation as plain values."""
        inputs = [name for _, name in self.inputs()]  # in order, for those who prepare them by hand
        return {"kind": "table", "inputs": inputs, **asdict(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "TablePreparation":
        """Restore a preparation from plain values.

        Raises:
            ValueError: If the values do not describe a table.
        """
        names = {entry.name for entry in fields(cls)}
        if values.get("kind") != "table" or values.keys() - {"kind", "inputs"} != names:
            raise ValueError("The checkpoint was not trained on a table: give one that was.")
        return cls(**{name: values[name] for name in names})

    def inputs(self) -> list[tuple[str, str]]:
        """Return the column and the name of each input, in order."""
        found = []
        for name, (_, _, has_missing) in self.numbers.items():
            found += [(name, name)] + [(name, f"{name} {MISSING}")] * has_missing
        for name, levels in self.categories.items():
            found += [(name, f"{name}={level}") for level in levels]
        return found

    def align(self, table: "DataFrame", source: str = "the table") -> NDArray[np.float32]:
        """Return the inputs of each row ``(rows, inputs)``."""
        wanted = [*self.numbers, *self.categories]
        if missing := [name for name in wanted if name not in table.columns]:
            raise ValueError(
                f"The net reads {listed(missing)}, which {source} lacks; it has "
                f"{listed(table.columns)}: rename or add columns, or give another table."
            )
        columns: list[NDArray[Any]] = []
        for name, (mean, std, has_missing) in self.numbers.items():
            values = numbers_of(table[name])
            is_missing = np.isnan(values)
            columns.append(np.where(is_missing, 0.0, (values - mean) / std))
            if has_missing:
                columns.append(is_missing)
            elif is_missing.any():
                rank_zero_warn(
                    f"Column {name!r} has missing values, which it did not have in the training "
                    "rows: they are taken as its mean."
                )
        for name, levels in self.categories.items():
            here = level_names(table[name])
            if unknown := sorted(set(here) - set(levels)):
                rank_zero_warn(
                    f"Column {name!r} has levels that were not in the training rows, and count as "
                    f"none: {listed(unknown)}."
                )
            columns += [here == level for level in levels]
        return np.stack(columns, 1).astype(np.float32)


def level_names(column: "Series") -> NDArray[Any]:
    """Return the values of a column as text; whole numbers without a decimal point."""
    values = zip(column.astype(object), column.isna(), strict=True)
    return np.array([MISSING if gone else _text(value) for value, gone in values], dtype=object)


def _text(value: Any) -> str:
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value)


def scale_of(values: NDArray[np.float64]) -> list[float]:
    """Return mean and standard deviation, 1 if all values are equal."""
    is_constant = values.min() == values.max()
    return [float(values.mean()), 1.0 if is_constant else float(values.std())]


def number_columns(table: "DataFrame", categories: Sequence[str]) -> list[str]:
    """Return the columns of numbers; the others are categories.

    Raises:
        ValueError: If a column holds dates, or numbers written as text.
    """
    import pandas as pd

    found = []
    for name in table.columns:
        column = table[name]
        kind = column.dtype
        if pd.api.types.is_datetime64_any_dtype(kind):
            raise ValueError(
                f"Column {name!r} holds dates: add it to `ignore`, or make it `time_column`."
            )
        if name in categories or pd.api.types.is_bool_dtype(kind):
            continue
        if pd.api.types.is_numeric_dtype(kind):
            found.append(name)
            if pd.api.types.is_integer_dtype(kind) and column.is_unique and len(column) >= _MANY:
                rank_zero_warn(
                    f"Column {name!r} has another whole number in every row: add it to `ignore` if "
                    "it only identifies the row."
                )
        elif not isinstance(kind, pd.CategoricalDtype):
            levels = column.dropna().astype(str).drop_duplicates()
            as_numbers = pd.to_numeric(levels.str.replace(",", ""), errors="coerce").notna()
            is_date = levels.str.match(r"\d{4}-\d\d-\d\d")
            if len(levels) >= _MANY and (as_numbers | is_date).mean() > _MOSTLY:
                raise ValueError(
                    f"Column {name!r} holds numbers or dates as text, such as {levels.iloc[0]!r}: "
                    "correct it, or add it to `categories` or `ignore`."
                )
    return found


def listed(names: Any) -> str:
    """Return names for a message."""
    names = [str(name) for name in names]
    return ", ".join(names[:_MAX_NAMED]) + ", ..." * (len(names) > _MAX_NAMED)


def numbers_of(column: "Series") -> NDArray[np.float64]:
    """Return the values of a column of numbers, NaN where they are missing."""
    import pandas as pd

    if column.isna().all():
        return np.full(len(column), np.nan)
    if not pd.api.types.is_numeric_dtype(column.dtype):
        raise ValueError(
            f"Column {column.name!r} must hold numbers, got {column.dropna().iloc[0]!r}: correct "
            "it; classes are learned with `task: classification`, as in table/dynamicgate."
        )
    values: NDArray[np.float64] = column.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(values).any():
        raise ValueError(f"Column {column.name!r} holds infinite values: correct or ignore it.")
    return values


def _read_batches(path: Path, file: Any) -> "DataFrame":
    """Return the table of a Parquet file, read in parts: a small file may hold a huge table."""
    import pyarrow

    size, batches = 0, []
    try:
        for batch in file.iter_batches(batch_size=4096):
            size += batch.nbytes
            check_unpacked_size(path, size)
            batches.append(batch)
        table: DataFrame = pyarrow.Table.from_batches(batches, file.schema_arrow).to_pandas()
    except pyarrow.ArrowException as error:  # also of too little memory
        raise ValueError(f"{path} cannot be read ({error}): get it again.") from error
    return table


def read_table(path: Path, separator: str | None, as_text: bool = False) -> "DataFrame":
    """Return the table of a CSV or Parquet file; that of CSV as it is written if `as_text`."""
    import pandas as pd

    kinds = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zip", ".bz2", ".xz")]
    kind = kinds[-1].lower() if kinds else ""
    if kind == ".parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ModuleNotFoundError("Parquet files need pyarrow: pip install pyarrow") from error
        try:
            file = parquet.ParquetFile(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} is no Parquet file ({error}): give another.") from error
        if nested := [f.name for f in file.schema_arrow if pyarrow.types.is_nested(f.type)]:
            raise ValueError(f"{path} holds columns of lists ({listed(nested)}): leave them out.")
        return _read_batches(path, file)
    if separator is None and kind not in _SEPARATORS:
        raise ValueError(
            f"`path` must be a .csv, .tsv or .parquet file, got {path.name!r}: rename it, or give "
            "its `separator`."
        )
    options: Any = {"dtype": str, "keep_default_na": False} if as_text else {}
    with unpacked(path) as file:
        try:
            table = pd.read_csv(file, sep=separator or _SEPARATORS[kind], **options)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error.reason}): save it as UTF-8.") from error
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is no table ({reason}): give its `separator`.") from error
        except MemoryError as error:
            raise ValueError(
                f"{path} does not fit into the memory: give a smaller table."
            ) from error
    if table.shape[1] == 1 and (other := next((s for s in ";\t|" if s in table.columns[0]), None)):
        raise ValueError(
            f"{path} has one column: columns seem to be separated by {other!r}, give `separator`."
        )
    if unnamed := [name for name in table.columns if name.startswith("Unnamed: ")]:
        rank_zero_warn(f"{path}: columns without a name are left out ({listed(unnamed)}).")
    return table.drop(columns=unnamed)
