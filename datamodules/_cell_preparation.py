"""How counts of cells become the inputs of a net: fitted once, then applied to any file by name."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from ._cells import log_normalized

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
        seen_labels: The class of each of them, where labels are clusters of the cells: they belong
            to those cells, and clustering others would give other ones.
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
        """Return it as numbers, strings, lists and dicts."""
        return {"kind": "cells", **asdict(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "CellPreparation":
        """Read it back, from a checkpoint.

        Raises:
            ValueError: If the values are of other data than cells.
        """
        names = {entry.name for entry in fields(cls)}
        needed = {"input_genes", "total_genes", "class_names"}
        if values.get("kind") != "cells" or not needed <= values.keys() <= {*names, "kind"}:
            raise ValueError("The checkpoint was not trained on cells: give one that was.")
        return cls(**{key: value for key, value in values.items() if key != "kind"})

    def align(self, genes: Sequence[str], values: Any) -> tuple[Any, Any]:
        """Select genes by name, and normalise.

        Args:
            genes: Names of the genes of the data, all different.
            values: Counts, or log-normalised values: CSR (cells, genes).

        Returns:
            The inputs, CSR (cells, input genes), not yet scaled, and the same as they came.
        """
        place = {name: index for index, name in enumerate(genes)}
        raw = _columns(values, place, self.input_genes)
        if not self.total_genes:
            return raw, raw
        counted = _columns(values, place, self.total_genes)
        known = {name: index for index, name in enumerate(self.total_genes)}
        normal = log_normalized(counted, self.target_sum)
        return _columns(normal, known, self.input_genes), raw

    def parts_of(self, prints: NDArray[np.int64]) -> list[str]:
        """Return the part of the training that each cell was in, by its fingerprint."""
        parts = np.full(len(prints), "", dtype=object)
        for name in ("train", "val", "test"):  # of equal cells, the one that may be tested counts
            parts[np.isin(prints, self.seen.get(name, ()))] = name
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
                f"reads; they are taken as not expressed, and cells that did express them are not "
                f"recognised as trained on: {_some(missing)}."
            )
        absent = sum(name not in there for name in known) - len(missing)
        if absent and self.total_genes:
            rank_zero_warn(
                f"The data lacks {absent} more of the {len(known)} genes whose counts made up a "
                "cell's total at training, so values may be somewhat larger: give all genes."
            )
        if unknown := len(there - set(known)):
            rank_zero_info(f"{unknown} genes that no cell expressed at training are ignored.")


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


def fingerprints(raw: Any) -> NDArray[np.int64]:
    """Return a number for each cell that tells it from others, whatever file and name it has.

    Args:
        raw: Values of the input genes as they came, before any scaling: CSR (cells, genes).
    """
    texts = (
        raw.indices[start:end].astype("<i4").tobytes() + raw.data[start:end].tobytes()
        for start, end in zip(raw.indptr, raw.indptr[1:], strict=False)
    )
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)
