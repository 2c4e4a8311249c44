"""Read cells, preprocess their genes, and decode them into arrays."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from ._files import Save, check_unpacked_size
from ._fitted import PARTS, hash_rows, named_parts
from ._splits import grouped_split, stratified_split

if TYPE_CHECKING:
    from anndata import AnnData


_UNREADABLE = (
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
_MAX_LOG = 30.0  # above any log-normalised count


def read_cells(path: Path) -> "AnnData":
    """Read an .h5ad file or a 10x matrix folder, without executing any code in it."""
    import anndata
    import scanpy

    try:
        if path.is_file():
            _check_h5ad(path)
        cells = anndata.read_h5ad(path) if path.is_file() else scanpy.read_10x_mtx(path)
    except _UNREADABLE as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        kind = "an .h5ad file" if path.is_file() else "a 10x matrix"
        what = f"{type(error).__name__}: {first}"
        raise ValueError(
            f"{path} cannot be read as {kind} ({what}): re-export it with the tool that wrote "
            "it, or replace it."
        ) from error
    return cells


def _check_h5ad(path: Path) -> None:
    """Raise ValueError if a file refers to other files or would not fit in memory."""
    import h5py

    size = 0

    def check(name: str, item: Any) -> None:
        nonlocal size
        if isinstance(item, h5py.Group):
            for key in item:
                if isinstance(item.get(key, getlink=True), h5py.ExternalLink):
                    raise ValueError(f"{name}/{key} is a link to another file")
            return
        if item.external or item.is_virtual:
            raise ValueError(f"{name} is stored in another file")
        size += (item.size or 0) * item.dtype.itemsize
        check_unpacked_size(path, size)

    with h5py.File(path, "r") as file:
        check("", file)
        file.visititems(check)


def read_values(cells: "AnnData", layer: str | None, values: str) -> Any:
    """Return validated counts or log-normalised values as a float32 CSR matrix (cells, genes).

    Args:
        cells: The cells.
        layer: The layer to read, or None for X.
        values: Expected content, `counts` or `log`.
    """
    from scipy.sparse import csr_matrix

    where = "X" if layer is None else f"layer {layer!r}"
    if layer is not None and layer not in cells.layers:
        raise ValueError(f"`layer` must be a layer of the data{_layers(cells)}, got {layer!r}.")
    if not cells.n_obs or not cells.n_vars:
        raise ValueError(
            f"The data has {cells.n_obs} cells and {cells.n_vars} genes: both must be above 0."
        )
    source = cells.X if layer is None else cells.layers[layer]
    if source is None:
        raise ValueError(f"The data has no X: set `layer` to one with counts{_layers(cells)}.")
    found = csr_matrix(source, dtype=np.float32, copy=True)
    found.sum_duplicates()
    found.eliminate_zeros()
    if not np.isfinite(found.data).all():
        raise ValueError(f"{where} has values that are not finite: use counts.")
    if (found.data < 0).any():
        raise ValueError(
            f"{where} has negative values, so it is already scaled: set `layer` to one with "
            f"counts{_layers(cells)}, or to `raw` for `.raw`."
        )
    if values == "counts" and (found.data != np.floor(found.data)).any():
        raise ValueError(
            f"{where} has fractional values, so it is already normalised: "
            f"set `layer` to one with counts{_layers(cells)}, or to `raw` for `.raw`, or use "
            "the normalised values with `values: log`."
        )
    if values == "log" and found.nnz and (found.data == np.floor(found.data)).all():
        raise ValueError(f"{where} has only integers, so it contains counts: omit `values`.")
    if values == "log" and found.data.max(initial=0) > _MAX_LOG:
        raise ValueError(
            f"{where} has values up to {found.data.max():.0f}, so it is not log-normalised: "
            "omit `values`."
        )
    empty = np.flatnonzero(found.getnnz(1) == 0)
    if len(empty):
        raise ValueError(
            f"{len(empty)} cells in {where} have no counts, such as "
            f"{cells.obs_names[empty[0]]}: remove them."
        )
    return found


def _layers(cells: "AnnData") -> str:
    return f" ({', '.join(map(repr, cells.layers)) or 'none'})"


def log_normalize(counts: Any, target_sum: float = 1e4) -> Any:
    """Scale every cell to the same total count and apply log(1 + x)."""
    import anndata
    import scanpy

    normal = anndata.AnnData(counts.copy())
    scanpy.pp.normalize_total(normal, target_sum=target_sum)
    scanpy.pp.log1p(normal)
    return normal.X


def select_variable_genes(
    values: Any, number: int, min_cells: int = 0, flavor: str = "seurat_v3"
) -> NDArray[np.int64]:
    """Return the most variable genes, in the order in which the data lists them.

    Use `seurat_v3` for counts and `seurat` for log-normalised values. Genes expressed in fewer than
    `min_cells` cells are excluded, because too many such genes would make the regression singular.
    """
    import anndata
    import scanpy

    candidates = np.flatnonzero(values.getnnz(0) >= min_cells)
    if number > len(candidates):
        raise ValueError(
            f"`genes` must be at most {len(candidates)}, got {number}"
            + (f": only these are expressed in {min_cells} training cells." if min_cells else ".")
        )
    means = np.asarray(values[:, candidates].mean(0)).ravel()
    squares = np.asarray(values[:, candidates].power(2).mean(0)).ravel()
    varying = int((squares - means**2 > 1e-8 * np.maximum(squares, 1e-12)).sum())
    if varying < max(3, number):
        raise ValueError(
            f"`genes` must be at most {varying}, got {number}: only these vary between cells."
        )
    try:
        found = scanpy.pp.highly_variable_genes(
            anndata.AnnData(values[:, candidates]),
            n_top_genes=number,
            flavor=flavor,
            inplace=False,
            check_values=False,
        )
    except ValueError as error:  # the regression failed
        raise ValueError(
            f"{values.shape[0]} cells are not enough to select variable genes ({error}): remove "
            "rarely expressed genes, for example with "
            "scanpy.pp.filter_genes(cells, min_cells=3)."
        ) from error
    return candidates[np.flatnonzero(found["highly_variable"].to_numpy())]


def leiden_clusters(normal: Any, genes: NDArray[np.int64]) -> NDArray[Any]:
    """Compute the paper's labels, which are Leiden clusters of log-normalised values."""
    import anndata
    import scanpy

    chosen = anndata.AnnData(normal[:, genes])
    components = min(50, *(size - 1 for size in chosen.shape))
    scanpy.pp.pca(chosen, n_comps=components, svd_solver="arpack", random_state=0)
    scanpy.pp.neighbors(chosen, n_neighbors=15, n_pcs=components, random_state=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "In the future, the default backend")
        scanpy.tl.leiden(chosen, resolution=0.6, random_state=0, flavor="leidenalg")
    clusters: NDArray[Any] = chosen.obs["leiden"].astype(str).to_numpy(dtype=object)
    return clusters


def handle_rare(names: NDArray[Any], rare: str, smallest: int) -> NDArray[Any]:
    """Keep, merge or drop classes with fewer than `smallest` cells."""
    if rare == "keep":
        return names
    classes, sizes = np.unique(names[names != np.array(None)].astype(str), return_counts=True)
    names = names.copy()
    names[np.isin(names, classes[sizes < smallest])] = "rare" if rare == "merge" else None
    return names


def read_labels(cells: "AnnData", column: str, file: Path | None) -> NDArray[Any]:
    """Return a label column of `obs` or of a CSV file, with None for cells without a label.

    The first column of the CSV file contains barcodes.
    """
    table = cells.obs if file is None else _read_csv(file)
    if column not in table.columns:
        known = ", ".join(map(str, table.columns)) or "no columns"
        raise ValueError(
            f"`label_column` must be a column of {file or 'obs'} ({known}), got {column!r}"
            + (": for a column in a CSV file, set `label_file`." if file is None else ".")
        )
    if not table.index.is_unique:
        twice = table.index[table.index.duplicated()][0]
        raise ValueError(
            f"{file or 'obs'} lists cell {twice!r} more than once: remove the duplicates."
        )
    if not table.index.isin(cells.obs_names).any():
        raise ValueError(
            f"{file} contains none of the cells: its barcodes look like {table.index[0]!r}, but "
            f"barcodes in the data look like {cells.obs_names[0]!r}."
        )
    values = table[column].reindex(cells.obs_names)
    if values.dtype.kind == "f" and (values.dropna() % 1 == 0).all():
        values = values.astype("Int64")  # integers with missing values
    names: NDArray[Any] = values.astype(str).to_numpy(dtype=object)
    names[values.isna().to_numpy()] = None
    if file is None:
        names[names == "nan"] = None  # a missing value that was converted to a string
    if not any(name is not None for name in names):
        raise ValueError(f"No cell has a label in column {column!r}: choose another column.")
    return names


def _read_csv(file: Path) -> Any:
    """Read a CSV file of strings, indexed by its first column."""
    import pandas as pd

    try:
        table = pd.read_csv(file, dtype=str, keep_default_na=False, na_values=[""])
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as CSV ({error}): replace it.") from error
    if not len(table):
        raise ValueError(f"{file} has no rows: add labels.")
    return table.set_index(table.columns[0])


_MAX_MISSING = 0.1  # maximum share of input genes that may be missing
_MAX_NAMED = 10  # maximum number of genes listed in a message


@dataclass(frozen=True)
class CellPreparation:
    """Preprocessing of cells, as plain values for checkpoints and exports.

    Args:
        input_genes: Names of the input genes, in order.
        total_genes: Names of the genes that count towards a cell's total, which are all genes
            expressed in the original data. Empty if the values were already log-normalised.
        target_sum: Total count to which every cell is scaled before taking the logarithm.
        mean: Mean of each input; None if inputs are not standardised.
        std: Standard deviation of each input.
        class_names: Names of the classes, in the order of the outputs.
        seen: Fingerprints of the cells in each split of the original data.
        seen_labels: If labels are clusters, the classes of the cells in `seen`, because clustering
            other cells would give different classes.
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
            raise ValueError("The checkpoint was not trained on cells: use one that was.")
        return cls(**{key: value for key, value in values.items() if key != "kind"})

    def align(self, genes: Sequence[str], values: Any) -> tuple[Any, Any]:
        """Select genes by name and normalise.

        Args:
            genes: Unique gene names in the data.
            values: Counts or log-normalised values, as a CSR matrix (cells, genes).

        Returns:
            The unscaled inputs as a CSR matrix (cells, input genes), and their raw values.
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
        """Return each cell's split in training, or an empty string for unseen cells."""
        parts = np.full(len(prints), "", dtype=object)
        for name in ("train", "val", "test"):  # if a cell is in several splits, the last one wins
            parts[np.isin(prints, self.seen.get(name, ()))] = name
        found: list[str] = parts.tolist()
        return found

    def check_genes(self, names: Sequence[str]) -> None:
        """Warn about missing and unknown genes, or raise ValueError if too many are missing."""
        there = set(names)
        known = self.total_genes or self.input_genes
        missing = [name for name in self.input_genes if name not in there]
        if len(missing) > _MAX_MISSING * len(self.input_genes):
            raise ValueError(
                f"The data lacks {len(missing)} of the {len(self.input_genes)} genes that the net "
                f"expects ({_short(missing)}); it has {_short(list(names))}: rename its genes."
            )
        if missing:
            rank_zero_warn(
                f"The data lacks {len(missing)} of the {len(self.input_genes)} genes that the net "
                f"expects. Missing genes count as not expressed, and cells that did express them "
                f"are not recognised as training cells: {_short(missing)}."
            )
        absent = sum(name not in there for name in known) - len(missing)
        if absent and self.total_genes:
            rank_zero_warn(
                f"The data lacks {absent} more of the {len(known)} genes that counted towards a "
                "cell's total in training, so values may be slightly larger: provide all genes."
            )
        if unknown := len(there - set(known)):
            rank_zero_info(f"{unknown} genes that no training cell expressed are ignored.")


def _short(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + ", ..." * (len(names) > _MAX_NAMED)


def _select_columns(matrix: Any, place: Mapping[str, int], names: Sequence[str]) -> Any:
    """Select columns by name, and fill missing columns with 0."""
    from scipy.sparse import csr_matrix

    there = [(place[name], index) for index, name in enumerate(names) if name in place]
    old, new = np.array(there, dtype=np.int64).reshape(-1, 2).T
    ones = np.ones(len(old), dtype=matrix.dtype)
    picks = csr_matrix((ones, (old, new)), shape=(matrix.shape[1], len(names)))
    selected = (matrix @ picks).tocsr()
    selected.sort_indices()
    return selected


class Standardize:
    """Standardises every gene in place."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean)
        self.std = torch.tensor(std)

    def __call__(self, values: Tensor) -> Tensor:
        return values.sub_(self.mean).div_(self.std)


def compute_fingerprints(raw: Any) -> NDArray[np.int64]:
    """Return a hash of each cell's raw values, which does not depend on file or barcode.

    Args:
        raw: Raw values of the input genes, as a CSR matrix (cells, genes).
    """
    texts = (
        raw.indices[start:end].astype("<i4").tobytes() + raw.data[start:end].tobytes()
        for start, end in zip(raw.indptr, raw.indptr[1:], strict=False)
    )
    return hash_rows(texts)


Names = NDArray[Any]  # strings, or None if unlabelled
Rows = dict[str, NDArray[np.int64]]


class CellDecoder:
    """Decodes cells into tables, fitting the preparation unless one is given.

    Args:
        settings: The DataModule that provides the options.
        cells: Cells in memory, or None to read them from the DataModule's path.
        preparation: Preparation from a checkpoint, or None to fit one to the cells.
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
                raise ValueError("The data has no `.raw`: omit `layer`, or choose another layer.")
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
        metadata, matrix, labels, rows = fit(values)
        for name, array in (
            ("values", matrix.data),
            ("columns", matrix.indices),
            ("starts", matrix.indptr.astype(np.int64)),
            ("labels", labels),
            ("fingerprints", metadata.pop("fingerprints")),
            *((part, of) for part, of in rows.items() if len(of)),
        ):
            save(name, [array])
        save.metadata(cells=self.cells.obs_names.tolist(), **metadata)

    def _fit(self, values: Any) -> tuple[dict[str, Any], Any, NDArray[np.int64], Rows]:
        """Determine genes, classes and splits from these cells."""
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
        metadata = {
            "class_names": list(fitted.class_names),
            "input_genes": list(fitted.input_genes),
            "total_genes": list(fitted.total_genes),
            "mean": scaled_by.mean(0).tolist(),
            "std": np.where(deviation > 0, deviation, 1).tolist(),  # constant genes become 0
            "labels": names.tolist(),
            "fingerprints": compute_fingerprints(raw),
        }
        return metadata, matrix, labels, rows

    def _align(self, values: Any) -> tuple[dict[str, Any], Any, NDArray[np.int64], Rows]:
        """Align the cells with a checkpoint, and recognise cells that were in its splits."""
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
                f"The data has labels that the net does not know ({some}): cells with such a label "
                "are predicted but not tested."
            )
            unlabelled = f"the labels ({some}) are not among {', '.join(fitted.class_names)}."
        parts = np.array(fitted.find_parts(prints))
        rows = {part: np.flatnonzero((parts == part) & (labels >= 0)) for part in ("train", "val")}
        rows["test"] = np.flatnonzero(~np.isin(parts, ("train", "val")) & (labels >= 0))
        if (labels >= 0).any():
            unlabelled = "the net was trained on all of them."
        metadata = {
            "class_names": list(fitted.class_names),
            "input_genes": list(fitted.input_genes),
            "labels": names.tolist(),
            "unlabelled": unlabelled,
            "fingerprints": prints,
        }
        return metadata, matrix, labels, rows

    def _find_labels(self, prints: NDArray[np.int64]) -> tuple[Names, str]:
        """Return the labels, and the reason why there are none if labels are missing."""
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
            return none, f"set `label_column` to the column with labels; {self._list_columns()}."
        names = np.array([known.get(print_) for print_ in prints.tolist()], dtype=object)
        return names, "labels are clusters of training cells, and the data contains none of these."

    def _labels(self, normal: Any) -> Names:
        s = self.settings
        if s.label_column is not None:
            return read_labels(self.cells, s.label_column, s.label_file)
        if not s.leiden:
            raise ValueError(
                f"Set `label_column` to the column with labels; {self._list_columns()}. For one in "
                "a CSV file, also set `label_file`. `leiden: true` uses Leiden clusters instead, "
                "which are not ground truth."
            )
        # As in the paper, a method designed for counts, on log-normalised values of all cells.
        return leiden_clusters(normal, select_variable_genes(normal, min(2000, normal.shape[1])))

    def _list_columns(self) -> str:
        return f"obs has {', '.join(map(str, self.cells.obs.columns)) or 'no column'}"

    def _split(
        self, labels: NDArray[np.int64], labelled: NDArray[np.int64], class_names: Sequence[str]
    ) -> Rows:
        """Split the labelled cells, and return the rows of each split."""
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
