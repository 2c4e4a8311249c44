"""Single cells: reading, labels and genes, with scanpy."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from anndata import AnnData

_LARGEST_LOG = 30.0  # no logarithm of a count per cell is larger

__all__ = [
    "column_of",
    "leiden_clusters",
    "log_normalized",
    "read_cells",
    "values_of",
    "variable_genes",
    "without_rare",
]


def read_cells(path: Path) -> "AnnData":
    """Read an .h5ad file, or a folder with a 10x matrix; nothing in it is run."""
    import anndata
    import scanpy

    try:
        cells = anndata.read_h5ad(path) if path.is_file() else scanpy.read_10x_mtx(path)
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read ({first}): get it again.") from error
    return cells


def values_of(cells: "AnnData", layer: str | None, values: str) -> Any:
    """Return counts, or log-normalised values, as a CSR matrix (cells, genes) of float32.

    Args:
        cells: The cells.
        layer: The layer to read; X if None.
        values: `counts` or `log`, what it must hold.
    """
    from scipy.sparse import csr_matrix

    where = "X" if layer is None else f"layer {layer!r}"
    if layer is not None and layer not in cells.layers:
        raise ValueError(f"`layer` must be a layer of the data{_layers(cells)}, got {layer!r}.")
    if not cells.n_obs or not cells.n_vars:
        raise ValueError(f"The data has {cells.n_obs} cells and {cells.n_vars} genes: give more.")
    source = cells.X if layer is None else cells.layers[layer]
    if source is None:
        raise ValueError(f"The data has no X: name a `layer` with counts{_layers(cells)}.")
    found = csr_matrix(source, dtype=np.float32, copy=True)
    found.sum_duplicates()
    found.eliminate_zeros()
    if not np.isfinite(found.data).all():
        raise ValueError(f"{where} has values that are no numbers: give counts.")
    if (found.data < 0).any():
        raise ValueError(
            f"{where} has negative values, so it is scaled already: name a `layer` with "
            f"counts{_layers(cells)}, or `layer: raw` for `.raw`."
        )
    if values == "counts" and (found.data != np.floor(found.data)).any():
        raise ValueError(
            f"{where} has values that are not whole, so it is no counts but normalised already: "
            f"name a `layer` with counts{_layers(cells)}, `layer: raw` for `.raw`, or take the "
            "values as they are with `values: log`."
        )
    if values == "log" and found.nnz and (found.data == np.floor(found.data)).all():
        raise ValueError(f"{where} has whole numbers only, so it is counts: leave `values` out.")
    if values == "log" and found.data.max(initial=0) > _LARGEST_LOG:
        raise ValueError(
            f"{where} has values up to {found.data.max():.0f}, so it is no logarithms: leave "
            "`values` at counts."
        )
    empty = np.flatnonzero(found.getnnz(1) == 0)
    if len(empty):
        raise ValueError(
            f"{len(empty)} cells of {where} have no counts, the first is "
            f"{cells.obs_names[empty[0]]}: leave them out."
        )
    return found


def _layers(cells: "AnnData") -> str:
    return f" ({', '.join(map(repr, cells.layers)) or 'none'})"


def log_normalized(counts: Any, target_sum: float = 1e4) -> Any:
    """Return counts scaled to the same total for every cell, and log(1 + x) of that."""
    import anndata
    import scanpy

    normal = anndata.AnnData(counts.copy())
    scanpy.pp.normalize_total(normal, target_sum=target_sum)
    scanpy.pp.log1p(normal)
    return normal.X


def variable_genes(
    values: Any, number: int, least_cells: int = 0, flavor: str = "seurat_v3"
) -> NDArray[np.int64]:
    """Return the most variable genes, in the order of the data.

    The rule is Seurat v3's, which is meant for counts, or `seurat`, for logarithms.

    Genes that fewer cells than `least_cells` express are no candidates; in few cells, many such
    genes make the rule's regression singular.
    """
    import anndata
    import scanpy

    candidates = np.flatnonzero(values.getnnz(0) >= least_cells)
    if number > len(candidates):
        raise ValueError(
            f"`genes` must be at most {len(candidates)}, got {number}"
            + (f": so many are expressed by {least_cells} training cells." if least_cells else ".")
        )
    means = np.asarray(values[:, candidates].mean(0)).ravel()
    squares = np.asarray(values[:, candidates].power(2).mean(0)).ravel()
    varying = int((squares - means**2 > 1e-8 * np.maximum(squares, 1e-12)).sum())
    if varying < max(3, number):
        raise ValueError(
            f"`genes` must be at most {varying}, got {number}: so many genes vary between cells."
        )
    try:
        found = scanpy.pp.highly_variable_genes(
            anndata.AnnData(values[:, candidates]),
            n_top_genes=number,
            flavor=flavor,
            inplace=False,
            check_values=False,
        )
    except ValueError as error:  # of the regression, in its own words
        raise ValueError(
            f"{values.shape[0]} cells are too few to tell variable genes ({error}): leave out "
            "genes that hardly any of them expresses, as with "
            "scanpy.pp.filter_genes(cells, min_cells=3)."
        ) from error
    return candidates[np.flatnonzero(found["highly_variable"].to_numpy())]


def leiden_clusters(normal: Any, genes: NDArray[np.int64]) -> NDArray[Any]:
    """Return the paper's labels: Leiden clusters of log-normalised values."""
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


def without_rare(names: NDArray[Any], rare: str, smallest: int) -> NDArray[Any]:
    """Keep, merge or leave out the classes of fewer than `smallest` cells."""
    if rare == "keep":
        return names
    classes, sizes = np.unique(names[names != np.array(None)].astype(str), return_counts=True)
    names = names.copy()
    names[np.isin(names, classes[sizes < smallest])] = "rare" if rare == "merge" else None
    return names


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
    if values.dtype.kind == "f" and (values.dropna() % 1 == 0).all():
        values = values.astype("Int64")  # whole numbers beside empty ones
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
