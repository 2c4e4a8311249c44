"""A check finds what was broken once, where it is put back: the training need not refuse it."""

import importlib
import pickle
import sys
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from foreign_projects import STEPS, ByHand, Late, errors, vectors
from lightning.pytorch.callbacks import ModelPruning

from dg_lightning import GatedLinear, StaticGate, check
from dg_lightning.callbacks import (
    GateMonitor,
    GatePenalty,
    RigL,
    StaticSparse,
    TemperatureAnnealing,
)
from dg_lightning.rewiring import SparseLayer
from dg_lightning.schedules import Clock, Schedule

_shared, _penalty_term, sparse = (
    importlib.import_module(f"dg_lightning.callbacks.{name}")
    for name in ("_shared", "_penalty_term", "sparse")
)


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
    assert "net.0.gate, which the module no longer contains" in found["TemperatureAnnealing"]
    assert "net.0.linear" in found["StaticSparse"]
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
    monkeypatch.setattr(sparse, "check_no_other_masks", lambda *_: None)
    monkeypatch.setattr(SparseLayer, "check_not_replaced", lambda self: None)
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


def test_what_passes_by_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    class RawStep(ByHand):
        raw_step = True

    class RawBackward(ByHand):
        raw_backward = True

    assert not errors(ByHand(), [GatePenalty(0.1), RigL(0.5)])
    assert "self.optimizers()" in errors(RawStep(), [RigL(0.5)])["training"]
    assert "self.manual_backward(loss)" in errors(RawBackward(), [GatePenalty(0.1)])["training"]
    for module in (sparse, _penalty_term):
        monkeypatch.setattr(module, "check_step_counting", lambda *_: None)
    monkeypatch.setattr(_penalty_term.PenaltyTerm, "watch_backward", lambda *_: None)
    assert "0 optimizer steps in 40 batches" in errors(RawStep(), [RigL(0.5)])["steps"]
    assert "manual_backward" in errors(RawBackward(), [GatePenalty(0.1)])["penalty"]


def test_trainings_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = {"max_epochs": -1}
    assert not errors(Late(), [GatePenalty(0.1), StaticSparse(0.5)], **endless)
    fraction = [GatePenalty(Schedule(0.0, 0.1))]
    # The copy that acts at once is constant: the schedule itself is what is wrong.
    assert "`until` is '100%'" in str(errors(Late(), fraction, **endless)["GatePenalty"])

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
    assert "annot be sent to other processes" in errors(Late(), [Unsendable()])["Unsendable"]


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
    ranks = sys.modules["dg_lightning.checking.findings"]
    monkeypatch.setattr(ranks, "_PATIENCE", timedelta(seconds=8))
    assert "Training fails" in errors(Late(), [*callbacks, Waiting()], ranks=2)["two processes"]


def test_helpers_stay_where_they_are_put_back() -> None:
    """What the tests above take away must exist, else they would take nothing away."""
    assert sparse.check_no_other_masks is _shared.check_no_other_masks
    assert _penalty_term.check_step_counting is _shared.check_step_counting
