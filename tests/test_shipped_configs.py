"""What every shipped config must have."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dg_lightning.cli import main
from dg_lightning.configs import config_path, shipped_configs


def settings_of(name: str) -> Any:
    return yaml.safe_load(Path(config_path(name)).read_text("utf-8"))


def callbacks_of(settings: Any) -> list[str]:
    found = settings.get("trainer", {}).get("callbacks", [])
    return [callback["class_path"].rpartition(".")[2] for callback in found]


def with_keys(value: Any, *names: str) -> Iterator[Any]:
    """Yield what stands under these keys, however deep."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key in names:
            yield inner
        if isinstance(inner, dict | list):
            yield from with_keys(inner, *names)


def has_gates(settings: Any) -> bool:
    net = settings.get("model", {}).get("init_args", {})
    return "AddGates" in callbacks_of(settings) or any(with_keys(net, "gate", "input_gate"))


TRAININGS = [name for name in shipped_configs() if "model" in settings_of(name)]
GATED = [name for name in TRAININGS if has_gates(settings_of(name))]


RECIPES = [name for name in TRAININGS if name.startswith("paper/")]
# The log entries by which a callback of a recipe shows that it acts.
ACTS = {
    "GatePenalty": "gates/penalty_weight",
    "TemperatureAnnealing": "gates/temperature",
    "ThresholdRamp": "gates/threshold",
    "ThresholdPhases": "gates/keep_target",
    "RigL": "rewiring/churn",
    "MagnitudePruning": "rewiring/density",
}


def test_there_are_configs_with_and_without_gates() -> None:
    assert {"digits/dynamicgate", "vit/dynamicgate", "text/dynamicgate"} <= set(GATED)
    assert {"digits/baseline", "vit/baseline", "text/baseline"} <= {*TRAININGS} - {*GATED}
    assert all(name in GATED for name in TRAININGS if "dynamicgate" in name)


@pytest.mark.parametrize("name", GATED)
def test_gates_are_watched_for_collapse(name: str) -> None:
    assert "CollapseDetector" in callbacks_of(settings_of(name))


def test_every_dataset_of_the_paper_has_its_family() -> None:
    datasets = ("mnist", "cifar10", "tiny_imagenet", "speech_commands", "pbmc3k")
    variants = ("baseline", "dropout", "pruned", "dynamicgate", "rigl", "dynamicgate_rigl")
    assert sorted(RECIPES) == sorted(f"paper/{d}/{v}" for d in datasets for v in variants)


@pytest.mark.slow
@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.filterwarnings("ignore:(τ|θ|target)")  # as in the paper
@pytest.mark.filterwarnings("ignore:λ, θ and the keep target all jump")  # in so few steps
@pytest.mark.parametrize("name", [name for name in RECIPES if callbacks_of(settings_of(name))[1:]])
def test_every_callback_of_a_recipe_acts(
    name: str, small_datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two steps per epoch."""
    monkeypatch.setenv("DG_DATA", str(small_datasets))
    given = callbacks_of(settings_of(name))
    options = ["limit_train_batches=2", "limit_val_batches=1", "log_every_n_steps=1"]
    options += ["callbacks.RigL.every_n_steps=2"] if "RigL" in given else []
    few = [f"--trainer.{option}" for option in [*options, "accelerator=cpu"]]
    main(["fit", f"--config={name}", *few, "--data.batch_size=4"])
    rows = list(csv.DictReader(next(Path("runs").rglob("metrics.csv")).open(encoding="utf-8")))
    for callback in set(given) & set(ACTS):
        keys = [key for key in rows[0] if key.startswith(ACTS[callback])]
        assert keys, callback
        for key in keys:
            values = {float(row[key]) for row in rows if row[key]}
            constant = key in ("gates/penalty_weight/keep", "gates/penalty_weight/target")
            assert len(values) > 1 or (constant and min(values) > 0), key
    saved = torch.load(next(Path("runs").rglob("last.ckpt")), weights_only=False)
    states = {key.partition("{")[0]: state for key, state in saved["callbacks"].items()}
    if "CollapseDetector" in given:
        assert states["CollapseDetector"]["checked_at"] > 0
