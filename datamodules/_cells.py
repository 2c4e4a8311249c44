"""Single cells: reading, labels and gene selection, with scanpy."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._files import check_unpacked_size

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

__all__ = [
    "handle_rare",
    "leiden_clusters",
    "log_normalize",
    "read_cells",
    "read_labels",
    "read_values",
    "select_variable_genes",
]


def read_cells(path: Path) -> "AnnData":
    """Read an .h5ad file or a folder with a 10x matrix, without executing code."""
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
            f"{path} cannot be read as {kind} ({what}): write it anew with the tool that made it, "
            "or get it again."
        ) from error
    return cells


def _check_h5ad(path: Path) -> None:
    """Raise ValueError for a file that reads other files, or would fill the memory."""
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
    """Return counts or log-normalised values, checked, as float32 CSR (cells, genes).

    Args:
        cells: The cells.
        layer: The layer to read; X if None.
        values: `counts` or `log`: the expected content.
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
        raise ValueError(f"{where} has values that are not finite: give counts.")
    if (found.data < 0).any():
        raise ValueError(
            f"{where} has negative values, so it is already scaled: name a `layer` with "
            f"counts{_layers(cells)}, or `layer: raw` for `.raw`."
        )
    if values == "counts" and (found.data != np.floor(found.data)).any():
        raise ValueError(
            f"{where} has fractional values, so it is already normalised: "
            f"name a `layer` with counts{_layers(cells)}, `layer: raw` for `.raw`, or use the "
            "values as they are with `values: log`."
        )
    if values == "log" and found.nnz and (found.data == np.floor(found.data)).all():
        raise ValueError(f"{where} has only integers, so it holds counts: omit `values`.")
    if values == "log" and found.data.max(initial=0) > _MAX_LOG:
        raise ValueError(
            f"{where} has values up to {found.data.max():.0f}, so it is not log-normalised: leave "
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
    """Return the most variable genes, in the order of the data.

    Use `seurat_v3` for counts and `seurat` for log-normalised values. Genes expressed in fewer than
    `min_cells` cells are excluded: many of them would make the regression singular.
    """
    import anndata
    import scanpy

    candidates = np.flatnonzero(values.getnnz(0) >= min_cells)
    if number > len(candidates):
        raise ValueError(
            f"`genes` must be at most {len(candidates)}, got {number}"
            + (f": that many are expressed in {min_cells} training cells." if min_cells else ".")
        )
    means = np.asarray(values[:, candidates].mean(0)).ravel()
    squares = np.asarray(values[:, candidates].power(2).mean(0)).ravel()
    varying = int((squares - means**2 > 1e-8 * np.maximum(squares, 1e-12)).sum())
    if varying < max(3, number):
        raise ValueError(
            f"`genes` must be at most {varying}, got {number}: only so many vary between cells."
        )
    try:
        found = scanpy.pp.highly_variable_genes(
            anndata.AnnData(values[:, candidates]),
            n_top_genes=number,
            flavor=flavor,
            inplace=False,
            check_values=False,
        )
    except ValueError as error:  # from the regression
        raise ValueError(
            f"{values.shape[0]} cells are too few to select variable genes ({error}): remove "
            "rarely expressed genes, for example with "
            "scanpy.pp.filter_genes(cells, min_cells=3)."
        ) from error
    return candidates[np.flatnonzero(found["highly_variable"].to_numpy())]


def leiden_clusters(normal: Any, genes: NDArray[np.int64]) -> NDArray[Any]:
    """Compute the paper's labels: Leiden clusters of log-normalised values."""
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
    """Return a column of `obs` or of a CSV file indexed by barcode; None where empty."""
    table = cells.obs if file is None else _read_csv(file)
    if column not in table.columns:
        known = ", ".join(map(str, table.columns)) or "none there"
        raise ValueError(
            f"`label_column` must be a column of {file or 'obs'} ({known}), got {column!r}"
            + (": labels in a CSV file need `label_file`." if file is None else ".")
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
        values = values.astype("Int64")  # integers with missing values
    names: NDArray[Any] = values.astype(str).to_numpy(dtype=object)
    names[values.isna().to_numpy()] = None
    if file is None:
        names[names == "nan"] = None  # a missing value that was converted to a string
    if not any(name is not None for name in names):
        raise ValueError(f"No cell has a label in column {column!r}: name another.")
    return names


def _read_csv(file: Path) -> Any:
    """Read a CSV file of strings, indexed by its first column."""
    import pandas as pd

    try:
        table = pd.read_csv(file, dtype=str, keep_default_na=False, na_values=[""])
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as CSV ({error}).") from error
    if not len(table):
        raise ValueError(f"{file} has no rows.")
    return table.set_index(table.columns[0])
