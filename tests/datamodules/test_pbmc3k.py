from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import scanpy
import torch
from scipy.sparse import csr_matrix
from small_cells import cells, made
from small_roots import CELLS_A_TYPE, GENES, TYPES, cell_counts, pbmc3k

from dg_lightning.datamodules import PBMC3kDataModule


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cells")
    pbmc3k(root / "pbmc3k" / "filtered_gene_bc_matrices" / "hg19")
    return root


def labelled(root: Path, **settings: Any) -> PBMC3kDataModule:
    labels = {"label_file": str(root / "pbmc3k" / "labels.csv"), "label_column": "type"}
    return made(PBMC3kDataModule(root=str(root), **{"genes": 300, **labels, **settings}))


def test_published_labels_from_a_file_and_unlabelled_cells_left_out(root: Path) -> None:
    data = labelled(root)
    assert data.class_names == tuple(sorted(TYPES))
    assert data.input_shape == (300,)
    sizes = {part: sum(of.values()) for part, of in data.class_counts().items()}
    assert sizes == {"train": 92, "val": 14, "test": 27}  # of 133: two have no label
    assert sum(of["T cells"] for of in data.class_counts().values()) == CELLS_A_TYPE - 2


def test_the_papers_labels_are_the_clusters_of_all_cells(root: Path) -> None:
    data = made(PBMC3kDataModule(root=str(root), genes=200))
    assert data.class_names == ("0", "1", "2")
    # The clusters are the three planted kinds, under other names.
    every = data.part_to_predict().labels.numpy()
    kinds = np.repeat(np.arange(3), CELLS_A_TYPE)
    assert len({(int(a), int(b)) for a, b in zip(every, kinds, strict=True)}) == 3
    with pytest.raises(ValueError, match="at least 2 classes, got only 'rare'"):
        made(PBMC3kDataModule(root=str(root), genes=200, smallest_cluster=100))


def test_values_are_log_normalised_counts_of_the_chosen_genes(root: Path) -> None:
    data = labelled(root)
    counts = cell_counts()[: len(data.part_to_predict())]
    expected = np.log1p(counts / counts.sum(1, keepdims=True) * 1e4)
    chosen = [int(name.removeprefix("GENE")) for name in data.feature_names]
    inputs, _ = data.part_to_predict().__getitems__(range(len(counts)))
    np.testing.assert_allclose(inputs.numpy(), expected[:, chosen], rtol=1e-5)


def variable(counts: Any, number: int, least_cells: int = 0) -> list[str]:
    source = anndata.AnnData(counts)
    source.var_names = [f"GENE{i}" for i in range(GENES)]
    scanpy.pp.filter_genes(source, min_cells=least_cells)
    scanpy.pp.highly_variable_genes(source, n_top_genes=number, flavor="seurat_v3")
    return list(source.var_names[source.var["highly_variable"]])


def test_genes_are_chosen_by_training_cells_alone_or_as_in_the_paper(root: Path) -> None:
    data = labelled(root)
    counts = csr_matrix(cell_counts()[:133].astype(np.float32))
    assert list(data.feature_names) == variable(counts[data._parts["train"].rows], 300, 3)
    assert list(data.feature_names) != variable(counts, 300, 3)
    everything = csr_matrix(cell_counts().astype(np.float32))
    total = np.asarray(everything.sum(1))
    logs = everything.multiply(1e4 / total).log1p().tocsr()
    assert list(labelled(root, fit_on="paper").feature_names) == variable(logs, 300)


@pytest.mark.parametrize("fit_on", ["train", "paper"])
def test_scaling_is_fitted_on_the_cells_that_it_says(root: Path, fit_on: Any) -> None:
    data, raw = labelled(root, fit_on=fit_on, scale=True), labelled(root, fit_on=fit_on)
    fitted = "train" if fit_on == "train" else "all"
    part = data._parts["train"] if fitted == "train" else data.part_to_predict()
    cells = range(92 if fitted == "train" else 133)  # the last two have no label
    inputs, _ = part.__getitems__(cells)
    torch.testing.assert_close(inputs.mean(0), torch.zeros(300), atol=1e-4, rtol=0)
    varying = inputs.std(0) > 0
    torch.testing.assert_close(inputs.std(0)[varying], torch.ones(int(varying.sum())))
    test = data._parts["test"].__getitems__(range(27))[0]
    plain = raw._parts["test"].__getitems__(range(27))[0]
    source = raw._parts["train"] if fitted == "train" else raw.part_to_predict()
    values = source.__getitems__(cells)[0]
    std = values.std(0)
    expected = (plain - values.mean(0)) / torch.where(std > 0, std, 1)
    torch.testing.assert_close(test, expected, rtol=1e-4, atol=1e-4)


def test_the_matrix_stays_sparse_until_a_batch_is_cut(root: Path) -> None:
    data = labelled(root)
    entry = next(path for path in (root / ".dg_cache").iterdir() if path.is_dir())
    stored = sum(path.stat().st_size for path in entry.iterdir())
    assert stored < 0.8 * 133 * 300 * 8
    assert data._parts["train"].table is data._parts["test"].table


def test_any_anndata_file_with_counts_in_a_layer(tmp_path: Path) -> None:
    source = cells()
    source.layers["counts"] = source.X.copy()
    scanpy.pp.log1p(source)
    source.X.data -= 1  # scaled in some way: negative values
    source.write_h5ad(tmp_path / "cells.h5ad")
    options: dict[str, Any] = {"path": str(tmp_path / "cells.h5ad"), "genes": 300}
    options |= {"label_column": "kind", "root": str(tmp_path)}
    data = made(PBMC3kDataModule(layer="counts", **options))
    assert data.class_names == tuple(sorted(TYPES))
    with pytest.raises(ValueError, match=r"X has negative values.*`layer`"):
        made(PBMC3kDataModule(**options))
    with pytest.raises(
        ValueError, match=r"`layer` must be a layer of the data \('counts'\), got 'x'"
    ):
        made(PBMC3kDataModule(layer="x", **options))
    with pytest.raises(ValueError, match=r"column of obs \(kind, depth\), got 'type'"):
        made(PBMC3kDataModule(layer="counts", **{**options, "label_column": "type"}))
    (tmp_path / "cells.h5ad").write_bytes((tmp_path / "cells.h5ad").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cells.h5ad cannot be read"):
        made(PBMC3kDataModule(layer="counts", **options))


def test_entries_that_are_stored_twice_are_added(tmp_path: Path) -> None:
    source = cells()
    doubled = csr_matrix(source.X.shape, dtype=np.float32)
    doubled.indptr = source.X.indptr * 2
    doubled.indices = np.repeat(source.X.indices, 2)
    doubled.data = np.stack([source.X.data, np.zeros_like(source.X.data)], 1).ravel()
    options: dict[str, Any] = {"label_column": "kind", "genes": 300, "root": str(tmp_path)}
    expected = made(PBMC3kDataModule.from_anndata(source, **options))
    found = made(
        PBMC3kDataModule.from_anndata(anndata.AnnData(doubled, source.obs, source.var), **options)
    )
    pair = [data.part_to_predict().__getitems__(range(135))[0] for data in (expected, found)]
    assert torch.equal(*pair)


def test_labels_are_names_even_if_they_look_otherwise(root: Path, tmp_path: Path) -> None:
    names = ["None", "01", "NA"]
    lines = [f"CELL{i:04d}-1,{names[i // CELLS_A_TYPE]}\n" for i in range(135)]
    (tmp_path / "names.csv").write_text("barcode,type\n" + "".join(lines[:-1]) + "CELL0134-1,\n")
    data = labelled(root, label_file=str(tmp_path / "names.csv"))
    assert data.class_names == ("01", "NA", "None")
    assert sum(len(part) for part in data._parts.values()) == 134


def test_barcodes_that_look_like_numbers(tmp_path: Path) -> None:
    source = cells()
    source.obs_names = [f"{i:03d}" for i in range(len(source))]
    lines = [f"{name},{kind}\n" for name, kind in source.obs["kind"].items()]
    (tmp_path / "labels.csv").write_text("cell,type\n" + "".join(lines))
    data = PBMC3kDataModule.from_anndata(
        source, label_file=str(tmp_path / "labels.csv"), label_column="type", genes=99
    )
    assert made(data).class_names == tuple(sorted(TYPES))
    for content, message in (("", "cannot be read as CSV"), ("cell,type\n", "has no rows")):
        (tmp_path / "labels.csv").write_text(content)
        again = PBMC3kDataModule.from_anndata(
            source, label_file=str(tmp_path / "labels.csv"), label_column="type", genes=99
        )
        with pytest.raises(ValueError, match=rf"labels.csv {message}"):
            made(again)


def test_cells_in_memory_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    decode = PBMC3kDataModule.decode

    def counting(self: PBMC3kDataModule, save: Any) -> None:
        decoded.append(1)
        decode(self, save)

    monkeypatch.setattr(PBMC3kDataModule, "decode", counting)
    data = PBMC3kDataModule.from_anndata(cells(), label_column="kind", genes=300)
    assert data.num_classes == 3
    made(data)
    assert decoded == [1]


def test_another_file_in_the_folder_does_not_hide_a_change(tmp_path: Path) -> None:
    folder = tmp_path / "pbmc3k" / "filtered_gene_bc_matrices" / "hg19"
    pbmc3k(folder)
    (folder / "notes.gz").write_bytes(b"")
    before = labelled(tmp_path).part_to_predict().__getitems__(range(5))[0]
    lines = (folder / "matrix.mtx").read_text().splitlines()
    lines[3] = lines[3].rsplit(" ", 1)[0] + " 500"
    (folder / "matrix.mtx").write_text("\n".join(lines) + "\n")
    after = labelled(tmp_path).part_to_predict().__getitems__(range(5))[0]
    assert not torch.equal(before, after)


def test_a_folder_above_the_matrix_is_told_where_it_is(tmp_path: Path) -> None:
    pbmc3k(tmp_path / "above" / "hg19")
    with pytest.raises(
        FileNotFoundError, match=r"cannot find .*; there is a matrix in .*above/hg19: "
    ):
        PBMC3kDataModule(path=str(tmp_path / "above"), label_column="kind").prepare_data()
    options: Any = {"label_column": "type", "label_file": str(tmp_path / "none.csv")}
    with pytest.raises(FileNotFoundError, match=r"cannot find .*none.csv: "):
        PBMC3kDataModule(path=str(tmp_path / "above" / "hg19"), **options).prepare_data()


def test_predictions_are_written_back_to_cells_in_memory(tmp_path: Path) -> None:
    source = cells()
    source.obs.loc[source.obs_names[:3], "kind"] = None
    data = PBMC3kDataModule.from_anndata(
        source, label_column="kind", genes=300, root=str(tmp_path), eval_batch_size=50
    )
    made(data)
    assert list(tmp_path.iterdir()) == []
    batches = [{"prediction": labels} for _, labels in data.predict_dataloader()]
    shuffled = source[::-1].copy()
    data.add_predictions(shuffled, batches)
    known = shuffled.obs["kind"].notna()
    assert (shuffled.obs["prediction"][known] == shuffled.obs["kind"][known]).all()
    assert shuffled.obs["prediction_part"][~known].isna().all()
    sizes = shuffled.obs["prediction_part"].value_counts().to_dict()
    assert sizes == {name: len(part) for name, part in data._parts.items()}
    data.add_predictions(source, torch.zeros(135, dtype=torch.long), key="first")
    assert set(source.obs["first"].dropna()) == {"B cells"}
    with pytest.raises(ValueError, match="each of 135 cells, got 5"):
        data.add_predictions(source, torch.zeros(5, dtype=torch.long))


def test_bad_counts_and_labels_are_named(root: Path, tmp_path: Path) -> None:
    def refuses(message: str, source: anndata.AnnData, **settings: Any) -> None:
        options = {"label_column": "kind", "genes": 300, **settings}
        with pytest.raises(ValueError, match=message):
            made(PBMC3kDataModule.from_anndata(source, **options))

    for value, message in ((np.nan, "not finite"), (-1, "negative values")):
        source = cells()
        source.X[0, int(source.X[0].indices[0])] = value
        refuses(message, source)
    source = cells()
    source.X[5] = 0
    refuses("1 cells in X have no counts, .*CELL0005-1", source)
    source = cells()
    source.obs.iloc[0, 0] = "Megakaryocytes"
    refuses("class 'Megakaryocytes' has 1 of 135", source)
    refuses(r"`genes` must be at most \d+, got 3000: .* 3 training cells", cells(), genes=3000)
    source = cells()
    scanpy.pp.log1p(source)
    refuses("fractional values, so it is already normalised", source)
    source = cells()
    source.obs["kind"] = [None] * len(source)
    refuses("No cell has a label in column 'kind'", source)
    source = cells()
    source.obs["kind"] = source.obs["kind"].where(source.obs["kind"] != "T cells").astype(str)
    assert (
        made(PBMC3kDataModule.from_anndata(source, label_column="kind", genes=99)).num_classes == 2
    )
    with pytest.raises(ValueError, match=r"column of .*labels.csv \(type\), got 'louvain'"):
        labelled(root, label_column="louvain")
    with pytest.raises(ValueError, match="`label_file` needs `label_column`"):
        PBMC3kDataModule(label_file="x.csv")
    (tmp_path / "other.csv").write_text("barcode,type\nAAA,B\n")
    with pytest.raises(ValueError, match=r"none of the cells.*like 'AAA'.*like 'CELL0000-1'"):
        labelled(root, label_file=str(tmp_path / "other.csv"))
    (tmp_path / "twice.csv").write_text("barcode,type\nCELL0000-1,B\nCELL0000-1,B\n")
    with pytest.raises(ValueError, match=r"twice.csv .*'CELL0000-1' more than once"):
        labelled(root, label_file=str(tmp_path / "twice.csv"))
