"""Single cells: reading, labels and genes, with scanpy."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = [
    "column_of",
    "counts_of",
    "leiden_clusters",
    "log_normalized",
    "read_cells",
    "variable_genes",
]


def read_cells(path: Path) -> "AnnData":
    """Read an .h5ad file, or a folder with a 10x matrix."""
    import anndata
    import scanpy

    try:
        cells = anndata.read_h5ad(path) if path.is_file() else scanpy.read_10x_mtx(path)
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read ({first}): get it again.") from error
    cells.var_names_make_unique()
    return cells


def counts_of(cells: "AnnData", layer: str | None) -> Any:
    """Return the counts as a CSR matrix (cells, genes) of float32."""
    from scipy.sparse import csr_matrix

    if layer is not None and layer not in cells.layers:
        known = ", ".join(map(repr, cells.layers)) or "none"
        raise ValueError(f"`layer` must be a layer of the data ({known}), got {layer!r}.")
    source = cells.X if layer is None else cells.layers[layer]
    if source is None:
        raise ValueError("The data has no X: name a `layer` with counts.")
    counts = csr_matrix(source, dtype=np.float32, copy=True)
    counts.sum_duplicates()
    counts.eliminate_zeros()
    where = "X" if layer is None else f"layer {layer!r}"
    if not np.isfinite(counts.data).all():
        raise ValueError(f"{where} has values that are no numbers: give counts.")
    if (counts.data < 0).any():
        raise ValueError(
            f"{where} has negative values, so it is scaled already: name a `layer` with counts."
        )
    if (counts.data != np.floor(counts.data)).any():
        raise ValueError(
            f"{where} has values that are not whole, so it is no counts but normalised already: "
            "name a `layer` with counts."
        )
    empty = np.flatnonzero(np.asarray(counts.sum(1)).ravel() == 0)
    if len(empty):
        raise ValueError(
            f"{len(empty)} cells of {where} have no counts, the first is "
            f"{cells.obs_names[empty[0]]}: leave them out."
        )
    return counts


def log_normalized(cells: "AnnData", counts: Any) -> "AnnData":
    """Return the cells with 10,000 counts each, and log(1 + x) of that."""
    import anndata
    import scanpy

    normal = anndata.AnnData(counts.copy(), obs=cells.obs[[]], var=cells.var[[]])
    scanpy.pp.normalize_total(normal, target_sum=1e4)
    scanpy.pp.log1p(normal)
    return normal


def variable_genes(values: "AnnData", number: int, least_cells: int = 0) -> NDArray[np.int64]:
    """Return the most variable genes by Seurat v3's rule, in the order of the data.

    Genes that fewer cells than `least_cells` express are no candidates; in few cells, many such
    genes make the rule's regression singular.
    """
    import scanpy

    candidates = np.flatnonzero(values.X.getnnz(0) >= least_cells)
    if number > len(candidates):
        raise ValueError(
            f"`genes` must be at most {len(candidates)}, got {number}"
            + (f": so many are expressed by {least_cells} training cells." if least_cells else ".")
        )
    try:
        found = scanpy.pp.highly_variable_genes(
            values[:, candidates].copy(),
            n_top_genes=number,
            flavor="seurat_v3",
            inplace=False,
            check_values=False,
        )
    except ValueError as error:  # of the regression, in its own words
        raise ValueError(
            f"{values.n_obs} cells are too few to tell variable genes ({error}): leave out genes "
            "that hardly any of them expresses, as with scanpy.pp.filter_genes(cells, min_cells=3)."
        ) from error
    return candidates[np.flatnonzero(found["highly_variable"].to_numpy())]


def leiden_clusters(normal: "AnnData", genes: NDArray[np.int64], smallest: int) -> NDArray[Any]:
    """Return the paper's labels: Leiden clusters, those of few cells merged into `rare`."""
    import scanpy

    chosen = normal[:, genes].copy()
    components = min(50, *(size - 1 for size in chosen.shape))
    scanpy.pp.pca(chosen, n_comps=components, svd_solver="arpack", random_state=0)
    scanpy.pp.neighbors(chosen, n_neighbors=15, n_pcs=components, random_state=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "In the future, the default backend")
        scanpy.tl.leiden(chosen, resolution=0.6, random_state=0, flavor="leidenalg")
    clusters: NDArray[Any] = chosen.obs["leiden"].astype(str).to_numpy(dtype=object)
    names, sizes = np.unique(clusters, return_counts=True)
    clusters[np.isin(clusters, names[sizes < smallest])] = "rare"
    return clusters


def column_of(cells: "AnnData", column: str, file: Path | None) -> NDArray[Any]:
    """Return a column of `obs`, or of a CSV file with barcodes first; None where it is empty."""
    table = cells.obs if file is None else _read_names(file)
    if column not in table.columns:
        known = ", ".join(map(str, table.columns)) or "none there"
        raise ValueError(
            f"`label_column` must be a column of {file or 'obs'} ({known}), got {column!r}."
        )
    if not table.index.is_unique:
        twice = table.index[table.index.duplicated()][0]
        raise ValueError(f"{file or 'obs'} names cell {twice!r} more than once.")
    if not table.index.isin(cells.obs_names).any():
        raise ValueError(
            f"{file} has none of the cells: its barcodes look like {table.index[0]!r}, those of "
            f"the data like {cells.obs_names[0]!r}."
        )
    values = table[column].reindex(cells.obs_names)
    names: NDArray[Any] = values.astype(str).to_numpy(dtype=object)
    names[values.isna().to_numpy()] = None
    if file is None:
        names[names == "nan"] = None  # an empty value that somebody made a string of
    if not any(name is not None for name in names):
        raise ValueError(f"No cell has a label in column {column!r}: name another.")
    return names


def _read_names(file: Path) -> Any:
    """Read a table by its first column; names stay names, whatever they look like."""
    import pandas as pd

    try:
        table = pd.read_csv(file, dtype=str, keep_default_na=False, na_values=[""])
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as CSV ({error}).") from error
    if not len(table):
        raise ValueError(f"{file} has no rows.")
    return table.set_index(table.columns[0])
