"""DataModules whose preprocessing is fitted to training samples and saved in checkpoints."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ._files import Tables
from ._splits import Split
from .base import BaseDataModule

PARTS = ("train", "val", "test")
_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


class FittedDataModule(BaseDataModule):
    """A DataModule whose preprocessing is fitted to its training samples.

    The preparation is saved in the checkpoint, so samples from other files are prepared as in
    training. `decode` fits a preparation, or aligns the samples to `_preparation` if that is set.
    `decode` also saves the rows of each split under the split's name, and as `unlabelled` the
    reason why no sample can be tested. `predict` covers all samples.

    Args:
        *args: Positional arguments of `BaseDataModule`.
        **options: Keyword arguments of `BaseDataModule`.
    """

    sample: ClassVar[str]  # what messages call a sample
    preparation_type: ClassVar[Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._preparation: Any = None  # set when a checkpoint is loaded

    @abstractmethod
    def fitted_preparation(self) -> Any:
        """Return the preparation fitted to this data."""

    def preparation_settings(self) -> dict[str, str]:
        """Return a hash of the checkpoint's preparation, because decoding depends on it."""
        if self._preparation is None:
            return {}
        text = json.dumps(self._preparation.plain())
        return {"preparation": hashlib.sha256(text.encode()).hexdigest()}

    def make_parts(
        self, tables: Tables, table: Any, labels: Tensor, prepare: Any
    ) -> dict[str, Split]:
        """Create the splits, and keep all samples for `predict`."""
        none = np.empty(0, dtype=np.int64)
        rows = {name: tables[name].array.copy() if name in tables else none for name in PARTS}
        self._everything = Split(table, np.arange(len(labels)), labels, prepare)
        prints = tables["fingerprints"].array
        equal = int(np.isin(prints[rows["test"]], prints[rows["train"]]).sum())
        if equal and self._preparation is None:
            rank_zero_warn(
                f"{equal:,} of {len(rows['test']):,} test {self.sample}s equal a training "
                f"{self.sample}: remove the duplicates, or keep them in one split."
            )
        return {name: Split(table, of, labels[of], prepare) for name, of in rows.items()}

    @override
    def check_parts(self, parts: Mapping[str, Split]) -> None:
        if self._preparation is None:
            super().check_parts(parts)
            return
        part = {"test": "test", "validate": "val"}.get(str(self._stage))
        if part is not None and not len(parts[part]):
            raise ValueError(
                f"There are no labelled {self.sample}s to {self._stage} on: "
                f"{self.metadata['unlabelled']} "
                "`predict` needs no labels."
            )

    @override
    def describe_parts(self) -> str:
        if self._preparation is None:
            return super().describe_parts()
        known = sum(len(part) for part in self._parts.values())
        aligned = f"{len(self._everything):,} {self.sample}s, aligned to the checkpoint by name"
        if not known:  # the usual case for `predict`
            return aligned
        testing = len(self.part("test"))
        return f"{aligned}; {known:,} have a known label, and {testing:,} of these are for testing"

    @override
    def preparation(self) -> dict[str, Any]:
        plain: dict[str, Any] = self.current_preparation().plain()
        return plain

    def current_preparation(self) -> Any:
        """Return the checkpoint's preparation, or the one fitted to this data."""
        if self._preparation is not None:
            return self._preparation
        self.part("train")  # raises an error if `setup` has not been called
        return self.fitted_preparation()

    @override
    def use_preparation(self, preparation: Mapping[str, Any]) -> None:
        wanted = self.preparation_type.from_plain(preparation)
        state = None if self.trainer is None else self.trainer.state
        if state is not None and state.fn == "fit" and state.status == "running":
            if wanted != self.current_preparation():
                raise ValueError(
                    f"The checkpoint was trained with different {self.sample}s, inputs, scaling or "
                    "classes: resume with the original data and settings."
                )
            return
        if self._preparation == wanted:
            return
        self._preparation = wanted
        self._loaded_tables = None
        if self._parts:
            self._parts = {}
            self.setup(self._stage)

    @override
    def part_to_predict(self) -> Split:
        self.part("test")  # raises an error if `setup` has not been called
        return self._everything


def hash_rows(rows: Iterable[bytes]) -> NDArray[np.int64]:
    """Return a fingerprint of each sample, from its bytes."""
    digests = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


def named_parts(names: Iterable[str], where: str) -> dict[str, str] | None:
    """Return the split that each name refers to, or None if no name refers to a split.

    >>> named_parts(["Train", "valid", "test"], "column 'part'")
    {'Train': 'train', 'valid': 'val', 'test': 'test'}
    >>> named_parts(["cat", "dog"], "the folder")

    Raises:
        ValueError: If only some names refer to a split, or if no name refers to `train`.
    """
    found = {name: _NAMES.get(name.lower()) for name in names}
    if not any(found.values()):
        return None
    if odd := [name for name, part in found.items() if part is None]:
        raise ValueError(
            f"{where} names splits (train, val, test), but also {', '.join(map(repr, odd[:5]))}: "
            "use split names everywhere or nowhere."
        )
    if "train" not in found.values():
        raise ValueError(f"{where} must name a split `train`, got {', '.join(found)}: add it.")
    return {name: part for name, part in found.items() if part is not None}


def seen_samples(prints: NDArray[np.int64], parts: NDArray[Any]) -> dict[str, list[Any]]:
    """Return the fingerprint and split of each sample, as plain values for checkpoints."""
    return {"rows": prints.tolist(), "parts": parts.tolist()}


def find_parts(prints: NDArray[np.int64], seen: Mapping[str, Any]) -> NDArray[Any]:
    """Return the split of each sample in training, or an empty string if the sample is new.

    The original data keeps its splits. In other data, a sample that equals a training or validation
    sample is assigned to that sample's split.
    """
    rows, parts = np.array(seen["rows"]), np.array(seen["parts"], dtype=object)
    if np.array_equal(prints, rows):
        return parts
    found = np.full(len(prints), "", dtype=object)
    for name in ("val", "train"):
        found[np.isin(prints, rows[parts == name])] = name
    return found
