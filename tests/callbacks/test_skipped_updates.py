"""Updates that are skipped, and figures as those who monitor them see them."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sparse_nets import Plain, Watch, fit

from dg_lightning.callbacks import RigL

KEY = "rewiring/explored/net.0"


@pytest.mark.parametrize("validates", [True, False])
def test_who_monitors_them_sees_those_of_now(validates: bool, tmp_path: Path) -> None:
    rigl = RigL(0.7, every_n_steps=4, until="100%")
    seen: list[tuple[float, float]] = []

    class Validating(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            value = self.trainer.callback_metrics[KEY].item()
            seen.append((value, rigl.connections["net.0"].figures()["explored"]))

    class Monitors(pl.Callback):
        monitor = None if validates else KEY

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if not validates and (trainer.global_step == 1 or trainer.global_step % 4 == 0):
                value = trainer.callback_metrics[KEY].item()
                seen.append((value, rigl.connections["net.0"].figures()["explored"]))

    options: Any = {"log_every_n_steps": 4, "logger": CSVLogger(tmp_path)}
    if validates:
        model: Any = Validating()
        x, y = torch.randn(8, 12, dtype=torch.float64), torch.randint(4, (8,))
        model.val_dataloader = lambda: torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=8
        )
        options |= {"val_check_interval": 4, "num_sanity_val_steps": 0}
    else:
        model = Plain()
    fit(model, [rigl, Monitors()], tmp_path, **options)
    assert len(seen) >= 6
    for found, now in seen:
        assert found == pytest.approx(now)


def test_a_monitor_finds_them_after_one_batch(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, monitor=KEY, save_on_train_epoch_end=False)
    fit(
        Plain(),
        [RigL(0.7, every_n_steps=1, until="100%"), saving],
        tmp_path,
        limit_train_batches=1,
        log_every_n_steps=1,
        logger=CSVLogger(tmp_path),
        enable_checkpointing=True,
    )


class Overflows(pl.Callback):
    """Lets gradients overflow in some steps, which then do nothing."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 in self.steps:
            pl_module.net[2].weight.grad[0, 0] = torch.nan


class Calms(pl.Callback):
    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 in self.steps:
            for p in pl_module.parameters():
                p.grad = torch.zeros_like(p)


def test_every_update_that_is_left_out_is_told_of_once(tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=4, until="100%", drop_shape="constant")
    steps = (8, 12, 20)  # with the last one before the end
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        callbacks = [Overflows(*steps), rigl, Calms(*steps), watch := Watch(rigl)]
        fit(Plain(), callbacks, tmp_path, log_every_n_steps=50)
        fit(Plain(), [rigl], tmp_path)
    told = [str(w.message).split(":")[0] for w in seen if "skipped the update" in str(w.message)]
    assert told == [f"RigL skipped the update at step {step}" for step in steps]
    assert watch.changes() == [4, 16]


def test_weights_that_are_not_finite_change_no_connection(tmp_path: Path) -> None:
    class Infinite(Plain):
        def on_train_start(self) -> None:
            weight: Any = self.net[0].weight
            weight.data[0, weight[0].ne(0).nonzero()[0]] = torch.inf  # with a finite gradient

    rigl = RigL(0.6, every_n_steps=4, until="100%")
    first: list[Any] = []

    class First(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            first.append({name: c.mask.clone() for name, c in rigl.connections.items()})

    with pytest.warns(UserWarning, match="a gradient or a weight is not finite"):
        fit(Infinite(), [rigl, First()], tmp_path)
    for name, c in rigl.connections.items():
        assert torch.equal(c.mask, first[0][name])


def test_an_update_that_is_left_out_has_no_churn_of_its_own(tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=4, until="100%", drop_shape="constant")
    callbacks = [Overflows(8), rigl, Calms(8)]
    with pytest.warns(UserWarning, match="skipped the update at step 8"):
        fit(Plain(), callbacks, tmp_path, max_epochs=1)
    assert rigl.connections["net.0"].churn > 0  # of step 4
