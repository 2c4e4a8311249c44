"""Read tables, preprocess their columns, and decode them into arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from ._files import Save, check_unpacked_size, unpacked
from ._fitted import PARTS, find_parts, hash_rows, named_parts, seen_samples
from ._splits import grouped_split, stratified_split

if TYPE_CHECKING:
    from pandas import DataFrame, Series


MISSING = "(missing)"
_MAX_LEVELS = 100  # maximum per category, because each level becomes an input
_MAX_NAMED = 10
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
# A text column is rejected if it has many levels and most of them look like numbers.
_MANY, _ALMOST_ALL = 10, 0.8


@dataclass(frozen=True)
class TablePreparation:
    """Preprocessing of a table, as plain values for checkpoints and exports.

    A column of numbers becomes the input (value - mean) / std, which is 0 for missing values. If
    values were missing in training, a second input is 1 for missing values. After the numbers, each
    level of each category becomes an input that is 1 if the row has this level.

    Args:
        numbers: For each numeric column, the mean, the standard deviation, and whether values were
            missing.
        categories: For each category, its levels, including `(missing)` if values were missing.
        label: The label column.
        class_names: Names of the classes, in the order of the outputs; empty for regression.
        target: Mean and standard deviation of the label, for regression.
        seen: Fingerprints and splits of the rows in training; see `seen_samples`.
    """

    numbers: Mapping[str, Sequence[Any]]
    categories: Mapping[str, Sequence[str]]
    label: str
    class_names: Sequence[str] = ()
    target: Sequence[float] | None = None
    seen: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def fit(cls, table: "DataFrame", numbers: Sequence[str], label: str) -> "TablePreparation":
        """Fit the preparation to training rows. Columns not in `numbers` are categories."""
        scales, levels = {}, {}
        for name in table.columns:
            column = table[name]
            if name in numbers:
                values = numbers_of(column)
                there = values[~np.isnan(values)]
                if not len(there):
                    raise ValueError(
                        f"Column {name!r} has no values in the training rows: add it to `ignore`."
                    )
                scales[name] = [*scale_of(there), len(there) < len(values)]
            else:
                levels[name] = sorted(set(level_names(column)))
                count = len(levels[name])
                if count > _MAX_LEVELS or (count >= _MANY and 2 * count > len(column)):
                    raise ValueError(
                        f"Column {name!r} has {count:,} levels in {len(column):,} rows, which is "
                        "too many for inputs: add it to `ignore`, or merge levels."
                    )
        return cls(scales, levels, label)

    def plain(self) -> dict[str, Any]:
        """Return the preparation as plain values."""
        inputs = [name for _, name in self.inputs()]  # documents the order of the inputs
        return {"kind": "table", "inputs": inputs, **asdict(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "TablePreparation":
        """Restore a preparation from plain values.

        Raises:
            ValueError: If the values do not describe a table.
        """
        names = {entry.name for entry in fields(cls)}
        if values.get("kind") != "table" or values.keys() - {"kind", "inputs"} != names:
            raise ValueError("The checkpoint was not trained on a table: use one that was.")
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
                f"The net expects {listed(missing)}, which {source} lacks. It has "
                f"{listed(table.columns)}: rename or add columns, or use another table."
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
                    f"Column {name!r} has missing values, but had none in the training rows: the "
                    "column's mean is used instead."
                )
        for name, levels in self.categories.items():
            here = level_names(table[name])
            if unknown := sorted(set(here) - set(levels)):
                rank_zero_warn(
                    f"Column {name!r} has levels that were not in the training rows. These are "
                    f"ignored: {listed(unknown)}."
                )
            columns += [here == level for level in levels]
        return np.stack(columns, 1).astype(np.float32)


def level_names(column: "Series") -> NDArray[Any]:
    """Return a column as text, and whole numbers without a decimal point."""
    values = zip(column.astype(object), column.isna(), strict=True)
    return np.array([MISSING if gone else _text(value) for value, gone in values], dtype=object)


def _text(value: Any) -> str:
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value)


def scale_of(values: NDArray[np.float64]) -> list[float]:
    """Return the mean and the standard deviation, or 1 for the latter if all values are equal."""
    is_constant = values.min() == values.max()
    return [float(values.mean()), 1.0 if is_constant else float(values.std())]


def number_columns(table: "DataFrame", categories: Sequence[str]) -> list[str]:
    """Return the columns of numbers, and treat the others as categories.

    Raises:
        ValueError: If a column contains dates, or numbers stored as text.
    """
    import pandas as pd

    found = []
    for name in table.columns:
        column = table[name]
        kind = column.dtype
        if pd.api.types.is_datetime64_any_dtype(kind):
            raise ValueError(
                f"Column {name!r} contains dates: add it to `ignore`, or set `time_column` to it."
            )
        if name in categories or pd.api.types.is_bool_dtype(kind):
            continue
        if pd.api.types.is_numeric_dtype(kind):
            found.append(name)
            if pd.api.types.is_integer_dtype(kind) and column.is_unique and len(column) >= _MANY:
                rank_zero_warn(
                    f"Column {name!r} has a different whole number in every row: add it to "
                    "`ignore` if it only identifies the row."
                )
        elif not isinstance(kind, pd.CategoricalDtype):
            levels = column.dropna().astype(str).drop_duplicates()
            as_numbers = pd.to_numeric(levels.str.replace(",", ""), errors="coerce").notna()
            is_date = levels.str.match(r"\d{4}-\d\d-\d\d")
            if len(levels) >= _MANY and (as_numbers | is_date).mean() > _ALMOST_ALL:
                raise ValueError(
                    f"Column {name!r} contains numbers or dates as text, such as "
                    f"{levels.iloc[0]!r}: convert it, or add it to `categories` or `ignore`."
                )
    return found


def listed(names: Any) -> str:
    """Join names for a message."""
    names = [str(name) for name in names]
    return ", ".join(names[:_MAX_NAMED]) + ", ..." * (len(names) > _MAX_NAMED)


def numbers_of(column: "Series") -> NDArray[np.float64]:
    """Return a column of numbers as floats, with NaN for missing values."""
    import pandas as pd

    if column.isna().all():
        return np.full(len(column), np.nan)
    if not pd.api.types.is_numeric_dtype(column.dtype):
        raise ValueError(
            f"Column {column.name!r} must contain numbers, got {column.dropna().iloc[0]!r}: "
            "correct it, or for classes use `task: classification`, as in table/dynamicgate."
        )
    values: NDArray[np.float64] = column.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(values).any():
        raise ValueError(
            f"Column {column.name!r} has infinite values: correct them or ignore the column."
        )
    return values


def _read_batches(path: Path, file: Any) -> "DataFrame":
    """Read a Parquet file in batches, because a small file may contain a huge table."""
    import pyarrow

    size, batches = 0, []
    try:
        for batch in file.iter_batches(batch_size=4096):
            size += batch.nbytes
            check_unpacked_size(path, size)
            batches.append(batch)
        table: DataFrame = pyarrow.Table.from_batches(batches, file.schema_arrow).to_pandas()
    except pyarrow.ArrowException as error:  # also raised if memory runs out
        raise ValueError(f"{path} cannot be read ({error}): replace it.") from error
    return table


def read_table(path: Path, separator: str | None, as_text: bool = False) -> "DataFrame":
    """Read a CSV or Parquet file; with `as_text`, leave CSV values as text."""
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
            raise ValueError(f"{path} is not a Parquet file ({error}): replace it.") from error
        if nested := [f.name for f in file.schema_arrow if pyarrow.types.is_nested(f.type)]:
            raise ValueError(f"{path} has columns of lists ({listed(nested)}): remove them.")
        return _read_batches(path, file)
    if separator is None and kind not in _SEPARATORS:
        raise ValueError(
            f"`path` must be a .csv, .tsv or .parquet file, got {path.name!r}: rename it, or set "
            "`separator`."
        )
    options: Any = {"dtype": str, "keep_default_na": False} if as_text else {}
    with unpacked(path) as file:
        try:
            table = pd.read_csv(file, sep=separator or _SEPARATORS[kind], **options)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error.reason}): save it as UTF-8.") from error
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is not a table ({reason}): set `separator`.") from error
        except MemoryError as error:
            raise ValueError(f"{path} does not fit in memory: use a smaller table.") from error
    if table.shape[1] == 1 and (other := next((s for s in ";\t|" if s in table.columns[0]), None)):
        raise ValueError(
            f"{path} has one column. Columns seem to be separated by {other!r}: set `separator`."
        )
    if unnamed := [name for name in table.columns if name.startswith("Unnamed: ")]:
        rank_zero_warn(f"{path}: columns without a name are ignored ({listed(unnamed)}).")
    return table.drop(columns=unnamed)


_MAX_CLASSES = 100
Indices = NDArray[np.int64]


class TableDecoder:
    """Decodes a table, fitting the preparation unless one is given.

    Args:
        settings: The DataModule that provides the options.
        table: The table.
        preparation: Preparation from a checkpoint, or None to fit one to the table.
    """

    def __init__(
        self, settings: Any, table: "DataFrame", preparation: TablePreparation | None
    ) -> None:
        self.settings = settings
        self.table = table.reset_index(drop=True)
        self.table.columns = [str(name) for name in table.columns]
        if len(set(self.table.columns)) < len(self.table.columns):
            raise ValueError(f"Column names must be unique, got {listed(self.table.columns)}.")
        if not len(self.table):
            raise ValueError("The table has no rows: use another table.")
        self.preparation = preparation

    def decode(self, save: Save) -> None:
        """Save all tables and metadata."""
        fit = self._fit if self.preparation is None else self._align
        preparation, inputs, labels, parts, unlabelled = fit()
        save("inputs", [inputs])
        save("labels", [labels])
        save("fingerprints", [_fingerprints(inputs)])
        for part in PARTS:
            if len(of := np.flatnonzero(parts == part)):
                save(part, [of])
        save.metadata(preparation=preparation.plain(), unlabelled=unlabelled)

    def _fit(self) -> tuple[TablePreparation, Any, Any, Any, str]:
        """Determine classes, splits and inputs from this table."""
        s = self.settings
        self._check_columns()
        names, labels = self._labels()
        labelled = np.flatnonzero(~np.isnan(labels))
        if not len(labelled):
            raise ValueError(f"Column {s.label!r} has no labels: choose another `label`.")
        if missing := len(labels) - len(labelled):
            rank_zero_warn(
                f"{missing:,} of {len(labels):,} rows have no label in column {s.label!r} (empty, "
                "NA or None): these rows are only predicted."
            )
        parts = np.full(len(labels), "", dtype=object)
        for name, rows in zip(PARTS, self._split(labelled, labels, names), strict=True):
            parts[rows] = name
        training = np.flatnonzero(parts == "train")
        columns = self.table[self._input_columns()]
        fitted = TablePreparation.fit(
            columns.iloc[training], number_columns(columns, s.categories), s.label
        )
        inputs = fitted.align(columns)
        target = None if names else scale_of(labels[training])
        seen = seen_samples(_fingerprints(inputs), parts)
        if s.split_by is not None:  # to recognise the groups in other tables
            groups = _hashed_levels(self.table[s.split_by])
            seen["groups"] = sorted({*groups[np.isin(parts, ("train", "val"))].tolist()})
        fitted = replace(fitted, class_names=names, target=target, seen=seen)
        return fitted, inputs, self._saved(labels, names), parts, ""

    def _align(self) -> tuple[TablePreparation, Any, Any, Any, str]:
        """Align the table with a checkpoint, and recognise rows that were in its splits."""
        fitted = self.preparation
        assert fitted is not None
        inputs = fitted.align(self.table, self.settings.source)
        parts = find_parts(_fingerprints(inputs), fitted.seen)
        if (column := self.settings.split_by) is not None and column in self.table.columns:
            is_known = np.isin(_hashed_levels(self.table[column]), fitted.seen.get("groups", ()))
            parts[(parts == "") & is_known] = "train"  # new rows of a known group
        name = self.settings.label if self.settings.label in self.table.columns else fitted.label
        unlabelled = f"the table has no label column {name!r}."
        labels = np.full(len(inputs), np.nan)
        if name in self.table.columns:
            labels = self._known_labels(name, fitted.class_names)
            unlabelled = f"no row of column {name!r} has a label that the net knows."
        if (~np.isnan(labels)).any():
            unlabelled = "the net was trained on all of them."
        parts[parts == ""] = "test"
        parts[np.isnan(labels)] = ""
        return fitted, inputs, self._saved(labels, fitted.class_names), parts, unlabelled

    def _known_labels(self, column: str, class_names: Sequence[str]) -> NDArray[np.float64]:
        if not class_names:
            return numbers_of(self.table[column])
        place = {name: float(index) for index, name in enumerate(class_names)}
        return np.array([place.get(name, np.nan) for name in level_names(self.table[column])])

    def _saved(self, labels: NDArray[np.float64], names: Any) -> NDArray[Any]:
        """Return labels for training: numbers, or class indices with -1 for unknown classes."""
        if not len(names):
            return labels.astype(np.float32)
        return np.where(np.isnan(labels), -1, labels).astype(np.int64)

    def _check_columns(self) -> None:
        s = self.settings
        if s.label is None:
            raise ValueError(
                f"Set `label` to the column to predict; the table has {listed(self.table.columns)}."
            )
        used = {"label": [s.label], "split_by": [s.split_by], "time_column": [s.time_column]}
        used |= {"ignore": s.ignore, "categories": s.categories}
        for option, names in used.items():
            for name in names:
                if name is not None and name not in self.table.columns:
                    close = {known.lower(): known for known in self.table.columns}
                    meant = get_close_matches(str(name).lower(), close, n=1)
                    hint = f", perhaps {close[meant[0]]!r}" if meant else ""
                    raise ValueError(
                        f"`{option}` must name a column of the table{hint}, got {name!r}; the "
                        f"table has {listed(self.table.columns)}."
                    )

    def _input_columns(self) -> list[str]:
        s = self.settings
        left_out = {s.label, s.split_by, s.time_column, *s.ignore}
        names = [name for name in self.table.columns if name not in left_out]
        if not names:
            raise ValueError(
                "No column is left as an input: add columns, or remove some from `ignore`, got "
                f"[{listed(s.ignore)}]."
            )
        return names

    def _labels(self) -> tuple[list[str], NDArray[np.float64]]:
        """Return the class names and the label of each row, with NaN for missing labels."""
        s = self.settings
        if s.task == "regression":
            return [], numbers_of(self.table[s.label])
        texts = level_names(self.table[s.label])
        names = sorted(set(texts) - {MISSING}, key=_natural)
        if len(names) > _MAX_CLASSES:
            raise ValueError(
                f"Column {s.label!r} has {len(names):,} different labels, too many for classes: "
                "to predict a number, use a config `table/regression_...` (data.task=regression "
                "with GatedRegressor)."
            )
        place = {name: float(index) for index, name in enumerate(names)}
        return names, np.array([place.get(text, np.nan) for text in texts])

    def _split(
        self, labelled: Indices, labels: NDArray[np.float64], names: list[str]
    ) -> tuple[Indices, Indices, Indices]:
        """Split the labelled rows, and return the rows of each split."""
        s = self.settings
        later = s.val_share / (1 - s.test_share)  # share of the non-test rows
        if s.time_column is not None:
            return self._split_by_time(labelled)
        if s.split_by is not None:
            groups = level_names(self.table[s.split_by])
            if MISSING in groups[labelled]:
                raise ValueError(f"Column {s.split_by!r} has missing values: fill or drop them.")
            given = named_parts(dict.fromkeys(groups[labelled]), f"Column {s.split_by!r}")
            if given is not None:
                return self._given_parts(labelled, groups, given, labels, names)
            kinds = labels if names else np.zeros(len(labels))
            rest, test = grouped_split(labelled, kinds, groups, s.test_share, s.split_seed)
            train, val = grouped_split(rest, kinds, groups, later, s.split_seed)
            return train, val, test
        if names:
            of = torch.from_numpy(np.nan_to_num(labels)).long()
            rest, test = stratified_split(labelled, of, s.test_share, s.split_seed, names)
            train, val = stratified_split(rest, of, later, s.split_seed, names)
            return train, val, test
        return self._cut(np.random.default_rng(s.split_seed).permutation(labelled))

    def _given_parts(
        self,
        labelled: Indices,
        groups: NDArray[Any],
        given: dict[str, str],
        labels: NDArray[np.float64],
        names: list[str],
    ) -> tuple[Indices, Indices, Indices]:
        """Return the splits that a column names. Without `val`, hold out validation rows."""
        s = self.settings
        parts = np.array([given[group] for group in groups[labelled]])
        train, val, test = (labelled[parts == part] for part in PARTS)
        if not len(test):
            raise ValueError(f"Column {s.split_by!r} must name a split `test`: add this value.")
        if not len(val) and names:
            of = torch.from_numpy(np.nan_to_num(labels)).long()
            train, val = stratified_split(train, of, s.val_share, s.split_seed, names)
        elif not len(val):
            mixed = np.random.default_rng(s.split_seed).permutation(train)
            cut = max(2, round(s.val_share * len(mixed)))
            train, val = mixed[cut:], mixed[:cut]
        return train, val, test

    def _split_by_time(self, labelled: Indices) -> tuple[Indices, Indices, Indices]:
        import pandas as pd

        column = self.table[self.settings.time_column]
        if not pd.api.types.is_numeric_dtype(column.dtype):
            try:
                column = pd.to_datetime(column, format="ISO8601", utc=True)
            except ValueError as error:
                raise ValueError(
                    f"`time_column` must contain numbers or dates such as 2024-12-31, but "
                    f"{column.name!r} contains {column.iloc[0]!r}: convert them."
                ) from error
        if column.iloc[labelled].isna().any():
            raise ValueError(f"Column {column.name!r} has missing times: fill or drop them.")
        times = column.iloc[labelled].to_numpy()
        order = np.argsort(times, kind="stable")
        return self._cut(labelled[order], times[order])

    def _cut(
        self, rows: Indices, times: NDArray[Any] | None = None
    ) -> tuple[Indices, Indices, Indices]:
        """Cut rows into training, validation and test rows, and keep equal times together."""
        s = self.settings
        test, val = (max(1, round(share * len(rows))) for share in (s.test_share, s.val_share))
        if len(rows) < test + val + 2:
            raise ValueError(f"{len(rows)} labelled rows are too few for three splits: add rows.")
        first, second = len(rows) - test - val, len(rows) - test
        if times is not None:
            first, second = (int(np.searchsorted(times, times[cut])) for cut in (first, second))
            if not 0 < first < second:
                raise ValueError(
                    f"Column {s.time_column!r} has too few different times for three splits: use "
                    "finer times, or other shares."
                )
        return rows[:first], rows[first:second], rows[second:]


def _hashed_levels(column: "Series") -> NDArray[np.int64]:
    return hash_rows(name.encode() for name in level_names(column))


def _fingerprints(inputs: NDArray[np.float32]) -> NDArray[np.int64]:
    return hash_rows(row.tobytes() for row in inputs)


def _natural(name: str) -> tuple[float, str]:
    """Return a key that sorts numbers by value, before text."""
    try:
        return float(name), ""
    except ValueError:
        return np.inf, name
