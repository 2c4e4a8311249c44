"""Files of cells that would read other files, or would not fit into memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hostile import memory_limit, time_limit
from small_cells import cells

from dg_lightning.datamodules import PBMC3kDataModule

ROWS, GENES = cells().shape


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return cells with dense counts, beside a file that belongs to somebody else."""
    dense = cells()
    dense.X = dense.X.toarray()
    path = tmp_path / "cells.h5ad"
    dense.write_h5ad(path)
    dense.X.astype("<f4").tofile(tmp_path / "secret.bin")
    with h5py.File(tmp_path / "secret.h5", "w") as other:
        other["counts"] = dense.X
    return path


def prepared(path: Path) -> PBMC3kDataModule:
    data = PBMC3kDataModule(path=str(path), label_column="kind", genes=100, root=str(path.parent))
    data.prepare_data()
    return data


def attributes_of(dataset: h5py.Dataset) -> dict[str, Any]:
    return dict(dataset.attrs)


def replaced(open_file: h5py.File, make: Callable[[], None]) -> None:
    """Replace X, with the attributes by which anndata knows an array."""
    about = attributes_of(open_file["X"])
    del open_file["X"]
    make()
    if isinstance(open_file.get("X", getlink=True), h5py.HardLink):
        open_file["X"].attrs.update(about)


def external_storage(open_file: h5py.File, folder: Path) -> None:
    source = [(str(folder / "secret.bin"), 0, ROWS * GENES * 4)]
    replaced(
        open_file,
        lambda: open_file.create_dataset("X", (ROWS, GENES), "<f4", external=source),
    )


def external_link(open_file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "secret.h5", "r+") as other:
        other["counts"].attrs.update(attributes_of(open_file["X"]))

    def link() -> None:
        open_file["X"] = h5py.ExternalLink(str(folder / "secret.h5"), "/counts")

    replaced(open_file, link)


def virtual_dataset(open_file: h5py.File, folder: Path) -> None:
    layout = h5py.VirtualLayout((ROWS, GENES), "<f4")
    layout[:] = h5py.VirtualSource(str(folder / "secret.h5"), "counts", (ROWS, GENES))
    replaced(open_file, lambda: open_file.create_virtual_dataset("X", layout))


def external_column(open_file: h5py.File, folder: Path) -> None:
    about = attributes_of(open_file["obs/depth"])
    del open_file["obs/depth"]
    source = [(str(folder / "secret.bin"), 0, ROWS * 4)]
    open_file["obs"].create_dataset("depth", (ROWS,), "<f4", external=source)
    open_file["obs/depth"].attrs.update(about)


OTHER_FILES = {
    "external storage": external_storage,
    "external link": external_link,
    "virtual dataset": virtual_dataset,
    "external storage of a column": external_column,
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_cells_do_not_read_other_files(name: str, file: Path, tmp_path: Path) -> None:
    with h5py.File(file, "r+") as open_file:
        OTHER_FILES[name](open_file, tmp_path)
    with pytest.raises(ValueError, match=r"cells\.h5ad") as caught:
        prepared(file)
    assert "\n" not in str(caught.value)


def test_cells_that_read_no_other_file_are_read(file: Path) -> None:
    prepared(file).setup("fit")


@pytest.mark.parametrize("shape", [(ROWS, 10**10), (10**10, GENES)])
def test_a_huge_array_in_a_small_file_is_refused(shape: tuple[int, int], file: Path) -> None:
    with h5py.File(file, "r+") as open_file:
        replaced(
            open_file,
            lambda: open_file.create_dataset(
                "X", shape, "<f4", chunks=(64, 64), compression="gzip"
            ),
        )
    assert file.stat().st_size < 10**7
    with (
        time_limit(),
        memory_limit(1.5),
        pytest.raises(ValueError, match=r"cells\.h5ad") as caught,
    ):
        prepared(file)
    assert "\n" not in str(caught.value)


def test_huge_sparse_counts_in_a_small_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cells.h5ad"
    cells().write_h5ad(path)
    with h5py.File(path, "r+") as open_file:
        for name, kind in {"data": np.float32, "indices": np.int32}.items():
            del open_file[f"X/{name}"]
            open_file["X"].create_dataset(name, (10**11,), kind, chunks=(1024,))
    with (
        time_limit(),
        memory_limit(1.5),
        pytest.raises(ValueError, match=r"cells\.h5ad") as caught,
    ):
        prepared(path)
    assert "\n" not in str(caught.value)
