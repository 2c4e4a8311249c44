"""Decode an AnnData into tables of inputs, labels and splits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from ._cell_preparation import CellPreparation, compute_fingerprints
from ._cells import (
    handle_rare,
    leiden_clusters,
    log_normalize,
    read_cells,
    read_labels,
    read_values,
    select_variable_genes,
)
from ._fitted import PARTS, named_parts
from ._part import grouped_split, stratified_split
from ._tables import Save

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["CellDecoder"]

Names = NDArray[Any]  # of str, None if unlabelled
Rows = dict[str, NDArray[np.int64]]


class CellDecoder:
    """Decodes cells into tables, fitting the preparation unless one is given.

    Args:
        settings: The DataModule, read for its arguments.
        cells: Cells in memory; read from the DataModule's path if None.
        preparation: Preparation of a checkpoint; fitted to the cells if None.
    """

    def __init__(
        self, settings: Any, cells: "AnnData | None", preparation: CellPreparation | None
    ) -> None:
        self.settings = settings
        from anndata.utils import make_index_unique

        self.preparation = preparation
        self.layer = settings.layer
        self.cells = read_cells(settings.path) if cells is None else cells
        if self.layer == "raw" and "raw" not in self.cells.layers:
            if self.cells.raw is None:
                raise ValueError("The data has no `.raw`: omit `layer`, or name another.")
            raw, self.layer = self.cells.raw.to_adata(), None
            raw.obs = self.cells.obs
            self.cells = raw
        if self.cells.isbacked:
            self.cells = self.cells.to_memory()
        self.genes: Any = make_index_unique(self.cells.var_names)

    def decode(self, save: Save) -> None:
        """Save all tables and metadata."""
        values = read_values(self.cells, self.layer, self.settings.values)
        fit = self._fit if self.preparation is None else self._align
        facts, matrix, labels, rows = fit(values)
        for name, array in (
            ("values", matrix.data),
            ("columns", matrix.indices),
            ("starts", matrix.indptr.astype(np.int64)),
            ("labels", labels),
            ("fingerprints", facts.pop("fingerprints")),
            *((part, of) for part, of in rows.items() if len(of)),
        ):
            save(name, [array])
        save.facts(cells=self.cells.obs_names.tolist(), **facts)

    def _fit(self, values: Any) -> tuple[dict[str, Any], Any, NDArray[np.int64], Rows]:
        """Select genes, classes and splits from these cells."""
        s = self.settings
        is_log = s.values == "log"
        normal = values if is_log else log_normalize(values)
        names = self._labels(normal)
        names = handle_rare(names, "merge" if s.leiden else s.rare, s.smallest_cluster)
        labelled = np.flatnonzero(names != np.array(None))
        if not len(labelled):
            raise ValueError(f"No class has {s.smallest_cluster} cells: lower `smallest_cluster`.")
        class_names, of_labelled = np.unique(names[labelled].astype(str), return_inverse=True)
        labels = np.full(len(names), -1)
        labels[labelled] = of_labelled
        rows = self._split(labels, labelled, class_names.tolist())
        if s.fit_on == "paper" or is_log:
            chosen = normal if s.fit_on == "paper" else normal[rows["train"]]
            flavor = "seurat" if is_log else "seurat_v3"
            genes = select_variable_genes(chosen, s.genes, 3 if is_log else 0, flavor)
        else:
            genes = select_variable_genes(values[rows["train"]], s.genes, min_cells=3)
        every = self.genes
        expressed = np.flatnonzero(values.getnnz(0))
        fitted = CellPreparation(
            every[genes].tolist(),
            [] if is_log else every[expressed].tolist(),
            class_names.tolist(),
        )
        matrix, raw = fitted.align(self.genes, values)
        scaled_by = matrix[labelled if s.fit_on == "paper" else rows["train"]].toarray()
        deviation = scaled_by.std(0, ddof=1)
        facts = {
            "class_names": list(fitted.class_names),
            "input_genes": list(fitted.input_genes),
            "total_genes": list(fitted.total_genes),
            "mean": scaled_by.mean(0).tolist(),
            "std": np.where(deviation > 0, deviation, 1).tolist(),  # a constant gene becomes 0
            "labels": names.tolist(),
            "fingerprints": compute_fingerprints(raw),
        }
        return facts, matrix, labels, rows

    def _align(self, values: Any) -> tuple[dict[str, Any], Any, NDArray[np.int64], Rows]:
        """Align the cells with a checkpoint; cells of its splits are recognised."""
        fitted = self.preparation
        assert fitted is not None
        fitted.check_genes(self.genes)
        matrix, raw = fitted.align(self.genes, values)
        prints = compute_fingerprints(raw)
        names, unlabelled = self._find_labels(prints)
        place = {name: index for index, name in enumerate(fitted.class_names)}
        if self.settings.rare == "merge" and "rare" in place:
            names[[name is not None and name not in place for name in names]] = "rare"
        labels = np.array([place.get(name, -1) for name in names])
        unknown = {str(name) for name in names if name is not None and name not in place}
        if unknown:
            some = ", ".join(sorted(unknown)[:10])
            rank_zero_warn(
                f"The data has labels that the net does not know ({some}): their cells are "
                "predicted but not tested."
            )
            unlabelled = f"its labels ({some}) are none of {', '.join(fitted.class_names)}."
        parts = np.array(fitted.find_parts(prints))
        rows = {part: np.flatnonzero((parts == part) & (labels >= 0)) for part in ("train", "val")}
        rows["test"] = np.flatnonzero(~np.isin(parts, ("train", "val")) & (labels >= 0))
        if (labels >= 0).any():
            unlabelled = "all labelled cells are cells that the net was trained on."
        facts = {
            "class_names": list(fitted.class_names),
            "input_genes": list(fitted.input_genes),
            "labels": names.tolist(),
            "unlabelled": unlabelled,
            "fingerprints": prints,
        }
        return facts, matrix, labels, rows

    def _find_labels(self, prints: NDArray[np.int64]) -> tuple[Names, str]:
        """Return the labels, and the reason if there are none."""
        s, fitted = self.settings, self.preparation
        assert fitted is not None
        none = np.full(self.cells.n_obs, None, dtype=object)
        if s.label_column is not None:
            try:
                return read_labels(self.cells, s.label_column, s.label_file), ""
            except (ValueError, OSError) as error:
                return none, f"{error}"
        known = {
            print_: fitted.class_names[label]
            for part, labels in fitted.seen_labels.items()
            for print_, label in zip(fitted.seen[part], labels, strict=True)
        }
        if not known:
            return none, f"name the label column with `label_column`; {self._list_columns()}."
        names = np.array([known.get(print_) for print_ in prints.tolist()], dtype=object)
        return names, "labels are clusters of training cells, and the data has none of these cells."

    def _labels(self, normal: Any) -> Names:
        s = self.settings
        if s.label_column is not None:
            return read_labels(self.cells, s.label_column, s.label_file)
        if not s.leiden:
            raise ValueError(
                f"Name the label column with `label_column`; {self._list_columns()}. One of a CSV "
                "file needs `label_file`, too. `leiden: true` uses Leiden clusters instead, which "
                "are no ground truth."
            )
        # As in the paper: a method meant for counts, on log-normalised values of all cells.
        return leiden_clusters(normal, select_variable_genes(normal, min(2000, normal.shape[1])))

    def _list_columns(self) -> str:
        return f"obs has {', '.join(map(str, self.cells.obs.columns)) or 'no column'}"

    def _split(
        self, labels: NDArray[np.int64], labelled: NDArray[np.int64], class_names: Sequence[str]
    ) -> Rows:
        """Return the rows of each split, among the labelled cells."""
        s = self.settings
        if s.split_by is None:
            of = torch.from_numpy(labels)
            rest, test = stratified_split(labelled, of, 0.2, s.split_seed, class_names)
            train, val = stratified_split(rest, of, 0.125, s.split_seed, class_names)
            return dict(zip(PARTS, (train, val, test), strict=True))
        if s.split_by not in self.cells.obs.columns:
            raise ValueError(
                f"`split_by` must be a column of obs, got {s.split_by!r}; {self._list_columns()}."
            )
        groups = self.cells.obs[s.split_by].astype(str).to_numpy(dtype=object)
        given = named_parts(dict.fromkeys(groups[labelled]), f"Column {s.split_by!r}")
        if given is not None:
            parts = np.array([given[group] for group in groups[labelled]])
            return {part: labelled[parts == part] for part in PARTS}
        rest, test = grouped_split(labelled, labels, groups, 0.2, s.split_seed)
        train, val = grouped_split(rest, labels, groups, 0.125, s.split_seed)
        return dict(zip(PARTS, (train, val, test), strict=True))
