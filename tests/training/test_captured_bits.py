"""Captured steps give the same bits as ordinary ones: on a GPU, and with emulated graphs."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_nets import (
    BATCHES,
    LOW_RANK,
    STATIC,
    Looks,
    Own,
    assert_same,
    fit,
    model,
)
from emulated_graphs import emulate
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn

from dg_lightning.callbacks import (
    BudgetController,
    CollapseDetector,
    ExactResume,
    GateMonitor,
    GatePenalty,
    MagnitudePruning,
    MinimumActivity,
    RigL,
    TemperatureAnnealing,
    ThresholdPhases,
)
from dg_lightning.schedules import Phase, Schedule

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=[needs_cuda, pytest.mark.cuda])])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a Trainer is told to capture steps, where there is no GPU too."""
    if request.param == "emulated":
        emulate(monkeypatch)
    return {"accelerator": "cpu" if request.param == "emulated" else "cuda", "devices": 1}


PHASES = [Phase(0.9, 0.5, 0.0), Phase(0.5, 0.55, 1.0, begin="40%")]


def everything() -> list[Any]:
    return [
        BudgetController(0.4, every_n_steps=3),
        TemperatureAnnealing(),
        MinimumActivity("10%"),
        CollapseDetector(action="rescue", every_n_steps=5),
        GateMonitor(files=False),
        RigL(0.5, every_n_steps=7),
    ]


class Ema(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.9))


KINDS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "dense": (None, list, {}, {}),
    "static gates, every callback": (STATIC, everything, {}, {}),
    "GateNets, every callback": (LOW_RANK, everything, {}, {}),
    "ramp, phases, average": (
        LOW_RANK,
        lambda: [
            GatePenalty(Schedule(0.0, 0.5, until="80%"), "target"),
            ThresholdPhases(PHASES),
            Ema(),
        ],
        {},
        {},
    ),
    "drawn gates, dropout": (
        {**STATIC, "policy": "bernoulli"},
        lambda: [GatePenalty(0.1)],
        {"dropout": 0.3},
        {},
    ),
    "pruning": (STATIC, lambda: [MagnitudePruning(0.8), GatePenalty(0.1, "expected_macs")], {}, {}),
    "mean gradients": (None, lambda: [RigL(0.5, every_n_steps=7, grow="mean_gradient")], {}, {}),
    "updates instead of steps": (
        None,
        lambda: [RigL(0.5, every_n_steps=7, skip_optimizer_step=True)],
        {},
        {},
    ),
    "accumulation": (STATIC, everything, {}, {"accumulate_grad_batches": 4}),
    "bf16": (LOW_RANK, everything, {}, {"precision": "bf16-mixed"}),
    "fp16": (LOW_RANK, everything, {}, {"precision": "16-mixed"}),
    "clipping": (STATIC, everything, {"gate_clip_norm": 0.01}, {"gradient_clip_val": 0.1}),
    "rates by step": (
        STATIC,
        everything,
        {
            "lr_scheduler": {
                "class_path": "torch.optim.lr_scheduler.StepLR",
                "init_args": {"step_size": 5, "gamma": 0.5},
            },
            "lr_scheduler_interval": "step",
            "gate_lr_factor": 4.0,
        },
        {},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_to_the_same_bits(name: str, device: Any, tmp_path: Path) -> None:
    if name == "fp16" and device["accelerator"] == "cpu":
        pytest.skip("a loss scaler needs a GPU")
    gate, callbacks, settings, options = KINDS[name]
    ordinary, captured = model(gate, **settings), model(gate, True, **settings)
    before, after = callbacks(), callbacks()
    expected = fit(ordinary, before, tmp_path, **device, **options)
    got = fit(captured, after, tmp_path, **device, **options)
    assert_same(captured, ordinary)
    assert [repr(row) for row in got.logged] == [repr(row) for row in expected.logged]
    assert not any(expected.replayed)
    assert sum(got.replayed) > len(got.replayed) / 2
    for one, other in zip(before, after, strict=True):
        if isinstance(one, Ema):
            assert_same(other._average_model, one._average_model)


@pytest.mark.parametrize("gate", [STATIC, {**LOW_RANK, "policy": "bernoulli"}])
def test_a_resumed_training_reaches_the_same_bits(gate: Any, device: Any, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [*everything(), ExactResume()]

    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2 * BATCHES, save_top_k=-1)
    whole, resumed = model(gate, True, dropout=0.2), model(gate, True, dropout=0.2)
    fit(whole, [*callbacks(), saving], tmp_path, enable_checkpointing=True, **device)
    first = min(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    got = fit(resumed, callbacks(), tmp_path, ckpt_path=first, **device)
    assert_same(resumed, whole)
    assert len(got.replayed) == 4 * BATCHES
    assert sum(got.replayed) > len(got.replayed) / 2


def test_a_module_of_somebody_trains_to_the_same_bits(device: Any, tmp_path: Path) -> None:
    captured, ordinary = Own(), Own()
    ordinary.cuda_graphs = False
    got = fit(captured, [], tmp_path, **device)
    fit(ordinary, [], tmp_path, **device)
    assert_same(captured, ordinary)
    assert sum(got.replayed) == len(got.replayed) - 2  # the first batch of each shape


class Waits(Own):
    def losses(self, batch: Any) -> dict[str, Tensor]:
        values = super().losses(batch)
        self.last = values["loss"].item()
        return values


def test_a_step_that_waits_for_the_device_is_told_of_and_trained_as_usual(
    device: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waits, ordinary = Waits(), Waits()
    ordinary.cuda_graphs = False
    with caplog.at_level(logging.INFO):
        got = fit(waits, [], tmp_path, **device)
    fit(ordinary, [], tmp_path, **device)
    said = [line for line in caplog.messages if "not captured" in line]
    assert len(said) == 1
    assert "Waits: steps are not captured, because recording failed" in said[0]
    assert_same(waits, ordinary)
    assert not any(got.replayed)


def test_a_foreign_hook_is_not_passed_over(device: Any, tmp_path: Path) -> None:
    looks = Looks()
    got = fit(Own(), [looks], tmp_path, **device)
    assert looks.seen
    assert not any(got.replayed)
