"""Other people's cells: donors, `.raw`, normalised values, rare types, forgotten labels."""

from typing import Any

import anndata
import numpy as np
import pytest
import scanpy
from small_cells import cells, made

from dg_lightning.datamodules import PBMC3kDataModule

OPTIONS: dict[str, Any] = {"label_column": "kind", "genes": 200}


def of(source: anndata.AnnData, **options: Any) -> PBMC3kDataModule:
    return made(PBMC3kDataModule.from_anndata(source, **{**OPTIONS, **options}))


def values(data: PBMC3kDataModule) -> np.ndarray:
    part = data.part_to_predict()
    return part.__getitems__(range(len(part)))[0].numpy()


def test_donors_stay_in_one_part() -> None:
    source = cells()
    source.obs["donor"] = [f"donor {i % 7}" for i in range(len(source))]
    data = of(source, split_by="donor")
    donors = source.obs["donor"].to_numpy()
    found = {name: set(donors[data.part(name).rows]) for name in ("train", "val", "test")}
    assert all(found.values())
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 7
    again = of(source, split_by="donor")
    assert (again.part("test").rows == data.part("test").rows).all()
    others = [of(source, split_by="donor", split_seed=seed).part("test").rows for seed in range(5)]
    assert len({frozenset(rows) for rows in others}) > 1


def test_a_column_may_name_the_parts_itself() -> None:
    source = cells()
    source.obs["set"] = ["train", "val", "test", "train", "train"] * 27
    data = of(source, split_by="set")
    for name in ("train", "val", "test"):
        assert (source.obs["set"].iloc[data.part(name).rows] == name).all()
    assert sum(len(data.part(name)) for name in ("train", "val", "test")) == len(source)


def test_splits_that_cannot_be_made_are_named() -> None:
    source = cells()
    source.obs["donor"] = ["a", "b"] * 67 + ["a"]
    with pytest.raises(ValueError, match=r"at least 3 groups .*only 1 is left"):
        of(source, split_by="donor")
    with pytest.raises(ValueError, match=r"`split_by` must be a column.*'patient'; obs has kind"):
        of(source, split_by="patient")
    source.obs["donor"] = source.obs["kind"]  # every donor has one type only
    with pytest.raises(ValueError, match="has no samples in the train split"):
        of(source, split_by="donor")


def test_raw_holds_the_counts_of_scaled_data() -> None:
    source = cells()
    expected = values(of(source))
    scaled = source.copy()
    scaled.raw = source
    scanpy.pp.log1p(scaled)
    scanpy.pp.scale(scaled)
    with pytest.raises(ValueError, match=r"negative values.*`layer`.*`raw` for `\.raw`"):
        of(scaled)
    assert np.array_equal(values(of(scaled, layer="raw")), expected)
    with pytest.raises(ValueError, match=r"no `\.raw`"):
        of(source, layer="raw")


def test_values_that_are_normalised_already_are_taken_as_they_are() -> None:
    source = cells()
    scanpy.pp.normalize_total(source, target_sum=1e4)
    scanpy.pp.log1p(source)
    with pytest.raises(ValueError, match=r"fractional.*`values: log`"):
        of(source)
    data = of(source, values="log")
    chosen = source[:, list(data.feature_names)].X.toarray()
    assert np.array_equal(values(data), chosen)
    assert data.preparation()["total_genes"] == []
    other = PBMC3kDataModule.from_anndata(source[:, ::-1].copy(), values="log")
    other.use_preparation(data.preparation())
    other.setup("predict")
    assert np.array_equal(values(other), chosen)
    with pytest.raises(ValueError, match=r"values up to .*, so it is not log-normalised"):
        of(cells_times(50.5), values="log")
    with pytest.raises(ValueError, match="only integers, so it contains counts"):
        of(cells_times(50), values="log")


def cells_times(factor: float) -> anndata.AnnData:
    source = cells()
    source.X = source.X * factor
    return source


@pytest.mark.filterwarnings("ignore:The data has labels that the net does not know")
@pytest.mark.parametrize(("rare", "classes"), [("merge", 3), ("leave_out", 2)])
def test_rare_types_are_merged_or_left_out(rare: str, classes: int) -> None:
    source = cells()
    kinds = source.obs["kind"].astype(object).to_numpy()
    kinds[:45] = ["x", "y", "z"] * 15
    source.obs["kind"] = kinds
    data = of(source, rare=rare, smallest_cluster=20)
    assert data.num_classes == classes
    assert ("rare" in data.class_names) == (rare == "merge")
    assert sum(len(data.part(name)) for name in ("train", "val", "test")) == 45 * classes
    assert len(data.part_to_predict()) == len(source)
    other = PBMC3kDataModule.from_anndata(source, **OPTIONS, rare=rare)
    other.use_preparation(data.preparation())
    other.setup("test")
    assert sorted(other.part("test").rows) == sorted(data.part("test").rows)
    with pytest.raises(ValueError, match="No class has 100 cells: lower `smallest_cluster`"):
        of(source, rare="leave_out", smallest_cluster=100)


def test_a_forgotten_label_column_is_one_line_with_the_columns(tmp_path: Any) -> None:
    source = cells()
    source.write_h5ad(tmp_path / "cells.h5ad")
    options: dict[str, Any] = {"genes": 200, "root": str(tmp_path)}
    data = PBMC3kDataModule(path=str(tmp_path / "cells.h5ad"), **options)
    with pytest.raises(ValueError, match=r"`label_column` .*; obs has kind, depth\..*`leiden: tr"):
        data.prepare_data()
    with pytest.raises(ValueError, match="obs has kind, depth"):
        made(PBMC3kDataModule.from_anndata(source, genes=200))
    asked = PBMC3kDataModule(path=str(tmp_path / "cells.h5ad"), leiden=True, **options)
    assert made(asked).class_names == ("0", "1", "2")
    with pytest.raises(ValueError, match="`leiden` and `label_column`"):
        PBMC3kDataModule(leiden=True, label_column="kind")


def test_no_cells_are_one_line() -> None:
    with pytest.raises(ValueError, match="0 cells and 3000 genes"):
        of(cells()[:0].copy())
