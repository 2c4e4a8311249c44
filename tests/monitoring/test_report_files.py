"""Reports of what is really on disks: failed, killed, moved, edited and foreign runs."""

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dg_lightning.cli import main
from dg_lightning.configs import config_path
from dg_lightning.study.report import study_page, write_report

OPTIONS = ["--config", "digits/dynamicgate_input", "--trainer.max_epochs=2", "--quiet"]


def row(variant: str, **more: Any) -> dict[str, Any]:
    complete = {"status": "complete", "accuracy": 0.9, "macs": 10, "train_seconds": 1.0}
    return {"dataset": "digits", "variant": variant, "seed": 0, "device": "cpu", **complete, **more}


def test_a_variant_of_which_every_run_has_failed_is_a_row_without_figures(tmp_path: Path) -> None:
    failed = {"dataset": "digits", "variant": "bad", "seed": 0, "status": "failed", "reason": "no"}
    page = study_page(
        tmp_path, "digits", [row("baseline", params=5, params_needed=4), failed], None
    )
    assert '<th scope="row">bad</th><td>0 (1 failed)</td>' in page
    assert "bad, seed 0: no" in page


def test_notes_are_text_whatever_they_begin_with(tmp_path: Path) -> None:
    for notes in ("# Read this first", "| a", "- <b>"):
        page = study_page(tmp_path, "digits", [row("baseline")], notes)
        assert f"<p>{notes.replace('<', '&lt;').replace('>', '&gt;')}</p>" in page


def test_a_name_that_looks_like_a_number_stays_a_name(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(
        "dataset,variant,seed,accuracy,macs_reduction,status,train_seconds\n"
        "1e5,50,0,0.5,0.25,complete,1.0\n1e5,nan,0,0.6,0.5,complete,1.0\n"
    )
    page = write_report(tmp_path).read_text()
    assert "<h1>1e5</h1>" in page
    assert 'data-tip="50: 50.00%' in page
    assert 'data-tip="nan: 60.00%' in page


def test_the_folder_of_a_search_and_a_folder_as_output_are_answered_by_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.csv").write_text("number,accuracy,macs\n0,0.5,10\n")
    for args in ([str(tmp_path)], [str(tmp_path), "--output", str(tmp_path)]):
        with pytest.raises(SystemExit) as ended:
            main(["report", *args])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    place = ["--trainer.logger.save_dir", str(root), "--trainer.logger.name", "group"]
    main(["fit", *OPTIONS, *place])
    main(["test", *OPTIONS, *place])
    return root / "group"


@pytest.mark.parametrize("name", ["units", "layers", "histogram", "classes"])
@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_file_that_is_cut_off_costs_its_last_line_at_most(
    name: str, cut: int, run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "version_0" / "gates" / f"{name}.csv"
    path.write_bytes(path.read_bytes()[:-cut])
    page = write_report(copy / "version_0").read_text()
    assert "Units over time" in page
    assert "Confusion matrix" in page  # found in the other folder, which was moved along


def test_a_run_in_which_nothing_is_finite_has_a_report(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run / "version_0", copy)
    (copy / "metrics.csv").write_text(
        "epoch,step,train/loss,val/loss,val/accuracy\n0,4,nan,,\n0,9,nan,inf,0.1\n"
    )
    assert "validation accuracy" in write_report(copy).read_text()


def test_settings_that_cannot_be_read_are_shown_and_cost_nothing_else(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "version_1" / "config.yaml").write_bytes(b"a: [1, !!python/tuple \xff")
    (copy / "version_0" / "config.yaml").write_text("model: foo\n")
    (copy / "version_0" / "hparams.yaml").write_text("shape: !!python/tuple [1, 2]\n")
    page = write_report(copy / "version_0").read_text()
    assert "model: foo" in page
    assert "Made with dg-lightning" in page


def test_the_newest_run_is_the_newest_also_after_a_report_of_another(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.copytree(run / "version_0", copy / "version_7")
    for path in (copy / "version_7").iterdir():
        path.touch()
    write_report(copy / "version_0")
    assert "version_7</p>" in write_report(copy).read_text()


def test_a_report_begins_with_what_counts(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "version_0"
    metrics = path / "metrics.csv"
    head, *lines = metrics.read_text().splitlines()
    more = ",gates/budget_allowed,gates/budget_used"
    metrics.write_text("\n".join([head + more, *(f"{line},0.4,0.397" for line in lines)]))
    page = write_report(path).read_text()
    assert "<h1>digits/dynamicgate_input</h1>" in page
    (facts,) = re.findall(r'<dl class="facts">.*</dl>', page)
    figures = dict(re.findall(r"<dd>(.*?)</dd><dt>(.*?)</dt>", facts))
    tested = list(csv.DictReader((copy / "version_1" / "metrics.csv").open()))[-1]
    share = f"{float(tested['compute/macs_share']):.1%}"
    accuracy = f"{float(tested['test/accuracy']):.2%}"
    assert figures[accuracy] == "test accuracy"
    assert figures[share] == "of the dense net&#x27;s MACs"
    assert figures["40.0%"] == "budget"
    (said,) = re.findall(r'<p class="said">(.*)</p>', page)
    assert f"{accuracy} of the test samples with {share}" in said
    assert "allowed 40.0% and used 39.7%" in said
    assert "hidden layer 1" in page
    collapse = path / "gates" / "collapse.csv"
    collapse.write_text("step,layer,mode\n3,net.hidden.0.gate,all_open\n")
    assert "Gates failed: hidden layer 1." in write_report(path).read_text()
    collapse.write_text("step,layer,mode\n")
    assert "No gate failed." in write_report(path).read_text()


def test_inputs_with_names_are_listed(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run / "version_0", copy)
    gates = copy / "gates"
    lines = ["epoch,step,layer,unit,p,g", *(f"0,1,g,{i},0.{i},{i % 2}" for i in range(4))]
    (gates / "units.csv").write_text("\n".join(lines) + "\n")
    (gates / "inputs.csv").write_text('layer,shape,features\ng,4,CD3D,"a,b",<i>,MS4A1\n')
    page = write_report(copy).read_text()
    assert "The 4 most open inputs of 4" in page
    names = [page.index(f'<th scope="row">{name}</th>') for name in ("MS4A1", "a,b", "&lt;i&gt;")]
    assert names == sorted(names)  # open ones first, by p


@pytest.mark.slow
@pytest.mark.usefixtures("in_empty_folder")
def test_a_run_with_another_logger_has_its_course_too_and_a_test_spares_the_fits_config(
    tmp_path: Path,
) -> None:
    main(["fit", *OPTIONS, "--config", "logger/tensorboard"])
    page = write_report(
        tmp_path / "runs" / "digits" / "dynamicgate_input" / "version_0"
    ).read_text()
    for part in ("validation accuracy", "Loss", "Made with dg-lightning"):
        assert part in page
    main(["fit", *OPTIONS, "--trainer.logger=false", "--trainer.default_root_dir=alone"])
    main(["test", *OPTIONS, "--trainer.logger=false", "--trainer.default_root_dir=alone"])
    assert (tmp_path / "alone" / "config_test.yaml").exists()
    main(["fit", "--config", "alone/config.yaml", "--trainer.max_epochs=3", "--quiet"])
    assert "No accuracy or loss was recorded" in write_report(tmp_path / "alone").read_text()


WATCHED: dict[str, Any] = {
    "nobody": None,
    "all": {"limits": {"min_penalty_share": 1.0}},
    "one gate": {"limits": {"min_penalty_share": 1.0}, "layers": ["net.hidden.0*"]},
}


@pytest.mark.slow
@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize("watched", WATCHED)
def test_gates_that_nobody_has_watched_are_not_said_to_be_healthy(
    watched: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = yaml.safe_load(Path(config_path("digits/dynamicgate")).read_text())
    kept = settings["trainer"]["callbacks"]
    kept = [c for c in kept if not c["class_path"].endswith("CollapseDetector")]
    if WATCHED[watched] is not None:
        path = "dg_lightning.callbacks.CollapseDetector"
        kept.insert(0, {"class_path": path, "init_args": WATCHED[watched]})
    settings["trainer"]["callbacks"] = kept
    Path("own.yaml").write_text(yaml.safe_dump(settings))
    short = ["--trainer.max_epochs=2", "--trainer.enable_progress_bar=false"]
    main(["fit", "--config=own.yaml", *short])
    said = capsys.readouterr().out
    run = Path("runs/digits/dynamicgate/version_0")
    page = write_report(run).read_text()
    (run / "config.yaml").unlink()  # a run of Python has none
    alone = write_report(run).read_text()
    main(["check", "--config=own.yaml", *short])
    checked = capsys.readouterr().out
    for text in (page, alone):
        assert ("No gate failed" in text) == (watched == "all")
    for text in (page, alone, said, checked):
        assert ("not watched" in text.lower()) == (watched != "all")
