"""PBMC3k: blood cells by the genes that they express; any other AnnData works as well."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ._cells import (
    column_of,
    counts_of,
    leiden_clusters,
    log_normalized,
    read_cells,
    variable_genes,
)
from ._files import Download
from ._part import Part, stratified_split
from ._tables import Save, SparseTable, Tables
from .base import BaseDataModule, one_of

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["PBMC3kDataModule"]

_PARTS = ("train", "val", "test")


class PBMC3kDataModule(BaseDataModule):
    """2,700 blood cells: log-normalised counts of their most variable genes, by cell type.

    70 % of the cells are for training, 10 % for validation, 20 % for testing, stratified. The
    labels are clusters of the same counts that are classified, no independent truth; those of the
    paper (Leiden) are made with all cells. The matrix stays sparse until a batch is cut. `predict`
    goes through all labelled cells, those that were trained on included: see `add_predictions`.

        root/pbmc3k/filtered_gene_bc_matrices/hg19/{matrix.mtx,genes.tsv,barcodes.tsv}

    Licence: CC BY 4.0. Reference: 10x Genomics, "3k PBMCs from a Healthy Donor", Cell Ranger 1.1.0,
    2016; F. A. Wolf, P. Angerer, F. J. Theis, "SCANPY", Genome Biology 19:15, 2018. 8 MB packed.

    Args:
        batch_size: Cells in a training batch.
        eval_batch_size: Cells in a batch of validation, test and predict; `batch_size` if None.
        path: An .h5ad file or a folder with a 10x matrix, instead of PBMC3k.
        layer: Layer with the counts; X if None.
        label_column: Column of labels, in `obs` or in `label_file`; cells without one are left out.
            The paper's Leiden clusters if None.
        label_file: CSV file with barcodes in its first column; also looked for under the root.
        smallest_cluster: Leiden clusters of fewer cells are merged into one class, `rare`.
        genes: How many genes are inputs: the most variable ones.
        fit_on: Which cells choose the genes and their scale: `train` the training cells, by their
            counts; `paper` all of them, test cells included, by log-normalised values.
        scale: Whether every gene is brought to mean 0 and deviation 1.
        **options: The other arguments of `BaseDataModule`: `root`, `split_seed` and so on.
    """

    needs = dict.fromkeys(("anndata", "scanpy", "skmisc", "leidenalg"), "'dg-lightning[cells]'")
    downloads = (
        Download(
            "https://cf.10xgenomics.com/samples/cell-exp/1.1.0/pbmc3k/"
            "pbmc3k_filtered_gene_bc_matrices.tar.gz",
            "md5:f76d73bf7a582aaf32b798bcae9574d3",
            "pbmc3k/filtered_gene_bc_matrices",
            folder="filtered_gene_bc_matrices",
        ),
    )

    def __init__(
        self,
        batch_size: int = 256,
        eval_batch_size: int | None = None,
        path: str | None = None,
        layer: str | None = None,
        label_column: str | None = None,
        label_file: str | None = None,
        smallest_cluster: int = 30,
        genes: int = 2000,
        fit_on: Literal["train", "paper"] = "train",
        scale: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)
        if label_file is not None and label_column is None:
            raise ValueError("`label_file` needs `label_column`, the name of its label column.")
        if genes < 1 or smallest_cluster < 1:
            raise ValueError(
                f"`genes` and `smallest_cluster` must be positive, got {genes}, {smallest_cluster}."
            )
        own = self.root / "pbmc3k" / "filtered_gene_bc_matrices" / "hg19"
        self.path = own if path is None else Path(path)
        self.layer = layer
        self.label_column = label_column
        self.label_file = None if label_file is None else Path(label_file)
        if self.label_file is not None and not self.label_file.exists():
            self.label_file = self.root / self.label_file
        self.smallest_cluster = smallest_cluster
        self.genes = genes
        self.fit_on = one_of("fit_on", fit_on, "train", "paper")
        self.scale = scale
        self._cells: AnnData | None = None

    @property
    @override
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.facts["class_names"])

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the genes, in the order of the inputs."""
        return tuple(self.facts["genes"])

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        return (self.genes,)

    @classmethod
    def from_anndata(cls, cells: "AnnData", **settings: Any) -> "PBMC3kDataModule":
        """Return a DataModule of cells in memory; nothing of them is written to disk."""
        data = cls(**settings)
        data._cells = cells
        return data

    @override
    def sources(self) -> Sequence[Path | str]:
        if self._cells is not None:
            return ()
        labels = [] if self.label_file is None else [self.label_file]
        if self.path.suffix == ".h5ad" or self.path.is_file():
            return [self.path, *labels]
        names = ["matrix.mtx", "genes.tsv", "barcodes.tsv"]
        if (self.path / "features.tsv.gz").exists():  # as later versions of Cell Ranger write it
            names = ["matrix.mtx.gz", "features.tsv.gz", "barcodes.tsv.gz"]
        return [*(self.path / name for name in names), *labels]

    @override
    def settings(self) -> Mapping[str, Any]:
        names = ("layer", "label_column", "smallest_cluster", "genes", "fit_on", "split_seed")
        return {name: getattr(self, name) for name in names}

    @override
    def decode(self, save: Save) -> None:
        threads = torch.get_num_threads()
        try:
            self._decode(save)
        finally:
            torch.set_num_threads(threads)  # numba, in scanpy, lets torch use all cores

    def _decode(self, save: Save) -> None:
        cells = read_cells(self.path) if self._cells is None else self._cells
        counts = counts_of(cells, self.layer)
        normal = log_normalized(cells, counts)
        names = self._label_names(cells, normal)
        labelled = np.flatnonzero(names != np.array(None))
        class_names, labels = np.unique(names[labelled].astype(str), return_inverse=True)
        parts = self._rows_of_parts(torch.from_numpy(labels), class_names.tolist())
        counted = normal[labelled[parts["train"]]].copy()
        counted.X = counts[labelled[parts["train"]]]
        if self.fit_on == "paper":
            genes = variable_genes(normal, self.genes)
        else:
            genes = variable_genes(counted, self.genes, least_cells=3)
        matrix = normal.X[labelled][:, genes]
        save("values", [matrix.data])
        save("columns", [matrix.indices])
        save("starts", [matrix.indptr.astype(np.int64)])
        save("labels", [labels])
        for part, rows in parts.items():
            save(part, [rows])
        fitted = (matrix if self.fit_on == "paper" else matrix[parts["train"]]).toarray()
        deviation = fitted.std(0, ddof=1)
        save("mean", [fitted.mean(0)])
        save("std", [np.where(deviation > 0, deviation, 1)])  # a constant gene becomes 0
        save.facts(
            class_names=class_names.tolist(),
            genes=normal.var_names[genes].tolist(),
            cells=normal.obs_names[labelled].tolist(),
        )

    def _label_names(self, cells: "AnnData", normal: "AnnData") -> NDArray[Any]:
        if self.label_column is not None:
            return column_of(cells, self.label_column, self.label_file)
        # As the paper: a rule that is meant for counts, on log-normalised values of all cells.
        genes = variable_genes(normal, min(2000, normal.n_vars))
        return leiden_clusters(normal, genes, self.smallest_cluster)

    def _rows_of_parts(
        self, labels: Tensor, class_names: Sequence[str]
    ) -> dict[str, NDArray[np.int64]]:
        every = np.arange(len(labels))
        rest, test = stratified_split(every, labels, 0.2, self.split_seed, class_names)
        train, val = stratified_split(rest, labels, 0.125, self.split_seed, class_names)
        return dict(zip(_PARTS, (train, val, test), strict=True))

    @override
    def split(self, tables: Tables) -> dict[str, Part]:
        matrix = SparseTable(tables["values"], tables["columns"], tables["starts"], self.genes)
        mean, std = (torch.from_numpy(tables[name].array.copy()) for name in ("mean", "std"))
        prepare = _Standardize(mean, std) if self.scale else None
        labels = tables.labels()
        rows = {name: tables[name].array.copy() for name in _PARTS}
        self._every = Part(matrix, np.arange(len(labels)), labels, prepare)
        return {name: Part(matrix, of, labels[of], prepare) for name, of in rows.items()}

    @override
    def part_to_predict(self) -> Part:
        self.part("test")  # or say that setup comes first
        return self._every

    def add_predictions(
        self, cells: "AnnData", predictions: Tensor | Sequence[Any], key: str = "prediction"
    ) -> None:
        """Write what `Trainer.predict` returned into `obs`, beside the part that a cell was in.

        Args:
            cells: Cells with the barcodes of this data; it is changed in place.
            predictions: What `Trainer.predict` returns, batches of classes or dicts with them under
                `prediction`; or a tensor with a class for every labelled cell.
            key: Column of `obs`; `<key>_part` says whether a cell was trained on.
        """
        import pandas as pd

        if not isinstance(predictions, Tensor):
            batches = [b["prediction"] if isinstance(b, dict) else b for b in predictions]
            predictions = torch.cat(batches)
        names, barcodes = np.array(self.class_names), self.facts["cells"]
        if len(predictions) != len(barcodes):
            raise ValueError(
                f"Expected a prediction for each of {len(barcodes)} cells, got {len(predictions)}."
            )
        parts = np.empty(len(barcodes), dtype=object)
        for name, part in self._parts.items():
            parts[part.rows] = name
        for column, values in {key: names[predictions.cpu().numpy()], f"{key}_part": parts}.items():
            series = pd.Series(values, index=barcodes).reindex(cells.obs_names)
            cells.obs[column] = series.astype("category")


class _Standardize:
    """Brings every gene to mean 0 and deviation 1."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.mean = mean
        self.std = std

    def __call__(self, values: Tensor) -> Tensor:
        return values.sub_(self.mean).div_(self.std)
