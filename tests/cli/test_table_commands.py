"""Tables on the command line: train on one file, look at its columns, use the net on others."""

import csv
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from small_tables import people

from dg_lightning.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:BudgetController")  # few steps do not do

SHORT = [
    "--trainer.max_epochs=30",
    "--model.net.hidden=[16]",
    "--model.optimizer.lr=0.02",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]
IGNORE = "--data.ignore=[person, day, home]"
FIT = ["--config=table/regression_dynamicgate", "--data.path=people.csv", "--data.label=rent"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    people().to_csv(folder / "people.csv", index=False)
    people(30, seed=3).to_csv(folder / "new.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["dg-lightning"])
        main(["fit", *FIT, IGNORE, *SHORT])
    return folder


@pytest.fixture
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    return next(project.rglob("last.ckpt"))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def newest(folder: Path, name: str) -> Path:
    return max(folder.rglob(name), key=lambda path: path.stat().st_mtime)


def test_features_tell_what_decides(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["features", str(run.parents[1])])
    rows = rows_of(run.parents[1] / "features.csv")
    worth = {row["column"]: float(row["loss_of_r2"]) for row in rows}
    assert set(worth) == {"age", "height", "city", "smokes"}
    assert worth["age"] > 0.3
    assert worth["city"] > 0.1
    assert max(abs(worth["height"]), abs(worth["smokes"])) < 0.05
    assert sum(int(row["kept"]) for row in rows) == 4  # half of 9 inputs, rounded down
    assert all(float(row["loss_of_r2"]) == 0 for row in rows if row["kept"] == "0")
    assert (run.parents[1] / "features.png").stat().st_size > 5000
    assert "columns are kept" in capsys.readouterr().out


def test_another_file_is_predicted_in_units_of_the_target(run: Path, project: Path) -> None:
    main(["predict", f"--ckpt_path={run}", *FIT[:1], "--data.path=new.csv", *SHORT[3:]])
    rows = rows_of(newest(project, "predictions.csv"))
    others = ["person", "day", "home"]  # columns that are no inputs
    assert list(rows[0]) == ["row", "prediction", "true_label", "part", *others]
    truth = pd.read_csv("new.csv")["rent"]
    errors = np.array([float(row["prediction"]) for row in rows]) - truth
    assert len(rows) == 30
    assert errors.std() < 0.6 * truth.std()


def test_an_exported_regressor_answers_in_units_of_the_target(
    run: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", f"--ckpt_path={run}", "--format=onnx", "--output=net.onnx"])
    said = capsys.readouterr().out
    before, after = said.split("R² on the test split: ")[1].split("%")[:2]
    assert after.split()[-1] == before  # both as in the test
    import onnxruntime

    session = onnxruntime.InferenceSession("net.onnx")
    (output,) = session.run(None, {"x": np.zeros((1, 9), dtype=np.float32)})
    assert 200 < output.item() < 900  # rents, not standardised ones


def test_a_classifier_takes_a_csv_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    people().to_csv("people.csv", index=False)
    names = ["--data.path=people.csv", "--data.label=home", "--data.ignore=[person, day, rent]"]
    main(["fit", "--config=table/dynamicgate", *names, *SHORT])
    main(["test", "--config=table/dynamicgate", *names, *SHORT[3:]])
    rows = rows_of(newest(tmp_path, "confusion.csv"))
    right = sum(int(row[row["true class"]]) for row in rows)
    assert right / sum(int(row[name]) for row in rows for name in ("large", "small")) > 0.8


def test_features_need_a_run_on_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config=digits/baseline", "--trainer.max_epochs=1", *SHORT[3:]])
    with pytest.raises(SystemExit) as caught:
        main(["features", "--config=digits/baseline"])
    assert caught.value.code == 2


@pytest.mark.slow
def test_no_table_of_a_run_holds_a_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dg-lightning"])
    table = people()
    names = {"age": "=cmd|'/c calc'!A1", "city": "+city", "smokes": "@SUM(1)", "person": "-1+cmd"}
    table = table.rename(columns=names)
    table["day"] = "=HYPERLINK(1)"
    table["home"] = table["home"].map({"large": "=large()", "small": "@small"})
    table.to_csv("formulas.csv", index=False)
    options = ["--config=table/dynamicgate", "--data.path=formulas.csv", "--data.label=home"]
    options += ["--data.ignore=[-1+cmd, day, rent]", *SHORT]
    main(["fit", *options, "--trainer.max_epochs=2"])
    run = next(Path("runs").rglob("last.ckpt"))
    for command in ("test", "predict"):
        main([command, *options, f"--ckpt_path={run}"])
    main(["features", str(run.parents[1])])
    written = {path.name for path in Path("runs").rglob("*.csv")}
    assert {"predictions.csv", "confusion.csv", "features.csv", "compute.csv"} <= written
    for path in Path("runs").rglob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            cells = {cell for line in csv.reader(file) for cell in line if cell}
        suspects = {cell for cell in cells if cell.strip()[:1] in tuple("=+-@")}
        assert not {cell for cell in suspects if not is_number(cell)}, path
    predictions = newest(Path("runs"), "predictions.csv").read_text(encoding="utf-8")
    for text in ("=large()", "@small", "=HYPERLINK(1)", "-1+cmd"):
        assert text in predictions  # told, behind a mark


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
