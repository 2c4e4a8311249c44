"""What a step must not cost: waiting for the device, and hooks that do nothing."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

from dg_lightning import GatedClassifier, callbacks
from dg_lightning.callbacks import (
    BudgetController,
    CollapseDetector,
    ExactResume,
    GatePenalty,
    MinimumActivity,
    TemperatureAnnealing,
    ThresholdPhases,
)


class Again:
    """A loader that gives one batch many times."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 2000

    def __iter__(self) -> Any:
        return iter([self.batch] * len(self))


class NoWaiting(pl.Callback):
    """Lets every operation that waits for the GPU fail, from one step to another."""

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            torch.cuda.set_sync_debug_mode("error")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 40:
            torch.cuda.set_sync_debug_mode("default")
            trainer.should_stop = True


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("controlled", [False, True])
def test_no_step_waits_for_the_gpu(tmp_path: Any, kind: str, controlled: bool) -> None:
    penalty: Any = BudgetController(0.5, every_n_steps=100, landing=100)
    if not controlled:
        penalty = GatePenalty(0.1, "expected_macs")
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [32, 16], "gate": {"kind": kind}}}
    acting = [
        penalty,
        TemperatureAnnealing(),
        ThresholdPhases(),
        CollapseDetector(every_n_steps=50),
        ExactResume(),
        MinimumActivity(0.1),
    ]
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        max_steps=2000,  # of which 40 are made: intervals are parts of the whole
        callbacks=[NoWaiting(), *acting],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    batch = (torch.randn(8, 20, device="cuda"), torch.randint(4, (8,), device="cuda"))
    model = GatedClassifier(net, input_shape=[20], num_classes=4)
    try:
        trainer.fit(model, Again(batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.global_step == 40


@pytest.mark.parametrize("name", callbacks.__all__)  # type: ignore[attr-defined]
def test_lightning_calls_only_hooks_that_do_something(name: str) -> None:
    used = {hook for hook in vars(pl.Callback) if callable(getattr(getattr(callbacks, name), hook))}
    if name == "RigL":  # which looks at gates there, if it is asked to
        assert callbacks.RigL().on_after_backward is None
    else:
        assert "on_after_backward" not in used
    assert {"setup", "on_train_start", "on_save_checkpoint"} <= used
