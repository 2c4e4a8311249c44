"""Tables from a CSV or Parquet file, or from a data frame."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from typing_extensions import override

from ._files import Save, Tables
from ._fitted import FittedDataModule, find_parts
from ._splits import Split
from ._table_preparation import TableDecoder, TablePreparation, read_table
from .base import check_choice

_BUNDLED = ("breast_cancer", "diabetes", "iris", "wine")


class TabularDataModule(FittedDataModule):
    """Table rows, for predicting a class or a number from numbers and categories.

    Numbers are standardised with the mean and standard deviation of the training rows. Categories
    (text and booleans) become one input per level. A missing number is replaced by the mean, and
    another input indicates that it was missing. The split is random and stratified by class, unless
    `split_by` or `time_column` is set. Rows without a label are not used for training or testing,
    but `predict` covers all rows.

    Columns, scaling and classes are saved in the checkpoint. With a checkpoint, other tables are
    aligned to it by column name, and `test` uses the labelled rows that the model has not seen.

    Without `path`, one of scikit-learn's tables is used. Reference for `breast_cancer`: W. Wolberg,
    O. Mangasarian, N. Street, W. Street, "Breast Cancer Wisconsin (Diagnostic)", UCI Machine
    Learning Repository, 1995. Licence: CC BY 4.0.

    Args:
        batch_size: Training batch size.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        path: A .csv or .tsv file, which may be compressed, or a .parquet file. The path is
            relative to the working folder or to the root.
        bundled: The table to use without `path`: `breast_cancer`, `iris`, `wine` or, with `task:
            regression`, `diabetes`.
        label: The column to predict. Defaults to `target` for a bundled table.
        task: Whether labels are classes (`classification`) or numbers (`regression`).
        categories: Numeric columns to treat as categories, such as postal codes.
        ignore: Columns that are not inputs. They are listed with the predictions to identify rows.
        separator: Column separator. If None, it follows from the file's suffix.
        split_by: Column of groups, such as patients, whose rows must stay together. It may also
            contain the values `train`, `val` and `test` instead of groups. If `val` is absent,
            validation rows are held out from `train`. The column is not an input.
        time_column: Column of dates or numbers. The latest rows are used for testing, and the rows
            before them for validation. The column is not an input.
        val_share: Share of the rows for validation.
        test_share: Share of the rows for testing.
        **options: Further arguments of `BaseDataModule`, such as `root` and `split_seed`.

    >>> data = TabularDataModule(batch_size=32)
    >>> data.setup("fit")
    >>> data.input_shape, data.class_names, data.feature_names[:2]
    ((30,), ('benign', 'malignant'), ('mean radius', 'mean texture'))
    """

    sample = "row"
    preparation_type = TablePreparation
    needs = dict.fromkeys(("pandas",), "pandas pyarrow")

    def __init__(
        self,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        path: str | None = None,
        bundled: Literal["breast_cancer", "diabetes", "iris", "wine"] = "breast_cancer",
        label: str | None = None,
        task: Literal["classification", "regression"] = "classification",
        categories: Sequence[str] = (),
        ignore: Sequence[str] = (),
        separator: str | None = None,
        split_by: str | None = None,
        time_column: str | None = None,
        val_share: float = 0.1,
        test_share: float = 0.2,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)
        self.path = None if path is None else Path(path)
        if self.path is not None and not self.path.exists() and (self.root / self.path).exists():
            self.path = self.root / self.path
        self.bundled = check_choice("bundled", bundled, *_BUNDLED)
        self.label = "target" if path is None and label is None else label
        self.task = check_choice("task", task, "classification", "regression")
        self.categories, self.ignore = list(categories), list(ignore)
        self.separator = separator
        self.split_by, self.time_column = split_by, time_column
        self.val_share, self.test_share = val_share, test_share
        if split_by is not None and time_column is not None:
            raise ValueError("`split_by` and `time_column` are mutually exclusive: set one.")
        if min(val_share, test_share) <= 0 or val_share + test_share >= 1:
            raise ValueError(
                "`val_share` and `test_share` must be above 0, with a sum below 1, got "
                f"{val_share} and {test_share}."
            )
        self._frame: Any = None

    @classmethod
    def from_frame(cls, frame: Any, **settings: Any) -> "TabularDataModule":
        """Return a DataModule for a pandas or polars frame, without writing to disk."""
        data = cls(**settings)
        data.label = settings.get("label")
        data._frame = frame.to_pandas() if hasattr(frame, "to_pandas") else frame
        if not hasattr(data._frame, "iloc"):
            raise TypeError(f"Expected a pandas or polars frame, got {type(frame).__name__}.")
        return data

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Input names, in order. A category's inputs are named after its column and the level."""
        return tuple(name for _, name in self._of_facts().inputs())

    @override
    def use_preparation(self, preparation: Mapping[str, Any]) -> None:
        trained = preparation.get("label")
        if self.label is not None and trained is not None and self.label != trained:
            raise ValueError(f"`label` must be {trained!r}, as in training, got {self.label!r}.")
        super().use_preparation(preparation)

    @property
    @override
    def class_names(self) -> tuple[str, ...]:
        return tuple(self._of_facts().class_names)

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        return (len(self._of_facts().inputs()),)

    @property
    def target_scale(self) -> tuple[float, float] | None:
        """Mean and standard deviation of a numeric label in training, or None for classes."""
        target = self._of_facts().target
        return None if target is None else (target[0], target[1])

    def _of_facts(self) -> TablePreparation:
        return TablePreparation.from_plain(self.metadata["preparation"])

    @override
    def fitted_preparation(self) -> TablePreparation:
        return self._of_facts()

    @override
    def sources(self) -> Sequence[Path]:
        return () if self._frame is not None or self.path is None else [self.path]

    @override
    def settings(self) -> Mapping[str, Any]:
        names = (
            *("label", "task", "categories", "ignore", "separator", "split_by", "time_column"),
            *("val_share", "test_share", "split_seed"),
        )
        return {name: getattr(self, name) for name in names} | self.preparation_settings()

    @override
    def decode(self, save: Save) -> None:
        TableDecoder(self, self.read(), self._preparation).decode(save)

    @property
    def source(self) -> str:
        """Name of the source, for messages."""
        if self._frame is not None:
            return "the frame"
        return f"the bundled table {self.bundled}" if self.path is None else str(self.path)

    def read(self, as_text: bool = False) -> Any:
        """Return the raw table as a pandas frame; with `as_text`, leave CSV values as text."""
        if self._frame is not None:
            return self._frame
        if self.path is not None:
            return read_table(self.path, self.separator, as_text)
        from sklearn import datasets

        loaded = getattr(datasets, f"load_{self.bundled}")(as_frame=True)
        table = loaded.frame
        if (names := getattr(loaded, "target_names", None)) is not None:
            table["target"] = np.array(names)[table["target"]]
        return table

    @override
    def split(self, tables: Tables) -> dict[str, Split]:
        labels = torch.from_numpy(tables["labels"].array.copy())
        return self.make_parts(tables, tables["inputs"], labels, None)

    @override
    def check_parts(self, parts: Mapping[str, Split]) -> None:
        fits = self._preparation is None
        if fits and not self.class_names:
            for name, part in parts.items():
                if len(part) < 2:
                    raise ValueError(
                        f"The {name} split must have at least 2 rows, got {len(part)}: add rows."
                    )
            return
        # If rows are split by group or time, only the training split must contain every class.
        is_free = self.split_by is None and self.time_column is None
        super().check_parts(parts if is_free or not fits else {"train": parts["train"]})

    @override
    def describe_parts(self) -> str:
        if self._preparation is not None or self.class_names:
            return f"{self.source}, {super().describe_parts()}"
        sizes = ", ".join(f"{name} {len(part):,}" for name, part in self._parts.items())
        mean, std = self.target_scale or (0.0, 1.0)
        label = f"{self.label} is {mean:.4g} ± {std:.4g}"
        return f"{self.source}, {sizes} rows; {label} in the training rows"

    @override
    def describe_samples(self) -> dict[str, Sequence[Any]]:
        labels, names = self._everything.labels.tolist(), self.class_names
        if names:
            known = [names[label] if label >= 0 else "" for label in labels]
        else:
            known = ["" if label != label else f"{label:.6g}" for label in labels]
        fitted = self.current_preparation()
        parts = find_parts(self._tables()["fingerprints"].array, fitted.seen)
        about: dict[str, Sequence[Any]] = {"row": range(len(labels)), "true_label": known}
        about["part"] = parts.tolist()
        used = {self.label, fitted.label, *(name for name, _ in fitted.inputs())}
        for name, column in self.read(as_text=True).items():
            if str(name) not in used:
                taken = name in about or name in ("prediction", "probability")
                about[f"{name} (table)" if taken else str(name)] = column.astype(str).tolist()
        return about
