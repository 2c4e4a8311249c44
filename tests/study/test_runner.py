"""Studies on the digits: killed and resumed, failing in part, with several workers."""

import csv
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb_file

from dg_lightning.cli import main
from dg_lightning.cli.program import run_command
from dg_lightning.study import Study, Variant, run_study, runner
from dg_lightning.study.shared import TrialQueue

SHORT = ["trainer.max_epochs=1", "trainer.limit_train_batches=3", "data.batch_size=32"]
TIMES = ("train_seconds",)


def study(folder: Path, **changes: Any) -> Study:
    defaults: dict[str, Any] = {
        "dataset": "digits",
        "output": str(folder),
        "variants": {"baseline": Variant(), "dropout": Variant()},
        "seeds": 2,
        "options": SHORT,
    }
    return Study(**{**defaults, **changes})


def results(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def killed(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_training(self: Any, *_: Any) -> None:
    if os.environ.setdefault("TRIALS", "") == "x":  # the second trial of this process
        killed()
    os.environ["TRIALS"] += "x"
    self._start = 0.0


def killed_in_finish(self: Any, trial: Any, row: Any) -> None:
    trial.set_user_attr("row", dict(row))
    killed()


KILLS: list[tuple[Any, str, Callable[..., None]]] = [
    (runner.RunRecorder, "on_train_start", killed_in_training),
    (TrialQueue, "record_result", killed_in_finish),
    (runner, "write_tables", killed),
]


def run_and_be_killed(folder: str, kill: int) -> None:
    torch.set_num_threads(1)
    place, name, replacement = KILLS[kill]
    setattr(place, name, replacement)
    run_study(study(Path(folder)), run_command)


@pytest.mark.slow
def test_a_study_killed_three_times_ends_as_one_that_was_not(tmp_path: Path) -> None:
    interrupted, whole = tmp_path / "interrupted", tmp_path / "whole"
    fresh = multiprocessing.get_context("spawn")  # a fork of one that has trained may not train
    for kill in range(len(KILLS)):
        process = fresh.Process(target=run_and_be_killed, args=(str(interrupted), kill))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert run_study(study(interrupted), run_command)
    assert run_study(study(whole), run_command)
    rows = results(interrupted)
    assert rows == results(whole)
    assert [(r["variant"], r["seed"], r["status"]) for r in rows] == [
        (v, s, "complete") for v in ("baseline", "dropout") for s in "01"
    ]
    folder = interrupted / "runs" / "baseline" / "seed_0"
    assert (folder / "config.yaml").is_file()
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    # A second call trains nothing again.
    before = (folder / "config.yaml").stat().st_mtime_ns
    assert run_study(study(interrupted), run_command)
    assert (folder / "config.yaml").stat().st_mtime_ns == before


def interrupted_in_training(self: Any, *_: Any) -> None:
    self._start = 0.0
    os.kill(os.getpid(), signal.SIGINT)


def run_and_be_interrupted(folder: str) -> None:
    torch.set_num_threads(1)
    runner.RunRecorder.on_train_start = interrupted_in_training  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_study(study(Path(folder), seeds=1), run_command)


@pytest.mark.slow
def test_ctrl_c_stops_a_study_and_loses_nothing(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=run_and_be_interrupted, args=(str(tmp_path),)
    )
    process.start()
    process.join()
    assert process.exitcode == 1
    assert not (tmp_path / "results.csv").exists()  # no trial has ended, none has failed
    assert run_study(study(tmp_path, seeds=1), run_command)
    assert [row["status"] for row in results(tmp_path)] == ["complete", "complete"]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["config=logger/wandb", "trainer.logger=WandbLogger"])
def test_each_trial_is_a_wandb_run_named_by_study_variant_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    variants = {"dynamicgate": Variant(), "wrong": Variant("digits/dynamicgate", ["model.no=1"])}
    assert not run_study(study(tmp_path, variants=variants, set=[option]), run_command)
    runs = [
        (next(r.run for r in wandb_file.records(file) if r.HasField("run")), file)
        for file in wandb_file.run_files(tmp_path / "runs")
    ]
    assert {(run.run_group, run.display_name, run.job_type) for run, _ in runs} == {
        ("digits/dynamicgate", f"dynamicgate/seed_{seed}", "study") for seed in (0, 1)
    }
    for run, file in runs:
        assert {"study", "dynamicgate"} <= set(run.tags)
        logged = {key for row in wandb_file.history(file) for key in row}
        assert {"val/accuracy", "test/accuracy", "gates/open_rate", "compute/macs_share"} <= logged
        (end,) = (r.exit for r in wandb_file.records(file) if r.HasField("exit"))
        assert end.exit_code == 0
    assert (tmp_path / "runs" / "dynamicgate" / "seed_1" / "metrics.csv").is_file()


@pytest.mark.slow
def test_a_trial_started_again_leaves_one_wandb_run_and_a_failed_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    failing = {"dynamicgate": Variant("digits/dynamicgate", ["model.optimizer.lr=1e30"])}
    options: dict[str, Any] = {"seeds": 1, "variants": failing, "set": ["config=logger/wandb"]}
    for again in (False, True):
        assert not run_study(study(tmp_path, retry_failed=again, **options), run_command)
        (file,) = wandb_file.run_files(tmp_path)
        (end,) = (r.exit for r in wandb_file.records(file) if r.HasField("exit"))
        assert end.exit_code == 1


def test_one_failure_is_told_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = {
        "baseline": Variant(),
        "wrong": Variant("digits/baseline", ["model.no_such_option=1"]),
        "sharp": Variant("digits/dynamicgate", ["trainer.callbacks.weight=-1.0"]),
    }
    assert not run_study(study(tmp_path, variants=variants, seeds=1), run_command)
    good, wrong, sharp = results(tmp_path)
    assert (good["status"], wrong["status"], sharp["status"]) == ("complete", "failed", "failed")
    assert "no_such_option" in wrong["reason"]
    assert "`weight` must be at least 0" in sharp["reason"]
    said = capsys.readouterr().out
    assert "[1/3] baseline, seed 0: " in said
    assert "best so far baseline, " in said
    assert "2 of 3 trials failed" in said
    assert "Failed:" in (tmp_path / "summary.md").read_text()
    log = (tmp_path / "runs" / "sharp" / "seed_0.log").read_text()
    assert "Traceback" in log


@pytest.mark.slow
def test_two_workers_of_the_program(tmp_path: Path, in_empty_folder: None) -> None:
    config = tmp_path / "study.yaml"
    config.write_text(
        "dataset: digits\nseeds: [4]\nvariants:\n  baseline: {}\n"
        "  gated: {config: digits/dynamicgate, options: ['trainer.callbacks.weight=0.5']}\n"
    )
    given = [f"--set={SHORT}", "--workers=2", f"--output={tmp_path / 'out'}"]
    main(["study", f"--config={config}", *given])
    rows = results(tmp_path / "out")
    assert [(row["variant"], row["seed"]) for row in rows] == [("baseline", "4"), ("gated", "4")]
    assert float(rows[0]["macs_reduction"]) == 0
    assert int(rows[0]["params"]) == int(rows[0]["params_needed"]) == 50_826
    assert int(rows[1]["params"]) == 50_826 + 64 + 256 + 128
    for name in ("summary.csv", "summary.md", "report.html"):
        assert "gated" in (tmp_path / "out" / name).read_text()
    assert list((tmp_path / "out" / "workers").glob("*.lock")) in (
        [],
        [tmp_path / "out" / "workers" / "create.lock"],
    )


def test_mistakes_are_one_line(
    tmp_path: Path, in_empty_folder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*args: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["study", *args])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "did you mean studies/digits?" in said("--config=studies/digit", "--output=o")
    assert "output" in said("--config=studies/digits")
    assert "variant, 'base'" in said("--config=studies/digits", "--output=o", "--only=[base]")
    assert "`workers` must be at least 1" in said(
        "--config=studies/digits", "--output=o", "--workers=0"
    )
