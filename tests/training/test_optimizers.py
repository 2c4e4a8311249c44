"""Optimizers and schedulers of our modules: groups, clipping, lengths."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_classifier import Blobs, model_of, trainer_of

from dg_lightning import GatedMLP, param_groups


def test_gate_parameters_have_their_own_group() -> None:
    optimizer: Any = {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": 0.01, "weight_decay": 0.1},
    }
    model = model_of(optimizer=optimizer, gate_lr_factor=0.5)
    built = model.configure_optimizers()
    assert isinstance(built, torch.optim.AdamW)
    rest, gates = built.param_groups
    assert (rest["lr"], rest["weight_decay"]) == (0.01, 0.1)
    assert (gates["lr"], gates["weight_decay"]) == (0.005, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    assert all("gate" in names[id(p)] for p in gates["params"])
    # Logits and biases are gates' own, matrices of GateNets learn as weights do.
    assert all(p.ndim == 2 for p in rest["params"] if "gate" in names[id(p)])
    assert any("gate" in names[id(p)] for p in rest["params"])
    assert all(p.ndim == 1 for p in gates["params"])
    assert len(rest["params"]) + len(gates["params"]) == len(list(model.parameters()))
    plain: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [4]}}
    assert len(model_of(net=plain).configure_optimizers().param_groups) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("trainer_clip", [None, 0.01])
def test_gate_gradients_are_clipped_on_their_own(
    tmp_path: Path, trainer_clip: float | None
) -> None:
    norms: dict[str, float] = {}

    class Watch(pl.Callback):
        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 0:
                return
            for index, group in enumerate(optimizer.param_groups):
                grads = [p.grad.flatten() for p in group["params"]]
                norms[str(index)] = torch.cat(grads).norm().item()

    model = model_of(gate_clip_norm=1e-4)
    trainer_of(
        tmp_path,
        max_epochs=1,
        limit_train_batches=2,
        callbacks=[Watch()],
        gradient_clip_val=trainer_clip,
        enable_checkpointing=False,
    ).fit(model, datamodule=Blobs())
    assert norms["1"] <= 1.001e-4
    total = (norms["0"] ** 2 + norms["1"] ** 2) ** 0.5
    assert total > 0.02 if trainer_clip is None else total == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("scheduler", "interval", "lr"),
    [
        ({"class_path": "StepLR", "init_args": {"step_size": 1, "gamma": 0.5}}, "epoch", 0.25),
        ({"class_path": "StepLR", "init_args": {"step_size": 7, "gamma": 0.1}}, "step", 0.01),
        (
            {"class_path": "ReduceLROnPlateau", "init_args": {"patience": 0, "threshold": 1e9}},
            "epoch",
            0.01,
        ),
    ],
)
def test_schedulers_from_plain_values(
    tmp_path: Path, scheduler: Any, interval: Any, lr: float
) -> None:
    sgd: Any = {"class_path": "SGD", "init_args": {"lr": 1e-3}}
    model = model_of(optimizer=sgd, lr_scheduler=scheduler, lr_scheduler_interval=interval)
    trainer = trainer_of(tmp_path)
    trainer.fit(model, datamodule=Blobs())  # 2 epochs of 7 steps
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(lr * 1e-3)


@pytest.mark.parametrize(
    ("scheduler", "interval", "said"),
    [
        ({"class_path": "CosineAnnealingLR", "init_args": {"T_max": 20}}, "epoch", "20 epochs"),
        ({"class_path": "CosineAnnealingLR", "init_args": {"T_max": 2}}, "epoch", None),
        (
            {"class_path": "OneCycleLR", "init_args": {"max_lr": 0.1, "total_steps": 99}},
            "step",
            "99 steps",
        ),
        (
            {"class_path": "OneCycleLR", "init_args": {"max_lr": 0.1, "total_steps": 14}},
            "step",
            None,
        ),
    ],
)
def test_a_scheduler_made_for_another_training_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scheduler: Any, interval: Any, said: Any
) -> None:
    model = model_of(lr_scheduler=scheduler, lr_scheduler_interval=interval)
    with caplog.at_level("INFO"):
        trainer_of(tmp_path).fit(model, datamodule=Blobs())  # 2 epochs of 7 steps
    told = [record.message for record in caplog.records if " plans " in record.message]
    assert [said in line for line in told] == ([] if said is None else [True])
    for line in told:
        assert line.endswith(("lr_scheduler.T_max=2).", "lr_scheduler.total_steps=14)."))
    caplog.clear()
    limits: list[dict[str, Any]] = [{"max_steps": 3}, {"max_time": "00:01:00:00"}]
    for limit in (*limits, {"fast_dev_run": True}):
        trainer_of(tmp_path, **limit).fit(model_of(lr_scheduler=scheduler), datamodule=Blobs())
    assert " plans " not in caplog.text  # where a training may end otherwise


def test_a_scheduler_that_would_drop_the_gate_lr_factor_is_refused() -> None:
    cycle: Any = {"class_path": "OneCycleLR", "init_args": {"max_lr": 0.01, "total_steps": 9}}
    with pytest.raises(ValueError, match=r"OneCycleLR .*`gate_lr_factor=0\.1`"):
        model_of(lr_scheduler=cycle, gate_lr_factor=0.1).configure_optimizers()
    cycle["init_args"]["max_lr"] = [0.01, 0.01]
    model_of(lr_scheduler=cycle).configure_optimizers()


@pytest.mark.parametrize(("lr", "factor"), [(0.0, 1.0), (-1e-3, 1.0), (1e-3, -2.0)])
def test_rates_below_zero_are_refused(lr: float, factor: float) -> None:
    with pytest.raises(ValueError, match="gate_lr_factor"):
        param_groups(GatedMLP(6, [8], 3, gate={"kind": "static"}), lr, factor)
