"""How counts of cells become the inputs of a net: fitted once, then applied to any file by name."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from ._cells import log_normalized

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["CellPreparation", "Standardize", "fingerprints"]

_MOST_MISSING = 0.1  # share of the input genes that a file may lack
_NAMED = 10  # missing genes that a message names


@dataclass(frozen=True)
class CellPreparation:
    """What a net of cells must be given, in plain values for checkpoints and exports.

    Args:
        input_genes: Names of the genes that are inputs, in their order.
        total_genes: Names of the genes whose counts make up a cell's total: all that the cells had
            at training. Empty if values were log-normalised already.
        target_sum: Counts that every cell is scaled to before the logarithm.
        mean: What is subtracted from each input; None if inputs are not scaled.
        std: What each input is divided by then.
        class_names: Names of the classes, in the order of the outputs.
        seen: Fingerprints of the cells of each part of the training.
    """

    input_genes: Sequence[str]
    total_genes: Sequence[str]
    class_names: Sequence[str]
    target_sum: float = 1e4
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    seen: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return it as numbers, strings, lists and dicts."""
        return {"kind": "cells", **asdict(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "CellPreparation":
        """Read it back, from a checkpoint.

        Raises:
            ValueError: If the values are of other data than cells.
        """
        if values.get("kind") != "cells":
            raise ValueError("The checkpoint was not trained on cells: give one that was.")
        return cls(**{key: value for key, value in values.items() if key != "kind"})

    def matches(self, other: "CellPreparation") -> bool:
        """Return True if both make the same inputs and classes, whatever cells they have seen."""
        own, theirs = self.plain(), other.plain()
        return all(_list(own[key]) == _list(theirs[key]) for key in own if key != "seen")

    def align(self, cells: "AnnData", values: Any) -> tuple[Any, Any]:
        """Select genes by name, and normalise.

        Args:
            cells: The cells, for the names of their genes.
            values: Counts, or log-normalised values: CSR (cells, genes).

        Returns:
            The inputs, CSR (cells, input genes), not yet scaled, and the values that totals are
            made of.
        """
        place = {name: index for index, name in enumerate(cells.var_names)}
        known = self.total_genes or self.input_genes
        counted = _columns(values, place, known)
        if not self.total_genes:
            return counted, counted
        of_known = {name: index for index, name in enumerate(known)}
        normal = log_normalized(cells.obs_names, counted, self.target_sum)
        return _columns(normal, of_known, self.input_genes), counted

    def parts_of(self, prints: NDArray[np.int64]) -> list[str]:
        """Return the part of the training that each cell was in, by its fingerprint."""
        parts = np.full(len(prints), "", dtype=object)
        for name, seen in self.seen.items():
            parts[np.isin(prints, seen)] = name
        found: list[str] = parts.tolist()
        return found

    def check_genes(self, names: Sequence[str]) -> None:
        """Name missing genes, count unknown ones, and refuse data that lacks too many."""
        there = set(names)
        known = self.total_genes or self.input_genes
        missing = [name for name in self.input_genes if name not in there]
        if len(missing) > _MOST_MISSING * len(self.input_genes):
            raise ValueError(
                f"The data lacks {len(missing)} of the {len(self.input_genes)} genes that the net "
                f"reads ({_some(missing)}); its genes are called {_some(list(names))}: rename them."
            )
        if missing:
            rank_zero_warn(
                f"The data lacks {len(missing)} of the {len(self.input_genes)} genes that the net "
                f"reads; they are taken as not expressed: {_some(missing)}."
            )
        absent = sum(name not in there for name in known) - len(missing)
        if absent and self.total_genes:
            rank_zero_warn(
                f"The data lacks {absent} more of the {len(known)} genes whose counts made up a "
                "cell's total at training, so values may be somewhat larger: give all genes."
            )
        if unknown := len(there - set(known)):
            rank_zero_info(f"{unknown} genes that no cell expressed at training are ignored.")


def _list(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)


def _columns(matrix: Any, place: Mapping[str, int], names: Sequence[str]) -> Any:
    """Select columns by name; what is not there is 0."""
    from scipy.sparse import csr_matrix

    there = [(place[name], index) for index, name in enumerate(names) if name in place]
    old, new = np.array(there, dtype=np.int64).reshape(-1, 2).T
    ones = np.ones(len(old), dtype=matrix.dtype)
    picks = csr_matrix((ones, (old, new)), shape=(matrix.shape[1], len(names)))
    selected = (matrix @ picks).tocsr()
    selected.sort_indices()
    return selected


class Standardize:
    """Brings every gene to mean 0 and deviation 1."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean)
        self.std = torch.tensor(std)

    def __call__(self, values: Tensor) -> Tensor:
        return values.sub_(self.mean).div_(self.std)


def fingerprints(barcodes: Sequence[str], counted: Any) -> NDArray[np.int64]:
    """Return a number for each cell that tells it from all others, whatever file it is in.

    Barcodes of different experiments may be the same, so the counts are part of it.

    Args:
        barcodes: Names of the cells.
        counted: Their values over the genes of the training: CSR (cells, genes).
    """
    totals = np.asarray(counted.sum(1)).ravel()
    expressed = counted.getnnz(1)
    texts = (
        f"{barcode}|{number}|{total:.4g}".encode()
        for barcode, number, total in zip(barcodes, expressed, totals, strict=True)
    )
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)
