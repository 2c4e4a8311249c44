"""Preprocessing from cell counts to inputs: fitted once, applied to any file by gene name."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from ._cells import log_normalize
from ._fitted import hash_rows

__all__ = ["CellPreparation", "Standardize", "compute_fingerprints"]

_MAX_MISSING = 0.1  # share of the input genes
_MAX_NAMED = 10  # missing genes listed in a message


@dataclass(frozen=True)
class CellPreparation:
    """Preprocessing of cells, as plain values for checkpoints and exports.

    Args:
        input_genes: Names of the input genes, in order.
        total_genes: Names of the genes that are summed to a cell's total count: all genes of the
            training data. Empty if the values were already log-normalised.
        target_sum: Total count that every cell is scaled to before the logarithm.
        mean: Mean of each input; None if inputs are not standardised.
        std: Standard deviation of each input.
        class_names: Names of the classes, in the order of the outputs.
        seen: Fingerprints of the cells in each split of the training data.
        seen_labels: Their classes, if labels are clusters: clustering other cells would give
            different ones.
    """

    input_genes: Sequence[str]
    total_genes: Sequence[str]
    class_names: Sequence[str]
    target_sum: float = 1e4
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    seen: Mapping[str, Sequence[int]] = field(default_factory=dict)
    seen_labels: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the preparation as plain values."""
        return {"kind": "cells", **asdict(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "CellPreparation":
        """Restore a preparation from plain values.

        Raises:
            ValueError: If the values do not describe cells.
        """
        names = {entry.name for entry in fields(cls)}
        needed = {"input_genes", "total_genes", "class_names"}
        if values.get("kind") != "cells" or not needed <= values.keys() <= {*names, "kind"}:
            raise ValueError("The checkpoint was not trained on cells: give one that was.")
        return cls(**{key: value for key, value in values.items() if key != "kind"})

    def align(self, genes: Sequence[str], values: Any) -> tuple[Any, Any]:
        """Select genes by name and normalise.

        Args:
            genes: Unique gene names of the data.
            values: Counts, or log-normalised values: CSR (cells, genes).

        Returns:
            The unscaled inputs, CSR (cells, input genes), and their raw values.
        """
        place = {name: index for index, name in enumerate(genes)}
        raw = _select_columns(values, place, self.input_genes)
        if not self.total_genes:
            return raw, raw
        counted = _select_columns(values, place, self.total_genes)
        known = {name: index for index, name in enumerate(self.total_genes)}
        normal = log_normalize(counted, self.target_sum)
        return _select_columns(normal, known, self.input_genes), raw

    def find_parts(self, prints: NDArray[np.int64]) -> list[str]:
        """Return the training split of each cell, by fingerprint; empty if unseen."""
        parts = np.full(len(prints), "", dtype=object)
        for name in ("train", "val", "test"):  # of duplicates, the later split wins
            parts[np.isin(prints, self.seen.get(name, ()))] = name
        found: list[str] = parts.tolist()
        return found

    def check_genes(self, names: Sequence[str]) -> None:
        """Warn about missing and unknown genes; reject data that lacks too many."""
        there = set(names)
        known = self.total_genes or self.input_genes
        missing = [name for name in self.input_genes if name not in there]
        if len(missing) > _MAX_MISSING * len(self.input_genes):
            raise ValueError(
                f"The data lacks {len(missing)} of the {len(self.input_genes)} genes that the net "
                f"reads ({_short(missing)}); it has {_short(list(names))}: rename its genes."
            )
        if missing:
            rank_zero_warn(
                f"The data lacks {len(missing)} of the {len(self.input_genes)} genes that the net "
                f"reads; they are taken as not expressed, and cells that did express them are not "
                f"recognised as training cells: {_short(missing)}."
            )
        absent = sum(name not in there for name in known) - len(missing)
        if absent and self.total_genes:
            rank_zero_warn(
                f"The data lacks {absent} more of the {len(known)} genes whose counts made up a "
                "cell's total at training, so values may be somewhat larger: give all genes."
            )
        if unknown := len(there - set(known)):
            rank_zero_info(f"{unknown} genes that no cell expressed at training are ignored.")


def _short(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + ", ..." * (len(names) > _MAX_NAMED)


def _select_columns(matrix: Any, place: Mapping[str, int], names: Sequence[str]) -> Any:
    """Select columns by name; missing ones are 0."""
    from scipy.sparse import csr_matrix

    there = [(place[name], index) for index, name in enumerate(names) if name in place]
    old, new = np.array(there, dtype=np.int64).reshape(-1, 2).T
    ones = np.ones(len(old), dtype=matrix.dtype)
    picks = csr_matrix((ones, (old, new)), shape=(matrix.shape[1], len(names)))
    selected = (matrix @ picks).tocsr()
    selected.sort_indices()
    return selected


class Standardize:
    """Standardise every gene, in place."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean)
        self.std = torch.tensor(std)

    def __call__(self, values: Tensor) -> Tensor:
        return values.sub_(self.mean).div_(self.std)


def compute_fingerprints(raw: Any) -> NDArray[np.int64]:
    """Return a hash of each cell's raw values, independent of file and barcode.

    Args:
        raw: Raw values of the input genes, CSR (cells, genes).
    """
    texts = (
        raw.indices[start:end].astype("<i4").tobytes() + raw.data[start:end].tobytes()
        for start, end in zip(raw.indptr, raw.indptr[1:], strict=False)
    )
    return hash_rows(texts)
