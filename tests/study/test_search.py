"""Searches: what is on the front, what is given up, and a small one through the program."""

import csv
import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
import wandb_file
import yaml

from dg_lightning.cli import main
from dg_lightning.cli.program import run_command
from dg_lightning.configs import config_path
from dg_lightning.study import Parameter, Search, run_search
from dg_lightning.study.search import (
    cheapest_within,
    count_dominating,
    pareto_front,
    write_results,
)
from dg_lightning.study.shared import SharedStudy


def trials(*points: tuple[float, float]) -> list[optuna.trial.FrozenTrial]:
    return [optuna.trial.create_trial(values=list(point)) for point in points]


def test_the_front_is_optunas_own() -> None:
    points = [(0.9, 0.5), (0.8, 0.3), (0.85, 0.6), (0.95, 0.9), (0.8, 0.2), (0.7, 0.2)]
    study = optuna.create_study(directions=["maximize", "minimize"])
    study.add_trials(trials(*points))
    front = pareto_front(study.trials)
    assert [tuple(t.values) for t in front] == [(0.8, 0.2), (0.9, 0.5), (0.95, 0.9)]
    assert {t.number for t in front} == {t.number for t in study.best_trials}


def test_the_cheapest_within_a_tolerance() -> None:
    found = trials((0.95, 0.9), (0.92, 0.3), (0.90, 0.1))
    assert cheapest_within(found, 0.94, 0.02) is found[1]
    assert cheapest_within(found, 0.94, 0.05) is found[2]
    assert cheapest_within(found, 0.99, 0.01) is None


def test_a_training_is_compared_at_the_same_epoch() -> None:
    others = [[(0.5, 1.0), (0.9, 0.2)], [(0.6, 0.9)], [(0.4, 0.1), (0.8, 0.5)]]
    assert count_dominating([(0.45, 1.0)], others) == 2
    assert count_dominating([(0.5, 1.0), (0.7, 0.5)], others) == 2
    assert count_dominating([(0.5, 1.0), (0.7, 0.1)], others) == 0  # cheaper than all


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs `low` and `high`, or `choices`"),
        ({"low": 0.1, "high": 1.0, "choices": [1]}, "or `choices`"),
        ({"choices": []}, "or `choices`"),
        ({"low": 2, "high": 1}, "below `high`, got 2 and 1"),
        ({"low": 0.0, "high": 1.0, "log": True}, "above 0 and below `high`, got 0.0 and 1.0"),
        ({"low": 1, "high": 9, "step": 2.5}, "got 2.5"),
    ],
)
def test_parameters_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parameter("model.gate_lr_factor", **arguments)


SHORT = ["trainer.max_epochs=2", "trainer.limit_train_batches=3", "data.batch_size=32"]


@pytest.mark.slow
def test_a_search_through_the_program(tmp_path: Path, in_empty_folder: None) -> None:
    config, out = tmp_path / "search.yaml", tmp_path / "out"
    hidden = {"name": "model.net.hidden", "choices": [[16], [64, 32]]}
    weight = {"name": "trainer.callbacks.weight", "low": 0.1, "high": 1.0, "log": True}
    config.write_text(
        yaml.safe_dump(
            {
                "base": "digits/dynamicgate",
                "baseline": "digits/baseline",
                "parameters": [hidden, weight],
                "options": SHORT,
                "tolerance": 1.0,
                "trials": 2,
            }
        )
    )
    main(["search", f"--config={config}", f"--output={out}"])
    # The same again, with one trial more.
    main(["search", f"--config={config}", f"--output={out}", "--trials=3"])
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kind"] for row in rows] == ["baseline", "search", "search", "search"]
    assert {row["status"] for row in rows} == {"complete"}
    assert {row["model.net.hidden"] for row in rows[1:]} <= {"[16]", "[64, 32]"}
    chosen = yaml.safe_load((out / "cheapest.yaml").read_text())
    cheapest = min(rows[1:], key=lambda row: (float(row["macs"]), -float(row["val_accuracy"])))
    # Executed MACs, of whatever net: the small net is cheaper, gated or not.
    small = [row for row in rows[1:] if row["model.net.hidden"] == "[16]"]
    assert cheapest in small or not small
    assert (
        str(chosen["model"]["init_args"]["net"]["init_args"]["hidden"])
        == cheapest["model.net.hidden"]
    )
    assert chosen["trainer"]["logger"]["init_args"]["save_dir"] == "runs"
    main(["fit", f"--config={out / 'cheapest.yaml'}", "--trainer.fast_dev_run=true"])
    assert "trial" in (out / "summary.md").read_text()
    assert not next(iter((out / "runs").rglob("metrics.csv"))).read_text().count("test/")


def test_hopeless_trainings_are_given_up_and_failures_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dg_lightning.study import search as module

    monkeypatch.setattr(module, "count_dominating", lambda curve, others: len(others))
    asked = Search(
        base="digits/dynamicgate",
        output=str(tmp_path),
        parameters=[Parameter("trainer.callbacks.weight", choices=[0.1, -1.0])],
        baseline="digits/baseline",
        options=SHORT,
        sampler="grid",
        trials=2,
        dominated_by=1,
        min_prune_fraction=0.0,
    )
    assert not run_search(asked, run_command)
    with (tmp_path / "results.csv").open() as file:
        baseline, *rows = csv.DictReader(file)
    assert baseline["status"] == "complete"
    said = {row["trainer.callbacks.weight"]: (row["status"], row["reason"]) for row in rows}
    assert said["0.1"] == ("pruned", "Others were better at epoch 1.")
    assert said["-1.0"][0] == "fail"
    assert "`weight` must be at least 0" in said["-1.0"][1]
    asked.parameters = [Parameter("model.gate_lr_factor", low=1, high=2)]
    with pytest.raises(ValueError, match="a search with other settings"):
        run_search(asked, run_command)


def killed_in_a_trial(folder: str) -> None:
    import torch

    from dg_lightning.study import runner

    torch.set_num_threads(1)
    runner.RunRecorder.on_train_start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    run_search(small(folder), run_command)


def small(folder: str) -> Search:
    return Search(
        base="digits/dynamicgate",
        output=folder,
        parameters=[Parameter("model.gate_lr_factor", low=1.0, high=30.0)],
        baseline="digits/baseline",
        options=SHORT,
        trials=1,
    )


@pytest.mark.slow
def test_each_trial_of_a_search_is_a_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = small(str(tmp_path))
    asked.set = ["config=logger/wandb"]
    assert run_search(asked, run_command)
    runs = [
        next(r.run for r in wandb_file.records(file) if r.HasField("run"))
        for file in wandb_file.run_files(tmp_path)
    ]
    assert {(run.run_group, run.display_name, run.job_type) for run in runs} == {
        ("search/baseline", "baseline", "search"),
        ("search/trial_1", "trial_1", "search"),
    }


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=killed_in_a_trial, args=(str(tmp_path),)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert run_search(small(str(tmp_path)), run_command)
    with (tmp_path / "results.csv").open() as file:
        done = [row["kind"] for row in csv.DictReader(file) if row["status"] == "complete"]
    assert sorted(done) == ["baseline", "search"]


def edited_config(**changes: Any) -> str:
    """Return the config of a trial, with a callback of somebody else."""
    config = yaml.safe_load(Path(config_path("digits/dynamicgate")).read_text())
    for key, value in changes.items():
        config[key] = value
    config["trainer"].setdefault("callbacks", []).append({"class_path": "evil.Callback"})
    return yaml.safe_dump(config)


EDITED = {
    "callback": edited_config(),
    "model": edited_config(model={"class_path": "evil.Model"}),
    "data": edited_config(data={"class_path": "evil.Data"}),
    "no config": "evil",
    "tag": "!!python/object/apply:evil.run []",
    "missing": None,
}


def searched(folder: Path, config: str | None, hidden: list[int]) -> tuple[Search, SharedStudy]:
    """Return a search with a baseline and a trial, whose entry in the database was edited."""
    asked = Search(
        base="digits/dynamicgate",
        output=str(folder),
        parameters=[
            Parameter("model.gate_lr_factor", low=1.0, high=30.0),
            Parameter("model.net.hidden", choices=[[7], [8, 9]]),
        ],
        baseline="digits/baseline",
    )
    found = asked.open()
    found.enqueue({}, {"kind": "baseline"})
    found.finish(found.ask(), [0.9, 1000.0], train_seconds=1.0, config="{}")
    found.enqueue({"model.gate_lr_factor": 3.5, "model.net.hidden": str(hidden)}, {})
    trial = found.ask()
    for parameter in asked.parameters:
        parameter.suggest(trial)
    edited = {} if config is None else {"config": config}
    found.finish(trial, [0.95, 100.0], train_seconds=1.0, **edited)
    return asked, found


@pytest.mark.parametrize("config", EDITED.values(), ids=EDITED)
def test_the_configs_of_a_search_come_from_its_base_not_from_the_database(
    config: str | None, tmp_path: Path
) -> None:
    asked, found = searched(tmp_path, config, [8, 9])
    said = write_results(asked, found, run_command)
    assert "cheapest.yaml" in said
    for path in (tmp_path / "cheapest.yaml", tmp_path / "pareto" / "trial_1.yaml"):
        assert "evil" not in path.read_text()
        chosen = yaml.safe_load(path.read_text())
        assert chosen["model"]["init_args"]["gate_lr_factor"] == 3.5
        assert chosen["model"]["init_args"]["net"]["init_args"]["hidden"] == [8, 9]
        base = yaml.safe_load(Path(config_path(asked.base)).read_text())
        assert chosen["data"]["class_path"] == base["data"]["class_path"]


PLAIN = optuna.distributions.CategoricalDistribution
EDITED_PARAMETERS: dict[str, dict[str, Any]] = {
    "another option": {"model.net": '{"class_path": "evil.Net"}'},
    "another choice": {"model.net.hidden": '{"class_path": "evil.Net"}'},
    "beyond the range": {"model.gate_lr_factor": 1e9},
    "text for a number": {"model.gate_lr_factor": "evil.Net"},
}


@pytest.mark.parametrize("parameters", EDITED_PARAMETERS.values(), ids=EDITED_PARAMETERS)
def test_parameters_that_were_not_searched_are_never_recommended(
    parameters: dict[str, Any], tmp_path: Path
) -> None:
    asked, found = searched(tmp_path, edited_config(), [7])
    params = {"model.gate_lr_factor": 2.0, "model.net.hidden": "[7]", **parameters}
    trial = optuna.trial.create_trial(
        params=params,
        distributions={name: PLAIN([value]) for name, value in params.items()},
        values=[0.99, 1.0],
        user_attrs={"train_seconds": 1.0, "config": edited_config()},
    )
    # Optuna checks the distributions of its trials, an edited database does not.
    real = found.trials
    found.trials = lambda *states: [*real(*states), trial]  # type: ignore[method-assign]
    trial.number = 2
    with suppress(ValueError):  # it may refuse, or leave the trial out
        assert "trial 2" not in write_results(asked, found, run_command)
    written = [path.read_text() for path in tmp_path.rglob("*.yaml")]
    assert not any("evil" in text or "1000000000" in text or "1.0e+09" in text for text in written)
