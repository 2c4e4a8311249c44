"""A check finds what would not work, also where the training itself no longer refuses it."""

import importlib
import json
import os
import pickle
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
from foreign_projects import PROJECTS, Late, vectors
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelPruning, Timer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dg_lightning import GatedLinear, StaticGate, check
from dg_lightning.callbacks import (
    GateMonitor,
    GatePenalty,
    MinimumActivity,
    RigL,
    StaticSparse,
    TemperatureAnnealing,
)
from dg_lightning.rewiring import SparseLayer
from dg_lightning.schedules import Clock, Schedule

_agreement, _penalty_term, _sparse = (
    importlib.import_module(f"dg_lightning.callbacks.{name}")
    for name in ("_agreement", "_penalty_term", "_sparse")
)
STEPS: dict[str, Any] = {"max_epochs": 20, "accelerator": "cpu"}


def errors(model: Any, callbacks: Any, data: Any = None, **arguments: Any) -> dict[str, str]:
    """Return the errors that a check finds, by what was looked at."""
    report = check(model, vectors() if data is None else data, callbacks, **{**STEPS, **arguments})
    found = {f.what: f.found for f in report.findings if f.status == "ERROR"}
    assert report.ok == (not found)
    return found


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


# The rows of the table of what was broken, put back one by one.


def bind_early(monkeypatch: pytest.MonkeyPatch, *classes: Any) -> None:
    """Let callbacks look for layers in `setup` again, before the module is complete."""
    for cls in classes:
        found = cls.on_fit_start

        def setup(self: Any, trainer: Any, module: Any, stage: str, found: Any = found) -> None:
            self._fits = True
            found(self, trainer, module)

        monkeypatch.setattr(cls, "setup", setup)
        monkeypatch.setattr(cls, "on_fit_start", lambda self, trainer, module: None)


def test_layers_that_are_looked_for_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    bind_early(monkeypatch, GatePenalty)
    assert "Late has no gate" in errors(Late(), [GatePenalty(0.1)])["training"]


class Replacing(Late):
    def __init__(self) -> None:
        super().__init__()
        super().configure_model()

    def configure_model(self) -> None:
        self.net = None
        super().configure_model()


def test_layers_that_are_replaced_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not errors(Replacing(), [TemperatureAnnealing(), StaticSparse(0.5)])
    bind_early(monkeypatch, TemperatureAnnealing, StaticSparse)
    found = errors(Replacing(), [TemperatureAnnealing(), StaticSparse(0.5)])
    assert "acts on net.0.gate, not part of the module" in found["TemperatureAnnealing"]
    assert "acts on net.0.linear" in found["StaticSparse"]
    assert "Not 0 after a step in net.0.linear (step 1)" in found["missing weights"]


class Noisy(Late):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad += torch.randn_like(parameter.grad)


def test_missing_weights_that_do_not_stay_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not errors(Noisy(), [StaticSparse(0.5)])
    monkeypatch.setattr(SparseLayer, "clean", lambda self, optimizer: None)
    assert "Not 0 after a step in" in errors(Noisy(), [StaticSparse(0.5)])["missing weights"]


def test_two_that_prune(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [RigL(0.5), ModelPruning("l1_unstructured", amount=0.5)]
    short = vectors(count=32)  # four batches an epoch
    assert "both decide which weights are 0" in errors(Late(), both, short)["training"]
    monkeypatch.setattr(_sparse, "refuse_other_masks", lambda *_: None)
    monkeypatch.setattr(SparseLayer, "refuse_if_replaced", lambda self: None)
    assert errors(Late(), both, short)


class Picky(torch.optim.SGD):
    """Somebody's optimizer, which does not like to step without a loss."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise ValueError("where is my closure?")
        return super().step(closure)


def test_an_optimizer_that_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tried(Late):
        def configure_optimizers(self) -> Any:
            return Picky(self.parameters(), lr=0.1)

    assert not errors(Tried(), [RigL(0.5)])
    monkeypatch.setattr(SparseLayer, "clean", lambda self, optimizer: optimizer.step())
    assert "where is my closure?" in errors(Tried(), [RigL(0.5)])["training"]


class ByHand(Late):
    raw_step = raw_backward = False
    every = 1

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss: Tensor = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.raw_backward:
            loss.backward()
        else:
            self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            optimizer: Any = self.optimizers(use_pl_optimizer=not self.raw_step)
            optimizer.step()
            optimizer.zero_grad()


def test_what_passes_by_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    class RawStep(ByHand):
        raw_step = True

    class RawBackward(ByHand):
        raw_backward = True

    assert not errors(ByHand(), [GatePenalty(0.1), RigL(0.5)])
    assert "self.optimizers()" in errors(RawStep(), [RigL(0.5)])["training"]
    assert "self.manual_backward(loss)" in errors(RawBackward(), [GatePenalty(0.1)])["training"]
    for module in (_sparse, _penalty_term):
        monkeypatch.setattr(module, "refuse_uncounted_steps", lambda *_: None)
    monkeypatch.setattr(_penalty_term.PenaltyTerm, "watch_backward", lambda *_: None)
    assert "0 optimizer steps in 40 batches" in errors(RawStep(), [RigL(0.5)])["steps"]
    assert "manual_backward" in errors(RawBackward(), [GatePenalty(0.1)])["penalty"]


def test_trainings_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = {"max_epochs": -1}
    assert not errors(Late(), [GatePenalty(0.1), StaticSparse(0.5)], **endless)
    fraction = [GatePenalty(Schedule(0.0, 0.1))]
    # The copy that acts at once is constant: the schedule itself is what is wrong.
    assert "`until` is 1.0, and the training has no known end" in str(
        errors(Late(), fraction, **endless)["GatePenalty"]
    )

    def refuse(trainer: Any) -> Clock:
        raise ValueError("A schedule needs to know how long the training is.")

    monkeypatch.setattr(Clock, "from_trainer", refuse)
    assert "how long the training is" in errors(Late(), [GatePenalty(0.1)], **endless)["training"]


def test_schedules_that_do_not_arrive() -> None:
    class EveryFourth(ByHand):
        every = 4

    found = errors(EveryFourth(), [TemperatureAnnealing()])
    assert "25% of what schedules assume" in found["steps"]
    assert "`max_steps=80`" in found["steps"]
    assert not errors(EveryFourth(), [TemperatureAnnealing()], max_steps=80)
    late = errors(Late(), [TemperatureAnnealing(until=10_000)])
    assert "Training ends at 320, before until" in late["TemperatureAnnealing"]


class Unsendable(GateMonitor):
    def __init__(self) -> None:
        super().__init__()
        self.found_in = Late

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.value_at = lambda step: step


def test_a_callback_that_cannot_be_pickled() -> None:
    with pytest.raises(AttributeError):
        pickle.dumps(lambda: 0)
    assert "cannot be sent to processes" in errors(Late(), [Unsendable()])["Unsendable"]


def test_gates_that_no_optimizer_holds_and_gates_that_do_not_run() -> None:
    class Forgotten(Late):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[1:].parameters(), lr=0.1)

    assert "No optimizer holds the parameters of net.0.gate" in str(
        errors(Forgotten(), [GatePenalty(0.1)])["gates"]
    )

    class Idle(Late):
        def configure_model(self) -> None:
            super().configure_model()
            self.idle = GatedLinear(4, 4, gate=StaticGate(4))

    report = check(Idle(), vectors(), [GatePenalty(0.1)], **STEPS)
    (warning,) = [f.found for f in report.findings if f.what == "gates"]
    assert warning.startswith("idle.gate did not run in 8 batches")


def test_a_penalty_without_weight_or_without_a_way() -> None:
    assert "its `weight` is 0" in errors(Late(), [GatePenalty(0.0)])["penalty"]


def test_a_checkpoint_that_does_not_bring_all_back() -> None:
    class Forgetful(StaticSparse):
        def state_dict(self) -> dict[str, Any]:
            return {"connections": {}, "seed": 1}

    found = errors(Late(), [Forgetful(0.5)])
    assert found


class Drifting(Late):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1 and self.global_step == 3:
            with torch.no_grad():
                self.net[1].bias += 1e-6


class Waiting(pl.Callback):
    """Waits for the other process in one of the two only."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 2:
            dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = [GatePenalty(0.1), RigL(0.5)]
    assert not errors(Late(), callbacks, ranks=2)
    found = errors(Drifting(), callbacks, ranks=2)
    assert "net.1.bias (batch 4)" in found["two processes"]
    ranks = sys.modules["dg_lightning.checking.ranks"]
    monkeypatch.setattr(ranks, "_PATIENCE", timedelta(seconds=8))
    assert "They stop" in errors(Late(), [*callbacks, Waiting()], ranks=2)["two processes"]


def test_helpers_stay_where_they_are_put_back() -> None:
    """What the tests above take away must exist, else they would take nothing away."""
    assert _sparse.refuse_other_masks is _agreement.refuse_other_masks
    assert _penalty_term.refuse_uncounted_steps is _agreement.refuse_uncounted_steps


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
    assert "There is no batch" in errors(Late(), [], limit_train_batches=0)["training"]


def test_it_leaves_no_traces() -> None:
    generator = torch.Generator().manual_seed(4)
    samples = vectors().dataset
    loader = DataLoader(samples, 8, shuffle=True, generator=generator)
    environment, state = dict(os.environ), generator.get_state()
    check(Late(), loader, [GatePenalty(0.1)], **STEPS, deterministic=True)
    assert torch.equal(generator.get_state(), state)
    assert dict(os.environ) == environment
    assert not torch.are_deterministic_algorithms_enabled()
