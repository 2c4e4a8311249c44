"""A net of cells is given the genes, the scaling and the classes that it was trained with."""

from pathlib import Path
from typing import Any

import anndata
import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix, hstack
from small_cells import cells, made
from torch import Tensor

from dg_lightning import GatedClassifier
from dg_lightning.datamodules import PBMC3kDataModule

OPTIONS: dict[str, Any] = {"label_column": "kind", "genes": 200}


@pytest.fixture(scope="module")
def trained() -> PBMC3kDataModule:
    return made(PBMC3kDataModule.from_anndata(cells(), **OPTIONS, scale=True))


def aligned(
    trained: PBMC3kDataModule, source: anndata.AnnData, stage: str = "predict", **options: Any
) -> PBMC3kDataModule:
    data = PBMC3kDataModule.from_anndata(source, **options)
    data.use_preparation(trained.preparation())
    data.prepare_data()
    data.setup(stage)
    return data


def inputs(data: PBMC3kDataModule) -> pd.DataFrame:
    part = data.part_to_predict()
    values, _ = part.__getitems__(range(len(part)))
    return pd.DataFrame(values.numpy(), index=data.metadata["cells"], columns=data.feature_names)


def with_extra_genes(source: anndata.AnnData) -> anndata.AnnData:
    more = csr_matrix(np.random.default_rng(1).poisson(3.0, (len(source), 50)).astype("float32"))
    names = [*source.var_names, *(f"EXTRA{i}" for i in range(50))]
    matrix = hstack([source.X, more]).tocsr()
    return anndata.AnnData(matrix, source.obs, pd.DataFrame(index=names))


ORDER = np.random.default_rng(2)
FILES: dict[str, Any] = {
    "the same": lambda s: s,
    "cells in another order": lambda s: s[ORDER.permutation(len(s))].copy(),
    "a subset of the cells": lambda s: s[ORDER.choice(len(s), 40, replace=False)].copy(),
    "one cell": lambda s: s[17:18].copy(),
    "genes in another order": lambda s: s[:, ORDER.permutation(s.n_vars)].copy(),
    "extra genes": with_extra_genes,
    "a dense matrix": lambda s: anndata.AnnData(s.X.toarray(), s.obs, s.var),
    "no labels": lambda s: anndata.AnnData(s.X, s.obs[[]], s.var),
}


@pytest.mark.parametrize("name", FILES)
def test_inputs_are_equal_cell_by_cell(name: str, trained: PBMC3kDataModule) -> None:
    expected = inputs(trained)
    data = aligned(trained, FILES[name](cells()))
    found = inputs(data)
    assert list(found.columns) == list(expected.columns)
    pd.testing.assert_frame_equal(found, expected.loc[found.index], check_exact=True)
    assert data.class_names == trained.class_names
    assert data.input_shape == (200,)
    # Each cell is known to be of the part that it was in.
    parts = trained.describe_samples()["part"]
    known = dict(zip(expected.index, parts, strict=True))
    assert data.describe_samples()["part"] == [known[cell] for cell in found.index]


def test_another_split_seed_keeps_the_parts_of_the_training(trained: PBMC3kDataModule) -> None:
    data = aligned(trained, cells(), "test", **OPTIONS, split_seed=7)
    assert sorted(data.part("test").rows) == sorted(trained.part("test").rows)
    assert sorted(data.part("val").rows) == sorted(trained.part("val").rows)


def test_cells_of_another_experiment_are_all_tested(trained: PBMC3kDataModule) -> None:
    other = cells()
    other.X = csr_matrix(other.X.toarray() + 1)  # the same barcodes, other counts: other cells
    data = aligned(trained, other, "test", **OPTIONS)
    assert len(data.part("test")) == len(other)
    assert set(data.describe_samples()["part"]) == {""}
    with pytest.raises(ValueError, match=r"no labelled cells to validate on: .* on all of them"):
        aligned(trained, other, "validate", **OPTIONS)


def test_a_cell_is_recognised_by_its_counts_whatever_it_is_called(
    trained: PBMC3kDataModule,
) -> None:
    renamed = cells()
    renamed.obs_names = [f"{name}-0" for name in renamed.obs_names]
    # Genes that are no inputs may be missing, too.
    kept = np.isin(renamed.var_names, trained.feature_names) | (np.arange(renamed.n_vars) % 9 > 0)
    with pytest.warns(UserWarning, match="genes that counted towards"):
        data = aligned(trained, renamed[:, kept].copy(), "test", **OPTIONS)
    assert sorted(data.part("test").rows) == sorted(trained.part("test").rows)


def test_genes_of_the_same_name_stay_apart() -> None:
    source = cells()
    names = list(source.var_names)
    names[1] = names[0] = "TWIN"
    source.var_names = names
    data = made(PBMC3kDataModule.from_anndata(source, **OPTIONS))
    assert len(set(data.preparation()["total_genes"])) == len(data.preparation()["total_genes"])
    assert list(source.var_names) == names  # the user's cells are unchanged
    pd.testing.assert_frame_equal(inputs(aligned(data, source)), inputs(data), check_exact=True)


def test_clusters_belong_to_the_cells_that_they_were_made_of() -> None:
    data = made(PBMC3kDataModule.from_anndata(cells(), leiden=True, genes=200))
    labels = dict(zip(data.metadata["cells"], data.metadata["labels"], strict=True))
    few = aligned(data, cells()[::-3].copy(), "test", leiden=True)
    found = zip(few.metadata["cells"], few.metadata["labels"], strict=True)
    assert all(labels[cell] == label for cell, label in found)
    strange = cells()
    strange.X = csr_matrix(strange.X.toarray() + 1)
    with pytest.raises(ValueError, match="clusters of training cells, and the data contains none"):
        aligned(data, strange, "test", leiden=True)


def test_a_second_checkpoint_brings_its_own_parts(trained: PBMC3kDataModule) -> None:
    options: dict[str, Any] = {**OPTIONS, "fit_on": "paper"}
    one = made(PBMC3kDataModule.from_anndata(cells(), **options))
    two = made(PBMC3kDataModule.from_anndata(cells(), **options, split_seed=3))
    assert one.feature_names == two.feature_names
    data = PBMC3kDataModule.from_anndata(cells(), **OPTIONS)
    for other in (one, two):
        data.use_preparation(other.preparation())
        data.setup("test")
        assert sorted(data.part("test").rows) == sorted(other.part("test").rows)


def test_cells_on_the_disk_and_whole_numbers_beside_gaps(tmp_path: Path) -> None:
    source = cells()
    source.obs["number"] = np.repeat([0, 1, 2], 45)
    source.write_h5ad(tmp_path / "cells.h5ad")
    backed = anndata.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    data = made(PBMC3kDataModule.from_anndata(backed, label_column="number", genes=200))
    assert data.class_names == ("0", "1", "2")
    source.obs["number"] = source.obs["number"].where(np.arange(len(source)) != 4)
    again = made(PBMC3kDataModule.from_anndata(source, label_column="number", genes=200))
    assert again.class_names == ("0", "1", "2")


def test_missing_genes_are_named_and_taken_as_0(trained: PBMC3kDataModule) -> None:
    lost = trained.feature_names[3]
    source = cells()
    with pytest.warns(UserWarning, match=rf"lacks 1 of the 200 genes.*training cells: {lost}\."):
        data = aligned(trained, source[:, source.var_names != lost].copy())
    column = trained.feature_names.index(lost)
    mean, std = (trained.preparation()[key][column] for key in ("mean", "std"))
    np.testing.assert_allclose(inputs(data)[lost], -mean / std, rtol=1e-5)


def test_genes_that_only_made_up_the_totals_are_counted_when_they_are_missing(
    trained: PBMC3kDataModule,
) -> None:
    source = cells()
    kept = source[:, np.isin(source.var_names, trained.feature_names)].copy()
    with pytest.warns(UserWarning, match=r"lacks \d+ more of the \d+ genes"):
        aligned(trained, kept)


def test_genes_of_other_names_are_refused(trained: PBMC3kDataModule) -> None:
    source = cells()
    source.var_names = [f"ENSG{i}" for i in range(source.n_vars)]
    with pytest.raises(ValueError, match=r"lacks 200 of the 200 genes.*it has ENSG0, ENSG1"):
        aligned(trained, source)


def test_labels_that_the_net_does_not_know_are_predicted_and_not_tested(
    trained: PBMC3kDataModule,
) -> None:
    source = cells()
    source.obs["kind"] = source.obs["kind"].where(source.obs["kind"] != "T cells", "Neurons")
    with pytest.warns(UserWarning, match=r"does not know \(Neurons\)"):
        data = aligned(trained, source, "test", **OPTIONS)
    rows = data.part("test").rows
    assert set(source.obs["kind"].iloc[rows]) == {"B cells", "Monocytes"}
    assert len(data.part_to_predict()) == len(source)
    assert "Neurons" in data.describe_samples()["true_label"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"`label_column` .*; obs has kind, depth\."),
        ({"label_column": "type"}, r"column of obs \(kind, depth\), got 'type'"),
    ],
)
def test_a_test_needs_labels_and_a_prediction_does_not(
    options: dict[str, Any], message: str, trained: PBMC3kDataModule
) -> None:
    data = aligned(trained, cells(), "predict", **options)
    assert set(data.describe_samples()["true_label"]) == {""}
    with pytest.raises(
        ValueError, match=f"(?s)no labelled cells to test on: .*{message}.*no labels"
    ):
        aligned(trained, cells(), "test", **options)


def model_of(data: PBMC3kDataModule) -> GatedClassifier:
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [8]}}
    return GatedClassifier(net, list(data.input_shape), data.num_classes)


def trainer(tmp_path: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
        **{"max_epochs": 1, **options},
    )


def probabilities(predictions: Any) -> Tensor:
    return torch.cat([batch["probability"] for batch in predictions])


def test_a_checkpoint_brings_the_preparation_by_every_way_of_lightning(tmp_path: Path) -> None:
    data = PBMC3kDataModule.from_anndata(cells(), **OPTIONS)
    data.setup("fit")
    model = model_of(data)
    first = trainer(tmp_path)
    first.fit(model, datamodule=data)
    path = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    torch.load(path, weights_only=True)
    expected = probabilities(first.predict(model, data))
    mixed = cells()[:, ::-1].copy()

    def other() -> PBMC3kDataModule:
        return PBMC3kDataModule.from_anndata(mixed, **OPTIONS, split_seed=5)

    # By the Trainer, which hands its state to the DataModule; by the module, which keeps it.
    by_path = trainer(tmp_path).predict(model_of(data), other(), ckpt_path=path)
    loaded = GatedClassifier.load_from_checkpoint(path)
    by_module = trainer(tmp_path).predict(loaded, other())
    for found in (by_path, by_module):
        assert torch.equal(probabilities(found), expected)
    (tested,) = trainer(tmp_path).test(loaded, datamodule=other(), verbose=False)
    (again,) = first.test(model, datamodule=data, verbose=False)
    assert tested == pytest.approx(again, rel=1e-5)  # the same cells, in another order


def test_a_fit_resumes_with_the_same_genes_only(tmp_path: Path) -> None:
    data = PBMC3kDataModule.from_anndata(cells(), **OPTIONS)
    data.setup("fit")
    first = trainer(tmp_path)
    first.fit(model_of(data), datamodule=data)
    path = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    same = PBMC3kDataModule.from_anndata(cells(), **OPTIONS)
    trainer(tmp_path, max_epochs=2).fit(model_of(data), datamodule=same, ckpt_path=path)
    other = PBMC3kDataModule.from_anndata(cells(), **OPTIONS, split_seed=5)
    with pytest.raises(ValueError, match="cells, inputs, scaling or classes"):
        trainer(tmp_path, max_epochs=2).fit(model_of(data), datamodule=other, ckpt_path=path)


def test_a_fit_with_another_split_of_the_same_genes_is_no_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "fit_on": "paper"}
    data = PBMC3kDataModule.from_anndata(cells(), **options)
    data.setup("fit")
    first = trainer(tmp_path)
    first.fit(model_of(data), datamodule=data)
    path = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    other = PBMC3kDataModule.from_anndata(cells(), **options, split_seed=5)
    with pytest.raises(ValueError, match="different cells, inputs"):
        trainer(tmp_path, max_epochs=2).fit(model_of(data), datamodule=other, ckpt_path=path)
    data.use_preparation({**data.preparation(), "seen": {}})  # after the fit it may be changed
    data.setup("test")
    assert len(data.part("test")) == len(cells())


def test_the_preparation_is_plain_and_survives_a_checkpoint(
    trained: PBMC3kDataModule, tmp_path: Path
) -> None:
    state = trained.state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    other = PBMC3kDataModule.from_anndata(cells())
    for wrong in ({"class_names": ["a"]}, {"kind": "cells"}, {**trained.preparation(), "x": 1}):
        with pytest.raises(ValueError, match="not trained on cells"):
            other.use_preparation(wrong)
    other.load_state_dict({})
