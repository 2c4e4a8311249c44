"""Cells in memory, of three planted kinds, and DataModules that are ready."""

import anndata
import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix
from small_roots import CELLS_A_TYPE, GENES, TYPES, cell_counts

from dg_lightning.datamodules import PBMC3kDataModule


def cells() -> anndata.AnnData:
    """Return counts with the columns `kind` and `depth`."""
    counts = csr_matrix(cell_counts().astype(np.float32))
    names = [f"CELL{i:04d}-1" for i in range(counts.shape[0])]
    kinds = [TYPES[i // CELLS_A_TYPE] for i in range(counts.shape[0])]
    obs = pd.DataFrame({"kind": kinds, "depth": counts.sum(1).A1}, index=names)
    return anndata.AnnData(counts, obs, pd.DataFrame(index=[f"GENE{i}" for i in range(GENES)]))


def made(data: PBMC3kDataModule) -> PBMC3kDataModule:
    """Return the data, ready to train on."""
    data.prepare_data()
    data.setup("fit")
    return data
