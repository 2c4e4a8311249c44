"""Keys that are API can be monitored from the first epoch's end on, however short it is."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from foreign_nets import Foreign, data, make, trainer_for
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

KEYS = {
    "GatePenalty": ["gates/penalty", "gates/penalty_weight"],
    "BudgetController": [
        *("gates/penalty", "gates/penalty_weight"),
        *("gates/budget_used", "gates/budget_allowed"),
    ],
    "TemperatureAnnealing": ["gates/temperature"],
    "ThresholdPhases": ["gates/threshold", "gates/keep_target"],
    "ThresholdRamp": ["gates/threshold"],
    "RigL": ["rewiring/density/body.1.linear", "rewiring/churn/body.1.linear"],
    "SET": ["rewiring/density/body.2.linear"],
    "StaticSparse": ["rewiring/density/body.3"],
    "MagnitudePruning": ["rewiring/density/body.3"],
    "GateMonitor": ["gates/open_rate", "gates/open_rate/body.1.gate", "compute/macs"],
}
CASES = [(name, key) for name, keys in KEYS.items() for key in keys]

pytestmark = [
    pytest.mark.filterwarnings("ignore:BudgetController"),
    pytest.mark.filterwarnings("ignore:τ has no effect"),
]


class Present(pl.Callback):
    """Notes at which epoch's end a key is there."""

    def __init__(self, key: str) -> None:
        self.key, self.there = key, []  # type: ignore[var-annotated]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.there.append(self.key in trainer.callback_metrics)


@pytest.mark.filterwarnings("ignore:ModelCheckpoint.* may keep a checkpoint from before")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("name", "key"), CASES)
def test_early_stopping_and_checkpoints_find_them_in_every_epoch(
    name: str, key: str, accumulate: int, tmp_path: Path
) -> None:
    present = Present(key)
    best = ModelCheckpoint(tmp_path, monitor=key)
    trainer = trainer_for(
        [make(name), EarlyStopping(key, patience=99), best, present],
        tmp_path,
        max_steps=-1,
        max_epochs=8,
        limit_train_batches=2,
        log_every_n_steps=50,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=True,
    )
    trainer.fit(Foreign(), data())
    assert present.there == [True] * 8  # before it presses, and behind the landing too
    assert best.best_model_score is not None


class Skipping(Foreign):
    """Leaves the first batch of every epoch out, of the training or of its gates."""

    without_loss = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0 and self.without_loss:
            return None
        if batch_idx == 0:
            return self.body[3].weight.square().sum()  # type: ignore[operator]
        return super().training_step(batch, batch_idx)


class WithoutGates(Skipping):
    without_loss = False


@pytest.mark.parametrize("model", [Skipping, WithoutGates])
@pytest.mark.parametrize("name", ["GatePenalty", "BudgetController"])
def test_a_first_batch_without_them_does_not_matter(name: str, model: Any, tmp_path: Path) -> None:
    present = Present("gates/penalty")
    trainer = trainer_for(
        [make(name), present], tmp_path, max_steps=-1, max_epochs=4, log_every_n_steps=50
    )
    trainer.fit(model(), data())
    assert present.there == [True] * 4


@pytest.mark.parametrize("name", ["GatePenalty", "BudgetController", "TemperatureAnnealing"])
def test_a_training_that_is_resumed_in_an_epoch_has_them_at_its_end(
    name: str, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=5, filename="{step}", save_top_k=-1)
    more = {"max_steps": -1, "max_epochs": 1, "log_every_n_steps": 50, "enable_checkpointing": True}
    trainer_for([make(name), saving], tmp_path, **more).fit(Foreign(), data())
    present = Present(KEYS[name][0])
    trainer = trainer_for([make(name), present], tmp_path, **more)
    trainer.fit(Foreign(), data(), ckpt_path=tmp_path / "step=5.ckpt", weights_only=True)
    assert present.there == [True]
