"""The notebooks of `examples/` run from beginning to end, on small datasets, and show outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(
    path: Path, small_datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_DATA", str(small_datasets))
    monkeypatch.setenv("DG_CACHE", str(tmp_path / "cache"))
    book = nbformat.read(path, 4)
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_all_six_are_shipped_with_their_outputs() -> None:
    assert len(NOTEBOOKS) == 6
    for path in NOTEBOOKS:
        cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
        assert any(cell.outputs for cell in cells)
        assert all(o.output_type != "error" for cell in cells for o in cell.outputs)
