"""Projects that work pass a check, which leaves nothing behind."""

import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from foreign_projects import PROJECTS, STEPS, ByHand, Late, errors, vectors
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, Timer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dg_lightning import check
from dg_lightning.callbacks import (
    GateMonitor,
    GatePenalty,
    MinimumActivity,
    RigL,
)


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS)
def test_projects_that_were_not_written_for_it_pass(project: str, tmp_path: Path) -> None:
    if project == "ResNet":
        pytest.importorskip("torchvision")
    model, data, callbacks = PROJECTS[project]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    report = check(model, data, callbacks, **STEPS)
    assert report.ok, str(report)
    asked = {finding.what for finding in report.findings}
    assert {"steps", "gates", "penalty", "ledger", "checkpoint", "time"} <= asked
    assert asked >= {type(callback).__name__ for callback in callbacks}
    # Nothing of the user's has changed.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(getattr(callback, "connections", {}) for callback in callbacks)
    assert json.loads(report.to_json())["ok"]
    assert "Check" in str(report)


def test_it_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, data, callbacks = PROJECTS["configure_model"]()
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    assert check(model, data, [*callbacks, saving], **STEPS).ok
    assert not list(tmp_path.iterdir())


def test_what_the_ledger_cannot_count_is_named() -> None:
    model, data, callbacks = PROJECTS["Transformer"]()
    report = check(model, data, callbacks, **STEPS)
    (ledger,) = [finding for finding in report.findings if finding.what == "ledger"]
    assert ledger.status == "warning"
    assert "Not counted: memory." in ledger.found


# What would be the check's own mistakes: false alarms, and traces.


class Pair:
    """Somebody's own batch."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def pair(samples: Any) -> Pair:
    return Pair(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))


class OwnBatches(Late):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch.x), batch.y)


class Locked(pl.Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class WithArray(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"array": numpy.arange(3)}


class Holding(pl.Callback):
    def __init__(self, model: Any) -> None:
        self.model = model

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert self.model is pl_module


class ByFours(ByHand):
    every = 4


def test_batches_of_somebodys_own_class() -> None:
    samples = vectors().dataset
    loader = DataLoader(samples, 8, collate_fn=pair)
    report = check(OwnBatches(), loader, [GatePenalty(0.1)], **STEPS)
    assert report.ok, str(report)
    (ledger,) = [finding for finding in report.findings if finding.what == "ledger"]
    assert ledger.status == "warning"


STEP = {"start": 0.0, "end": 1.0, "shape": "step", "begin": 100}


@pytest.mark.parametrize(
    ("model", "callbacks", "arguments"),
    [
        (Late, [GatePenalty(0.1), EarlyStopping("gates/penalty")], {}),
        (Late, [WithArray(), RigL(0.5)], {}),
        (Late, [Timer(timedelta(hours=1)), RigL(0.5)], {}),
        (ByFours, [], {}),
        (ByFours, [GatePenalty(0.1)], {}),
        (Late, [MinimumActivity()], {"max_epochs": -1}),
        (Late, [GatePenalty(STEP)], {"max_epochs": -1}),  # type: ignore[arg-type]
        (Late, [GatePenalty(0.1, layer_weights={"*": 0.0})], {}),
        (Late, [GatePenalty(0.1)], {"min_epochs": 10}),
        (Late, [LearningRateMonitor(), GateMonitor()], {}),
        (Late, [RigL(0.5)], {"accumulate_grad_batches": 4, "precision": "bf16-mixed"}),
        (Late, [RigL(0.5), GatePenalty(0.1)], {"max_steps": 1}),
    ],
)
def test_what_works_is_no_error(model: Any, callbacks: Any, arguments: Any) -> None:
    assert not errors(model(), callbacks, **arguments)


def test_a_callback_may_hold_the_model() -> None:
    model = Late()
    assert not errors(model, [Holding(model), GatePenalty(0.1)])


def test_what_cannot_be_copied_and_data_without_batches_are_errors() -> None:
    assert "cannot be copied" in errors(Late(), [Locked()])["copies"]
    assert "`limit_train_batches`" in errors(Late(), [], limit_train_batches=0)["training"]


def test_it_leaves_no_traces() -> None:
    generator = torch.Generator().manual_seed(4)
    samples = vectors().dataset
    loader = DataLoader(samples, 8, shuffle=True, generator=generator)
    environment, state = dict(os.environ), generator.get_state()
    check(Late(), loader, [GatePenalty(0.1)], **STEPS, deterministic=True)
    assert torch.equal(generator.get_state(), state)
    assert dict(os.environ) == environment
    assert not torch.are_deterministic_algorithms_enabled()
