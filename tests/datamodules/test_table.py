"""Tables: inputs against scikit-learn's, splits and checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from small_tables import IGNORE, ROWS, people, ready

from dg_lightning.datamodules import TabularDataModule


def inputs_of(data: TabularDataModule, part: str = "all") -> torch.Tensor:
    chosen = data.part_to_predict() if part == "all" else data.part(part)
    return chosen.get_batch(np.arange(len(chosen)))[0]


def test_inputs_are_those_of_scikit_learn_fitted_to_the_training_rows() -> None:
    table, data = people(), ready()
    training = table.iloc[data.part("train").rows]
    scaled = make_pipeline(StandardScaler(), SimpleImputer(add_indicator=True))
    theirs = make_column_transformer(
        (StandardScaler(), ["age"]),
        (scaled, ["height"]),
        (OneHotEncoder(sparse_output=False), ["city", "smokes"]),
    )
    table["city"] = table["city"].fillna("(missing)")
    training = training.assign(city=training["city"].fillna("(missing)"))
    expected = theirs.fit(training).transform(table)
    # Theirs has "(missing)" first of the cities, as ours has.
    np.testing.assert_allclose(inputs_of(data), expected, atol=1e-6)
    assert data.feature_names == (
        *("age", "height", "height (missing)"),
        *("city=(missing)", "city=Aachen", "city=Bonn", "city=Emden"),
        *("smokes=False", "smokes=True"),
    )


def test_statistics_come_from_training_rows_alone() -> None:
    table = people()
    first = ready(table)
    outside = np.concatenate([first.part(name).rows for name in ("val", "test")])
    table.loc[outside, "age"] = 1e6
    changed = ready(table)
    assert changed.preparation()["numbers"] == first.preparation()["numbers"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "csv.gz", "parquet"])
def test_files_give_what_the_frame_gives(ending: str, tmp_path: Path) -> None:
    path, table = tmp_path / f"people.{ending}", people()
    if ending == "parquet":
        table.to_parquet(path)
    else:
        table.to_csv(path, index=False, sep="\t" if ending == "tsv" else ",")
    options: Any = {"label": "home", "ignore": IGNORE, "root": str(tmp_path)}
    data = TabularDataModule(path=str(path), **options)
    data.setup("fit")
    torch.testing.assert_close(inputs_of(data), inputs_of(ready()))
    again = TabularDataModule(path=path.name, **options)  # under the root
    again.setup("fit")
    assert again.preparation() == data.preparation()


def test_a_polars_frame_is_a_table() -> None:
    polars = pytest.importorskip("polars")
    torch.testing.assert_close(inputs_of(ready(polars.from_pandas(people()))), inputs_of(ready()))


@pytest.mark.filterwarnings("ignore:Column 'person' has levels")
def test_numbers_can_be_categories_and_classes_sort_as_numbers() -> None:
    table = people().assign(floor=np.arange(ROWS) % 11)
    data = ready(table, label="floor", categories=["person"], ignore=["day", "rent", "home"])
    assert data.class_names == tuple(map(str, range(11)))
    assert "person=7" in data.feature_names


@pytest.mark.filterwarnings("ignore:10 of 240 rows have no label")
def test_rows_without_a_label_are_predicted_only() -> None:
    table = people()
    table.loc[:9, "home"] = None
    data = ready(table)
    assert sum(len(data.part(name)) for name in ("train", "val", "test")) == ROWS - 10
    samples = data.describe_samples()
    assert len(data.part_to_predict()) == ROWS
    assert list(samples["true_label"][:10]) == [""] * 10
    assert set(samples["part"][:10]) == {""}
    assert samples["day"] == table["day"].tolist()  # a column that is no input tells rows apart
    assert not {"age", "home"} & set(samples)


def test_columns_that_are_no_inputs_tell_rows_apart_as_they_are_written(tmp_path: Path) -> None:
    table = people()
    table["person"] = [f"{number:05}" for number in range(ROWS)]
    table["prediction"] = "mine"
    table.to_csv(tmp_path / "people.csv", index=False)
    options: Any = {"ignore": [*IGNORE, "prediction"], "batch_size": 16}
    data = TabularDataModule(path=str(tmp_path / "people.csv"), label="home", **options)
    data.setup("fit")
    samples = data.describe_samples()
    assert samples["person"] == table["person"].tolist()  # with their zeros
    assert set(samples["prediction (table)"]) == {"mine"}  # ours has the plain name
    assert list(samples)[:3] == ["row", "true_label", "part"]
    numbered = people()[["age", "height", "home"]].set_axis([0, 1, 2], axis=1)
    found = TabularDataModule.from_frame(numbered, label="2", batch_size=16)
    found.setup("fit")
    assert list(found.describe_samples()) == ["row", "true_label", "part"]


def test_regression_has_numbers_and_their_scale() -> None:
    data = ready(label="rent", task="regression", ignore=["person", "day", "home"])
    labels = data.part("train").labels
    assert labels.dtype == torch.float32
    assert data.class_names == ()
    assert data.target_scale == pytest.approx(
        (labels.mean().item(), labels.std(correction=0).item())
    )
    assert "rent is" in data.describe_parts()


def test_groups_stay_together_and_a_column_can_assign_parts() -> None:
    data = ready(split_by="person", ignore=["day", "rent"])
    groups = [set(data.part(name).rows // 4) for name in ("train", "val", "test")]
    assert not groups[0] & groups[1]
    assert not (groups[0] | groups[1]) & groups[2]
    assert "person" not in data.feature_names


@pytest.mark.parametrize("val", ["val", "Valid", "validation"])
def test_a_column_can_assign_parts_by_their_usual_names(val: str) -> None:
    parts = ["Train", val, "test", "train"]
    table = people().assign(part=[parts[row % 4] for row in range(ROWS)])
    given = ready(table, split_by="part")
    assert set(given.part("val").rows % 4) == {1}
    assert set(given.part("test").rows % 4) == {2}


def test_validation_is_held_out_where_a_column_names_no_rows_for_it() -> None:
    table = people().assign(part=["train", "train", "train", "test"] * (ROWS // 4))
    data = ready(table, split_by="part")
    assert set(data.part("test").rows % 4) == {3}
    assert len(data.part("val")) == 18
    assert 3 not in set(data.part("val").rows % 4)


def test_rows_of_a_group_of_training_are_not_tested_in_another_table() -> None:
    settings: Any = {"split_by": "person", "ignore": ["day", "rent"]}
    fitted = ready(**settings)
    trained = {row // 4 for part in ("train", "val") for row in fitted.part(part).rows}
    longer = pd.concat([people(), people(ROWS, seed=5)], ignore_index=True)
    other = TabularDataModule.from_frame(longer, label="home", **settings)
    other.use_preparation(fitted.preparation())
    other.setup("test")
    assert not {longer["person"][row] for row in other.part("test").rows} & trained


def test_rows_of_one_time_are_not_split() -> None:
    table = people().assign(day=np.arange(ROWS) // 10)
    data = ready(table, time_column="day", ignore=["person", "rent"])
    days = [set(data.part(name).rows // 10) for name in ("train", "val", "test")]
    assert max(days[0]) < min(days[1])
    assert max(days[1]) < min(days[2])


def test_a_constant_column_stays_harmless() -> None:
    fitted = ready(people().assign(fee=0.1))
    other = TabularDataModule.from_frame(people().assign(fee=0.2), label="home", ignore=IGNORE)
    other.use_preparation(fitted.preparation())
    other.setup("predict")
    assert inputs_of(other).abs().max() < 100


def test_levels_do_not_depend_on_the_other_rows() -> None:
    rooms = np.array([1.0, 2.0, 2.5])[np.arange(ROWS) % 3]
    options: Any = {"categories": ["rooms"], "ignore": IGNORE}
    fitted = ready(people().assign(rooms=rooms), **options)
    other = TabularDataModule.from_frame(people().assign(rooms=2), label="home", **options)
    other.use_preparation(fitted.preparation())
    other.setup("predict")
    assert inputs_of(other)[:, other.feature_names.index("rooms=2")].eq(1).all()


def test_what_may_leak_is_told(tmp_path: Path) -> None:
    path = tmp_path / "indexed.csv"
    people().to_csv(path)  # with its index
    data = TabularDataModule(path=str(path), label="home", ignore=IGNORE, root=str(tmp_path))
    with pytest.warns(UserWarning, match="without a name are ignored"):
        data.setup("fit")
    assert not any("Unnamed" in name for name in data.feature_names)
    with pytest.warns(UserWarning, match="'number' has a different whole number"):
        ready(people().assign(number=np.arange(ROWS) + 1))
    with pytest.warns(UserWarning, match="test rows equal a training row"):
        ready(pd.concat([people()] * 2, ignore_index=True))


def test_the_last_rows_in_time_are_the_test() -> None:
    table = people().sample(frac=1, random_state=0)
    data = ready(table, time_column="day", ignore=["person", "rent"])
    days = [table["day"].to_numpy()[data.part(name).rows] for name in ("train", "val", "test")]
    assert days[0].max() < days[1].min()
    assert days[1].max() < days[2].min()
    assert len(days[2]) == round(0.2 * ROWS)


def test_a_checkpoint_aligns_another_table_by_name() -> None:
    fitted = ready()
    mixed = people().iloc[:, ::-1]
    other = ready(mixed, stage="test")
    other.use_preparation(fitted.preparation())
    assert other.feature_names == fitted.feature_names
    torch.testing.assert_close(inputs_of(other), inputs_of(fitted))
    # The same rows have the split of the training.
    assert other.part("test").rows.tolist() == sorted(fitted.part("test").rows.tolist())


def test_rows_of_training_are_not_tested_in_a_longer_table() -> None:
    fitted = ready()
    longer = pd.concat([people(100, seed=1), people()], ignore_index=True)
    other = TabularDataModule.from_frame(longer, label="home", ignore=IGNORE)
    other.use_preparation(fitted.preparation())
    other.setup("test")
    known = {100 + row for row in fitted.part("train").rows} | {
        100 + row for row in fitted.part("val").rows
    }
    tested = set(other.part("test").rows.tolist())
    assert not tested & known
    assert tested == set(range(100 + ROWS)) - known


@pytest.mark.filterwarnings("ignore:.*equal a training row")
def test_duplicates_do_not_move_rows_of_the_same_table_between_parts() -> None:
    table = pd.concat([people()] * 3, ignore_index=True)  # each row three times
    fitted = ready(table)
    other = TabularDataModule.from_frame(table, label="home", ignore=IGNORE)
    other.use_preparation(fitted.preparation())
    other.setup("test")
    assert other.part("test").rows.tolist() == sorted(fitted.part("test").rows.tolist())


def test_new_levels_and_missing_values_are_told_and_taken_as_none() -> None:
    fitted = ready()
    table = people(20, seed=2)
    table.loc[0, "city"], table.loc[1, "age"] = "Dresden", np.nan
    other = TabularDataModule.from_frame(table, label="home", ignore=IGNORE)
    other.use_preparation(fitted.preparation())
    with pytest.warns(UserWarning, match="Dresden"), pytest.warns(UserWarning, match="'age'"):
        other.setup("predict")
    inputs = inputs_of(other)
    cities = [i for i, name in enumerate(other.feature_names) if name.startswith("city=")]
    assert inputs[0, cities].eq(0).all()
    assert inputs[1, 0] == 0


def test_a_file_that_was_read_before_is_told_of_again(tmp_path: Path) -> None:
    table = people(30)
    table.loc[0, "city"] = "Ulm"
    table.to_csv(tmp_path / "new.csv", index=False)
    preparation = ready().preparation()
    for _ in range(2):  # the second time from the cache
        data = TabularDataModule(path=str(tmp_path / "new.csv"), cache_dir=str(tmp_path / "cache"))
        data.use_preparation(preparation)
        with pytest.warns(UserWarning, match="not in the training rows.*: Ulm"):
            data.setup("predict")
    assert len(list((tmp_path / "cache").glob("Tabular-*/"))) == 1


def test_a_table_without_labels_is_predicted_but_not_tested() -> None:
    fitted = ready()
    other = TabularDataModule.from_frame(people().drop(columns="home"), label="home")
    other.use_preparation(fitted.preparation())
    other.setup("predict")
    assert len(other.part_to_predict()) == ROWS
    assert other.describe_parts() == f"the frame, {ROWS} rows, aligned to the checkpoint by name"
    with pytest.raises(ValueError, match=r"no label column 'home'.*predict"):
        other.setup("test")


def test_another_table_must_have_the_columns_that_the_net_reads() -> None:
    preparation = ready().preparation()
    other = TabularDataModule.from_frame(people().drop(columns="age"), label="home")
    other.use_preparation(preparation)
    with pytest.raises(ValueError, match="expects age, which the frame lacks"):
        other.setup("predict")
    with pytest.raises(ValueError, match="not trained on a table"):
        other.use_preparation({"kind": "cells"})
