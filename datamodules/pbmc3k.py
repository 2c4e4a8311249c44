"""PBMC3k: predicts the types of blood cells from gene expression. Also reads any AnnData."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ._cells import CellDecoder, CellPreparation, Standardize
from ._files import Download, Save, SparseTable, Tables
from ._fitted import FittedDataModule
from ._splits import Split
from .base import check_choice

if TYPE_CHECKING:
    from anndata import AnnData


class PBMC3kDataModule(FittedDataModule):
    """2,700 blood cells, with their type and log-normalised counts of the most variable genes.

    The stratified split is 70 % training, 10 % validation and 20 % test. The labels are not
    independent ground truth, but clusters of the same counts that are classified. The paper's
    labels (Leiden clusters) are computed from all cells. The matrix stays sparse until a batch is
    read. `predict` covers all cells, including training cells and cells without a label.

    Genes, their order, scaling and classes are saved in the checkpoint. With a checkpoint, cells
    from any file are aligned to it by gene name, and `test` uses the labelled cells that the model
    has not seen. See `use_preparation`.

        root/pbmc3k/filtered_gene_bc_matrices/hg19/{matrix.mtx,genes.tsv,barcodes.tsv}

    Licence: CC BY 4.0. Reference: 10x Genomics, "3k PBMCs from a Healthy Donor", Cell Ranger 1.1.0,
    2016; F. A. Wolf, P. Angerer, F. J. Theis, "SCANPY", Genome Biology 19:15, 2018. 8 MB packed.

    Args:
        batch_size: Training batch size.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        path: An .h5ad file or a folder with a 10x matrix. Defaults to PBMC3k.
        layer: Layer that contains the counts. None means X, and `raw` means `.raw`.
        values: What the layer contains: `counts`, or `log` for log-normalised values.
        label_column: Label column in `obs` or `label_file`. Unlabelled cells are only predicted.
        label_file: CSV file with barcodes in its first column. The path is relative to the working
            folder or to the root.
        leiden: Whether to use Leiden clusters as labels, as in the paper. Defaults to True if
            neither `path` nor `label_column` is given.
        rare: How to treat classes with fewer than `smallest_cluster` cells: `keep` them, `merge`
            them into the class `rare`, or `leave_out`. Leiden clusters are always merged.
        smallest_cluster: Classes with fewer cells than this are rare.
        split_by: Column of `obs` with groups, such as donors, whose cells must stay together. It
            may also contain the values `train`, `val` and `test` instead of groups.
        genes: Number of input genes. The most variable genes are selected.
        fit_on: Cells that determine genes and scaling. `train` uses the counts of training cells.
            `paper` uses the log-normalised values of all cells, including test cells.
        scale: Whether to standardise every gene to mean 0 and standard deviation 1.
        **options: Further arguments of `BaseDataModule`, such as `root` and `split_seed`.
    """

    sample = "cell"
    preparation_type = CellPreparation
    needs = dict.fromkeys(
        ("anndata", "scanpy", "skmisc", "leidenalg"), "anndata scanpy scikit-misc leidenalg"
    )
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
        values: Literal["counts", "log"] = "counts",
        label_column: str | None = None,
        label_file: str | None = None,
        leiden: bool | None = None,
        rare: Literal["keep", "merge", "leave_out"] = "keep",
        smallest_cluster: int = 30,
        split_by: str | None = None,
        genes: int = 2000,
        fit_on: Literal["train", "paper"] = "train",
        scale: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)
        if label_file is not None and label_column is None:
            raise ValueError("`label_file` needs `label_column`: set it to the column with labels.")
        if leiden and label_column is not None:
            raise ValueError("`leiden` and `label_column` are mutually exclusive: set one.")
        if genes < 1 or smallest_cluster < 1:
            raise ValueError(
                f"`genes` and `smallest_cluster` must be positive, got {genes}, {smallest_cluster}."
            )
        default = self.root / "pbmc3k/filtered_gene_bc_matrices/hg19"
        self.path = default if path is None else Path(path)
        self.layer = layer
        self.values = check_choice("values", values, "counts", "log")
        self.label_column = label_column
        self.label_file = None if label_file is None else Path(label_file)
        if self.label_file is not None and not self.label_file.exists():
            self.label_file = self.root / self.label_file
        self.leiden = path is None and label_column is None if leiden is None else leiden
        self.rare = check_choice("rare", rare, "keep", "merge", "leave_out")
        self.smallest_cluster = smallest_cluster
        self.split_by = split_by
        self.genes = genes
        self.fit_on = check_choice("fit_on", fit_on, "train", "paper")
        self.scale = scale
        self._cells: AnnData | None = None

    @property
    @override
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.metadata["class_names"])

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Gene names, in input order."""
        return tuple(self.metadata["input_genes"])

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        return (self.genes if self._preparation is None else len(self._preparation.input_genes),)

    @classmethod
    def from_anndata(cls, cells: "AnnData", **settings: Any) -> "PBMC3kDataModule":
        """Return a DataModule for cells in memory, without writing to disk."""
        data = cls(**settings)
        data._cells = cells
        data.leiden = bool(settings.get("leiden"))
        return data

    @override
    def sources(self) -> Sequence[Path | str]:
        if self._cells is not None:
            return ()
        labels = [] if self.label_file is None else [self.label_file]
        if self.path.suffix == ".h5ad" or self.path.is_file():
            return [self.path, *labels]
        names = ["matrix.mtx", "genes.tsv", "barcodes.tsv"]
        if (self.path / "features.tsv.gz").exists():  # written by newer versions of Cell Ranger
            names = ["matrix.mtx.gz", "features.tsv.gz", "barcodes.tsv.gz"]
        return [*(self.path / name for name in names), *labels]

    @override
    def _missing_error(self, missing: Sequence[Path], why: str = "") -> FileNotFoundError:
        if self.path in (path.parent for path in missing):
            below = [*self.path.glob("*/matrix.mtx*"), *self.path.glob("*/*/matrix.mtx*")]
            why += f"; there is a matrix in {below[0].parent}" if below else ""
        return super()._missing_error(missing, why)

    @override
    def settings(self) -> Mapping[str, Any]:
        names = (
            *("layer", "values", "label_column", "leiden", "rare", "smallest_cluster", "split_by"),
            *("genes", "fit_on", "split_seed"),
        )
        return {name: getattr(self, name) for name in names} | self.preparation_settings()

    @override
    def decode(self, save: Save) -> None:
        threads = torch.get_num_threads()
        try:
            CellDecoder(self, self._cells, self._preparation).decode(save)
        finally:
            torch.set_num_threads(threads)  # scanpy uses numba, which sets it to all cores

    @override
    def split(self, tables: Tables) -> dict[str, Split]:
        columns = len(tables.metadata["input_genes"])
        matrix = SparseTable(tables["values"], tables["columns"], tables["starts"], columns)
        scaling = self._scaling(tables.metadata)
        prepare = None if scaling[0] is None else Standardize(*scaling)
        return self.make_parts(tables, matrix, tables.labels(), prepare)

    def _scaling(self, metadata: Mapping[str, Any]) -> tuple[Any, Any]:
        if self._preparation is not None:
            return self._preparation.mean, self._preparation.std
        return (metadata["mean"], metadata["std"]) if self.scale else (None, None)

    @override
    def check_parts(self, parts: Mapping[str, Split]) -> None:
        # If cells are split by group, only the training split must contain every class.
        is_grouped = self._preparation is None and self.split_by is not None
        super().check_parts({"train": parts["train"]} if is_grouped else parts)

    @override
    def fitted_preparation(self) -> CellPreparation:
        tables = self._tables()
        metadata, prints = tables.metadata, tables["fingerprints"].array
        mean, std = self._scaling(metadata)
        return CellPreparation(
            metadata["input_genes"],
            metadata["total_genes"],
            metadata["class_names"],
            mean=mean,
            std=std,
            seen={name: prints[part.rows].tolist() for name, part in self._parts.items()},
            seen_labels={n: p.labels.tolist() for n, p in self._parts.items() if self.leiden},
        )

    @override
    def describe_samples(self) -> dict[str, Sequence[Any]]:
        return {
            "barcode": self.metadata["cells"],
            "true_label": [name or "" for name in self.metadata["labels"]],
            "part": self.current_preparation().find_parts(self._tables()["fingerprints"].array),
        }

    def add_predictions(
        self, cells: "AnnData", predictions: Tensor | Sequence[Any], key: str = "prediction"
    ) -> None:
        """Write predictions and the split of each cell into `obs`.

        Args:
            cells: Cells with the barcodes of this data; modified in place.
            predictions: Output of `Trainer.predict`, as batches of classes or as dicts with the
                key `prediction`. May also be a tensor with the class of every cell.
            key: Column of `obs` for the predictions. The column `<key>_part` contains the splits.
        """
        import pandas as pd

        if not isinstance(predictions, Tensor):
            batches = [b["prediction"] if isinstance(b, dict) else b for b in predictions]
            predictions = torch.cat(batches)
        names, barcodes = np.array(self.class_names), self.metadata["cells"]
        if len(predictions) != len(barcodes):
            raise ValueError(
                f"Expected a prediction for each of {len(barcodes)} cells, got {len(predictions)}."
            )
        parts = [part or None for part in self.describe_samples()["part"]]
        for column, values in {key: names[predictions.cpu().numpy()], f"{key}_part": parts}.items():
            series = pd.Series(values, index=barcodes).reindex(cells.obs_names)
            cells.obs[column] = series.astype("category")
