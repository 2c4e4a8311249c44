"""A run is tested, validated and used on its own data; what the command line says comes first."""

import csv
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_tables import ROWS, people

from dg_lightning.cli import main

pytestmark = [
    pytest.mark.filterwarnings("ignore:BudgetController"),  # few steps do not do
    pytest.mark.filterwarnings("ignore:.*does not record how its data was prepared"),
]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
SHORT = [*QUIET, "--trainer.max_epochs=2", "--model.net.hidden=[16]"]
TABLE = "--config=table/dynamicgate"
OWN = ["--data.path=people.csv", "--data.label=home", "--data.ignore=[person, day, rent]"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two tables and a run on one of them."""
    folder = tmp_path_factory.mktemp("project")
    people().to_csv(folder / "people.csv", index=False)
    people(30, seed=3).drop(columns="home").to_csv(folder / "new.csv", index=False)
    (folder / "other.yaml").write_text("data: {init_args: {path: new.csv}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["dg-lightning"])
        main(["fit", TABLE, *OWN, "--data.split_seed=3", *SHORT])
    return folder


@pytest.fixture
def checkpoint(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", ["dg-lightning"])
    return project / "runs/table/dynamicgate/version_0/checkpoints/last.ckpt"


def newest(folder: Path, name: str) -> Path:
    return max(folder.rglob(name), key=lambda path: path.stat().st_mtime_ns)


def data_of(folder: Path) -> dict[str, Any]:
    """Return the arguments of the data of the newest command."""
    config = yaml.safe_load(newest(folder, "config.yaml").read_text())
    arguments: dict[str, Any] = config["data"]["init_args"]
    return arguments


def predicted(folder: Path) -> list[dict[str, str]]:
    with newest(folder, "predictions.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("named", [False, True], ids=["newest", "named"])
@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_a_table_of_ones_own_is_remembered(
    command: str, named: bool, checkpoint: Path, project: Path
) -> None:
    main([command, TABLE, *([f"--ckpt_path={checkpoint}"] * named), *QUIET])
    data = data_of(project)
    assert Path(data["path"]).name == "people.csv"
    assert (data["label"], data["split_seed"]) == ("home", 3)
    assert data["ignore"] == ["person", "day", "rent"]
    if command == "test":
        header = newest(project, "confusion.csv").read_text().splitlines()[0]
        assert header == "true class,large,small"
    elif command == "predict":
        assert len(predicted(project)) == ROWS


def test_an_option_of_the_command_line_comes_first_and_the_others_stay(
    checkpoint: Path, project: Path
) -> None:
    main(["test", TABLE, "--data.batch_size=7", *QUIET])
    data = data_of(project)
    assert (data["batch_size"], data["label"]) == (7, "home")


@pytest.mark.parametrize(
    "options", [["--data.path=new.csv"], ["--config=other.yaml"]], ids=["option", "config"]
)
def test_another_file_without_labels_is_predicted_as_the_run_reads_files(
    options: list[str], checkpoint: Path, project: Path
) -> None:
    main(["predict", TABLE, *options, f"--ckpt_path={checkpoint}", *QUIET])
    rows = predicted(project)
    assert len(rows) == 30
    assert {row["true_label"] for row in rows} == {""}
    assert {row["prediction"] for row in rows} <= {"large", "small"}
    assert data_of(project)["split_seed"] == 3


@pytest.mark.usefixtures("checkpoint")
def test_a_run_of_more_configs_is_remembered_as_a_whole(project: Path) -> None:
    arguments = {"path": "people.csv", "label": "home", "ignore": ["person", "day", "rent"]}
    (project / "mine.yaml").write_text(yaml.safe_dump({"data": {"init_args": arguments}}))
    place = ["--trainer.logger.name=mine", "--trainer.default_root_dir=runs/mine"]
    main(["fit", TABLE, "--config=mine.yaml", *SHORT, *place])
    main(["test", TABLE, *QUIET, *place])
    assert Path(data_of(project)["path"]).name == "people.csv"


@pytest.mark.usefixtures("checkpoint")
def test_a_file_that_is_gone_is_named_in_one_line(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)  # where the path of the run leads nowhere
    path = project / "runs/table/dynamicgate/version_0/checkpoints/last.ckpt"
    with pytest.raises(SystemExit) as caught:
        main(["test", TABLE, f"--ckpt_path={path}", *QUIET])
    assert caught.value.code == 2
    (said,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("dg-lightning: ")]
    assert "people.csv" in said


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize(
    "option", ["batch_size=16", "split_seed=5", "cache_dir=somewhere"], ids=lambda o: o[:5]
)
def test_options_of_bundled_data_are_remembered(option: str, tmp_path: Path) -> None:
    """With another split seed, training samples would be tested."""
    name, _, value = option.partition("=")
    main(["fit", "--config=digits/baseline", f"--data.{option}", *SHORT])
    main(["test", "--config=digits/baseline", *QUIET])
    assert str(data_of(tmp_path)[name]) == value


@pytest.mark.usefixtures("in_empty_folder")
def test_another_bundled_table_is_remembered(tmp_path: Path) -> None:
    main(["fit", TABLE, "--data.bundled=wine", *SHORT])
    main(["test", TABLE, *QUIET])
    assert data_of(tmp_path)["bundled"] == "wine"


@pytest.mark.usefixtures("in_empty_folder")
def test_a_config_beside_a_checkpoint_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes with the checkpoint, from whomever that is."""
    main(["fit", "--config=digits/baseline", *SHORT])
    (tmp_path / "theirs.py").write_text("open('ran', 'w').close()\nclass Data: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = newest(tmp_path, "config.yaml")
    settings = yaml.safe_load(path.read_text())
    settings["data"] = {"class_path": "theirs.Data", "init_args": {}}
    path.write_text(yaml.safe_dump(settings))
    with suppress(SystemExit):  # it is refused, or left aside
        main(["test", "--config=digits/baseline", *QUIET])
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


OTHER_DATA = """
from dg_lightning.datamodules import DigitsDataModule

class Mine(DigitsDataModule):
    pass
"""


@pytest.mark.usefixtures("in_empty_folder")
def test_the_class_of_the_data_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mydata.py").write_text(OTHER_DATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    digits = "--config=digits/baseline"
    main(["fit", digits, "--data=mydata.Mine", "--data.split_seed=5", *SHORT])
    with pytest.raises(SystemExit):  # its package is not trusted
        main(["test", digits, *QUIET])
    assert "mydata.Mine" in capsys.readouterr().err
    main(["test", digits, "--data=mydata.Mine", *QUIET])
    assert data_of(tmp_path)["split_seed"] == 5


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize("moved", ["the project", "the checkpoint"])
def test_the_data_is_that_of_the_run_wherever_it_is(moved: str, tmp_path: Path) -> None:
    Path("project").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("project")
        Path("my.yaml").write_text("data: {init_args: {split_seed: 1}}\n")
        configs = ["--config=digits/baseline", "--config=my.yaml"]
        main(["fit", *configs, "--data.split_seed=5", *SHORT])
    place = Path("elsewhere")
    if moved == "the project":
        shutil.move("project", place)
    else:
        run = next(Path("project").rglob("config.yaml")).parent
        (place / "run").mkdir(parents=True)
        for path in (run / "config.yaml", run / "checkpoints" / "last.ckpt", "project/my.yaml"):
            shutil.copy(path, place / ("run" if str(path) != "project/my.yaml" else "."))
        configs.append("--ckpt_path=run/last.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        main(["test", *configs, *QUIET])
        assert data_of(tmp_path / place)["split_seed"] == 5


def test_another_label_than_the_runs_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["test", TABLE, f"--ckpt_path={checkpoint}", "--data.label=rent", *QUIET])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "'home'" in error
    assert "'rent'" in error
