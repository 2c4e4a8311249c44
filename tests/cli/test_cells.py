"""Cells on the command line: train on one file, use the net on others."""

import csv
import subprocess
import sys
from pathlib import Path

import anndata
import numpy as np
import pytest
from small_cells import cells

from dg_lightning.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:BudgetController")  # few steps do not do

FIT = [
    "--config=pbmc3k/dynamicgate",
    "--data.genes=200",
    "--model.net.hidden=[16]",
    "--trainer.callbacks.BudgetController.budget=0.5",
    "--trainer.max_epochs=3",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]
LABELS = "--data.label_column=kind"

# What a user without our package does with an exported net.
SCRIPT = """
import sys, anndata, numpy as np, torch
FORMAT
cells = anndata.read_h5ad(sys.argv[1])
counts = cells.to_df().reindex(columns=p["total_genes"], fill_value=0)
x = np.log1p(counts.div(counts.sum(axis=1), axis=0) * p["target_sum"])[p["input_genes"]]
if p["mean"] is not None:
    x = (x - p["mean"]) / p["std"]
probability = run(torch.tensor(x.to_numpy(), dtype=torch.float32)).softmax(-1)
for barcode, row in zip(cells.obs_names, probability):
    print(barcode, p["class_names"][row.argmax()], f"{row.max():.6f}", sep=",")
assert "dg_lightning" not in sys.modules
"""
READERS = {
    "pt2": "import json; about = {'preparation': ''}\n"
    "run = torch.export.load('net.pt2', extra_files=about).module()\n"
    "p = json.loads(about['preparation'])",
    "onnx": "import json, onnxruntime\n"
    "session = onnxruntime.InferenceSession('net.onnx')\n"
    "p = json.loads(session.get_modelmeta().custom_metadata_map['preparation'])\n"
    "name = session.get_inputs()[0].name\n"
    "run = lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in a folder that holds several files of the same cells."""
    folder = tmp_path_factory.mktemp("cells")
    source = cells()
    order = np.random.default_rng(0)
    files = {
        "all": source,
        "mixed": source[order.permutation(len(source)), order.permutation(source.n_vars)],
        "few": source[order.choice(len(source), 30, replace=False)],
        "unlabelled": anndata.AnnData(source.X, source.obs[[]], source.var),
    }
    for name, content in files.items():
        content.copy().write_h5ad(folder / f"{name}.h5ad")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["dg-lightning"])
        main(["fit", *FIT, LABELS, "--data.path=all.h5ad", "--data.scale=true"])
    return folder


@pytest.fixture(autouse=True)
def _in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", ["dg-lightning"])


def predicted(*options: str) -> dict[str, dict[str, str]]:
    main(["predict", *FIT, *options])
    path = max(Path("runs").rglob("predictions.csv"), key=lambda file: file.stat().st_mtime_ns)
    rows = list(csv.DictReader(path.open()))
    assert list(rows[0]) == ["barcode", "prediction", "probability", "true_label", "part"]
    return {row["barcode"]: row for row in rows}


@pytest.mark.slow
def test_predictions_are_equal_cell_by_cell_in_any_file() -> None:
    expected = predicted("--data.path=all.h5ad", LABELS)
    assert list(expected) == list(cells().obs_names)  # all of them, in the file's order
    kinds = cells().obs["kind"].to_dict()
    assert all(row["true_label"] == kinds[name] for name, row in expected.items())
    assert {row["part"] for row in expected.values()} == {"train", "val", "test"}
    for name in ("mixed", "few"):
        found = predicted(f"--data.path={name}.h5ad", LABELS, "--data.split_seed=9")
        assert list(found) == list(anndata.read_h5ad(f"{name}.h5ad").obs_names)
        assert found == {barcode: expected[barcode] for barcode in found}
    found = predicted("--data.path=unlabelled.h5ad")
    for barcode, row in found.items():
        assert row == {**expected[barcode], "true_label": ""}


@pytest.mark.slow
def test_a_test_of_another_file_is_as_good(capsys: pytest.CaptureFixture[str]) -> None:
    accuracies = []
    for name in ("all", "mixed"):
        main(["test", *FIT, LABELS, f"--data.path={name}.h5ad", "--data.split_seed=4"])
        path = max(Path("runs").rglob("metrics.csv"), key=lambda file: file.stat().st_mtime_ns)
        (row,) = csv.DictReader(path.open())
        accuracies.append(row["test/accuracy"])
    assert accuracies[0] == accuracies[1]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["test", *FIT, "--data.path=unlabelled.h5ad"])
    assert stopped.value.code == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("dg-lightning: err")]
    assert "`label_column`" in line
    assert "`predict` needs no labels" in line


@pytest.mark.slow
@pytest.mark.parametrize("format", READERS)
def test_an_exported_net_needs_our_package_for_nothing(format: str) -> None:
    expected = predicted("--data.path=mixed.h5ad")
    config = ["--config=pbmc3k/dynamicgate", f"--format={format}"]
    main(["export", *config, f"--output=net.{format}", "--batch_sizes=[1]"])
    Path("use.py").write_text(SCRIPT.replace("FORMAT", READERS[format]))
    done = subprocess.run(
        [sys.executable, "use.py", "mixed.h5ad"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(",") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == list(expected)
    for barcode, label, probability in rows:
        assert label == expected[barcode]["prediction"]
        assert float(probability) == pytest.approx(
            float(expected[barcode]["probability"]), abs=2e-5
        )


def test_genes_are_listed_with_their_weight_by_type(capsys: pytest.CaptureFixture[str]) -> None:
    main(["features", "--config=pbmc3k/dynamicgate", "--output=genes.csv"])
    said = capsys.readouterr().out
    with Path("genes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["gene", "cell_type", "weight"]
    kept = {row["gene"] for row in rows}
    assert f"{len(kept)} of 200 genes are kept" in said
    assert len(rows) == 3 * len(kept)
    # Genes 0 to 69 are planted for the first type, and so on: they speak for it.
    planted = {f"GENE{70 * kind + i}": kind for kind in range(3) for i in range(70)}
    types = ["B cells", "Monocytes", "T cells"]
    weights: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        if row["gene"] in planted:
            is_own = types[planted[row["gene"]]] == row["cell_type"]
            weights[is_own].append(float(row["weight"]))
    assert np.mean(weights[True]) > 0 > np.mean(weights[False])


def test_cells_that_have_moved_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    genes = ["features", "--config=pbmc3k/dynamicgate", f"--output={tmp_path / 'genes.csv'}"]
    moved = Path("all.h5ad").rename(tmp_path / "all.h5ad")
    try:
        with pytest.raises(SystemExit):
            main(genes)
        assert "--data_root" in capsys.readouterr().err
        for place in (tmp_path, moved):
            main([*genes, f"--data_root={place}"])
            assert "of 200 genes are kept" in capsys.readouterr().out
    finally:
        moved.rename("all.h5ad")


def test_a_run_without_cells_has_no_genes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config=digits/baseline", "--trainer.fast_dev_run=false", *FIT[4:]])
    with pytest.raises(SystemExit):
        main(["features", "--config=digits/baseline"])
    with pytest.raises(SystemExit):
        main(["features", "--config=digits/baseline"])
    assert "last.ckpt" in capsys.readouterr().err
    for args in ([], ["runs", "--config=digits/baseline"]):
        with pytest.raises(SystemExit):
            main(["features", *args])
        assert "Name one run" in capsys.readouterr().err
