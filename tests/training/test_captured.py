"""Captured steps where there is no GPU: why steps are not captured, and that they are made."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from captured_nets import (
    STATIC,
    Looks,
    Own,
    assert_same,
    fit,
    model,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from dg_lightning.callbacks import (
    BudgetController,
    GateMonitor,
    GatePenalty,
    RigL,
)
from dg_lightning.training.captured import capture_blocker


def test_on_a_cpu_it_says_so_once_and_trains_as_usual(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        fit(captured := model(STATIC, True), [GatePenalty(0.1)], tmp_path, accelerator="cpu")
    said = [line for line in caplog.messages if "not captured" in line]
    assert len(said) == 1
    assert "GatedClassifier" in said[0]
    assert "got cpu" in said[0]
    fit(ordinary := model(STATIC), [GatePenalty(0.1)], tmp_path, accelerator="cpu")
    assert_same(captured, ordinary)


class OwnStep(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


class OwnHook(Own):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", optimizer.param_groups[0]["params"][0].grad.norm())


def reason(module: Any, callbacks: list[Any], strategy: Any = None, **adam: Any) -> str | None:
    """Ask for the reason on a machine that may have no CUDA device."""
    trainer = SimpleNamespace(
        strategy=strategy or SingleDeviceStrategy(device=torch.device("cuda:0")),
        optimizers=[torch.optim.AdamW(module.parameters(), **{"capturable": True, **adam})],
        callbacks=callbacks,
        precision_plugin=None,
    )
    return capture_blocker(module, trainer)


def hooked() -> Own:
    module = Own()
    module.net[0].register_forward_hook(lambda *_: None)
    return module


def test_a_step_that_can_be_captured_has_no_reason_against_it() -> None:
    ours = [BudgetController(0.3), GateMonitor(), RigL(0.5), ModelCheckpoint()]
    assert reason(Own(), ours) is None
    assert reason(model(STATIC, True), ours) is None


@pytest.mark.parametrize(
    ("module", "callbacks", "adam", "said"),
    [
        (Own, [Looks()], {}, "`Looks.on_after_backward`"),
        (OwnHook, [], {}, "`OwnHook.on_before_optimizer_step`"),
        (OwnStep, [], {}, "OwnStep overrides `training_step`"),
        (hooked, [], {}, "the hooks of net.0"),
        (Own, [], {"capturable": False}, "AdamW is neither `fused` nor `capturable`"),
    ],
)
def test_what_stands_against_it_is_named(
    module: Any, callbacks: list[Any], adam: Any, said: str
) -> None:
    assert said in (reason(module(), callbacks, **adam) or "")


def test_a_fused_optimizer_is_taken_only_where_kernels_are_open() -> None:
    from dg_lightning.training.optimizers import enable_fused

    for given in ({"foreach": True}, {"fused": False}, {"capturable": True}):
        spec: Any = {"class_path": "AdamW", "init_args": {"lr": 0.1, **given}}
        assert enable_fused(spec) == spec
    spec = {"class_path": "torch.optim.NAdam", "init_args": {"lr": 0.1}}  # there is no fused one
    assert enable_fused(spec) == spec


@pytest.mark.parametrize(
    ("options", "may_be"),
    [
        ({"precision": "bf16-mixed", "gradient_clip_val": 1.0}, False),  # Lightning refuses to clip
        ({"precision": "bf16-mixed"}, True),
        ({"gradient_clip_val": 1.0}, True),
    ],
)
def test_a_fused_optimizer_is_not_taken_where_its_gradients_could_not_be_clipped(
    options: Any, may_be: bool
) -> None:
    from dg_lightning.training.optimizers import may_be_fused

    trainer = pl.Trainer(accelerator="cpu", logger=False, **options)
    assert may_be_fused(trainer, clips_gates=True) == may_be
