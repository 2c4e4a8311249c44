"""Decode a table of rows and columns into inputs, labels and splits."""

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from ._fitted import PARTS, find_parts, hash_rows, named_parts, seen_samples
from ._part import grouped_split, stratified_split
from ._table_preparation import (
    MISSING,
    TablePreparation,
    level_names,
    listed,
    number_columns,
    numbers_of,
    scale_of,
)
from ._tables import Save

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = ["TableDecoder"]

_MAX_CLASSES = 100
Indices = NDArray[np.int64]


class TableDecoder:
    """Decodes a table, fitting the preparation unless one is given.

    Args:
        settings: The DataModule, read for its arguments.
        table: The table.
        preparation: Preparation of a checkpoint; fitted to the table if None.
    """

    def __init__(
        self, settings: Any, table: "DataFrame", preparation: TablePreparation | None
    ) -> None:
        self.settings = settings
        self.table = table.reset_index(drop=True)
        self.table.columns = [str(name) for name in table.columns]
        if len(set(self.table.columns)) < len(self.table.columns):
            raise ValueError(f"Column names must differ, got {listed(self.table.columns)}.")
        if not len(self.table):
            raise ValueError("The table has no rows: give another.")
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
        save.facts(preparation=preparation.plain(), unlabelled=unlabelled)

    def _fit(self) -> tuple[TablePreparation, Any, Any, Any, str]:
        """Fit classes, splits and inputs to this table."""
        s = self.settings
        self._check_columns()
        names, labels = self._labels()
        labelled = np.flatnonzero(~np.isnan(labels))
        if not len(labelled):
            raise ValueError(f"Column {s.label!r} holds no label: give another `label`.")
        if missing := len(labels) - len(labelled):
            rank_zero_warn(
                f"{missing:,} of {len(labels):,} rows have no label in column {s.label!r} (empty, "
                "NA and None are none): they are predicted only."
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
        if s.split_by is not None:  # of groups, to recognise them in other tables
            groups = _hashed_levels(self.table[s.split_by])
            seen["groups"] = sorted({*groups[np.isin(parts, ("train", "val"))].tolist()})
        fitted = replace(fitted, class_names=names, target=target, seen=seen)
        return fitted, inputs, self._saved(labels, names), parts, ""

    def _align(self) -> tuple[TablePreparation, Any, Any, Any, str]:
        """Align the table with a checkpoint; rows of its splits are recognised."""
        fitted = self.preparation
        assert fitted is not None
        inputs = fitted.align(self.table, self.settings.source)
        parts = find_parts(_fingerprints(inputs), fitted.seen)
        if (column := self.settings.split_by) is not None and column in self.table.columns:
            is_known = np.isin(_hashed_levels(self.table[column]), fitted.seen.get("groups", ()))
            parts[(parts == "") & is_known] = "train"  # other rows of the same group
        name = self.settings.label if self.settings.label in self.table.columns else fitted.label
        unlabelled = f"the table has no label column {name!r}."
        labels = np.full(len(inputs), np.nan)
        if name in self.table.columns:
            labels = self._known_labels(name, fitted.class_names)
            unlabelled = f"no row has a label that the net knows in column {name!r}."
        if (~np.isnan(labels)).any():
            unlabelled = "all labelled rows are rows that the net was trained on."
        parts[parts == ""] = "test"
        parts[np.isnan(labels)] = ""
        return fitted, inputs, self._saved(labels, fitted.class_names), parts, unlabelled

    def _known_labels(self, column: str, class_names: Sequence[str]) -> NDArray[np.float64]:
        if not class_names:
            return numbers_of(self.table[column])
        place = {name: float(index) for index, name in enumerate(class_names)}
        return np.array([place.get(name, np.nan) for name in level_names(self.table[column])])

    def _saved(self, labels: NDArray[np.float64], names: Any) -> NDArray[Any]:
        """Return labels as they are trained on: classes, -1 if unknown, or numbers."""
        if not len(names):
            return labels.astype(np.float32)
        return np.where(np.isnan(labels), -1, labels).astype(np.int64)

    def _check_columns(self) -> None:
        s = self.settings
        if s.label is None:
            raise ValueError(
                f"Name the column to predict with `label`; there are {listed(self.table.columns)}."
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
                        f"`{option}` must name a column of the table{hint}, got {name!r}; there "
                        f"are {listed(self.table.columns)}."
                    )

    def _input_columns(self) -> list[str]:
        s = self.settings
        left_out = {s.label, s.split_by, s.time_column, *s.ignore}
        names = [name for name in self.table.columns if name not in left_out]
        if not names:
            raise ValueError(f"No column is left as input: `ignore` is {listed(s.ignore)}.")
        return names

    def _labels(self) -> tuple[list[str], NDArray[np.float64]]:
        """Return class names and the label of each row, NaN where it is missing."""
        s = self.settings
        if s.task == "regression":
            return [], numbers_of(self.table[s.label])
        texts = level_names(self.table[s.label])
        names = sorted(set(texts) - {MISSING}, key=_natural)
        if len(names) > _MAX_CLASSES:
            raise ValueError(
                f"Column {s.label!r} holds {len(names):,} different labels, too many for classes: "
                "for a number, use a config `table/regression_...` (data.task=regression with "
                "GatedRegressor)."
            )
        place = {name: float(index) for index, name in enumerate(names)}
        return names, np.array([place.get(text, np.nan) for text in texts])

    def _split(
        self, labelled: Indices, labels: NDArray[np.float64], names: list[str]
    ) -> tuple[Indices, Indices, Indices]:
        """Return the rows of each split, among those with a label."""
        s = self.settings
        later = s.val_share / (1 - s.test_share)  # of what the test leaves
        if s.time_column is not None:
            return self._split_by_time(labelled)
        if s.split_by is not None:
            groups = level_names(self.table[s.split_by])
            if MISSING in groups[labelled]:
                raise ValueError(f"Column {s.split_by!r} lacks values: fill them, or drop rows.")
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
        """Return the parts that a column names; validation is held out of training if need be."""
        s = self.settings
        parts = np.array([given[group] for group in groups[labelled]])
        train, val, test = (labelled[parts == part] for part in PARTS)
        if not len(test):
            raise ValueError(f"Column {s.split_by!r} names no part `test`: add it.")
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
                    f"`time_column` must hold numbers or dates such as 2024-12-31, and "
                    f"{column.name!r} holds {column.iloc[0]!r}: rewrite them."
                ) from error
        if column.iloc[labelled].isna().any():
            raise ValueError(f"Column {column.name!r} lacks times: fill them, or drop these rows.")
        times = column.iloc[labelled].to_numpy()
        order = np.argsort(times, kind="stable")
        return self._cut(labelled[order], times[order])

    def _cut(
        self, rows: Indices, times: NDArray[Any] | None = None
    ) -> tuple[Indices, Indices, Indices]:
        """Cut rows into training, validation and test rows, in this order, between two times."""
        s = self.settings
        test, val = (max(1, round(share * len(rows))) for share in (s.test_share, s.val_share))
        if len(rows) < test + val + 2:
            raise ValueError(f"{len(rows)} labelled rows are too few for three parts: give more.")
        first, second = len(rows) - test - val, len(rows) - test
        if times is not None:
            first, second = (int(np.searchsorted(times, times[cut])) for cut in (first, second))
            if not 0 < first < second:
                raise ValueError(
                    f"Column {s.time_column!r} has too few different times for three parts: give "
                    "finer ones, or other shares."
                )
        return rows[:first], rows[first:second], rows[second:]


def _hashed_levels(column: "Series") -> NDArray[np.int64]:
    return hash_rows(name.encode() for name in level_names(column))


def _fingerprints(inputs: NDArray[np.float32]) -> NDArray[np.int64]:
    return hash_rows(row.tobytes() for row in inputs)


def _natural(name: str) -> tuple[float, str]:
    """Sort numbers by value, before texts."""
    try:
        return float(name), ""
    except ValueError:
        return np.inf, name
