"""Trainings without a known end: only fractions need one."""

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_nets import Foreign, data, make, trainer_for
from torch.utils.data import DataLoader, IterableDataset

from dg_lightning.callbacks import (
    SET,
    BudgetController,
    CollapseDetector,
    GateMonitor,
    GatePenalty,
    MagnitudePruning,
    MinimumActivity,
    RigL,
    StaticSparse,
    TemperatureAnnealing,
    ThresholdPhases,
)
from dg_lightning.schedules import Phase, Schedule

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gate collapse"),
    pytest.mark.filterwarnings("ignore:BudgetController"),
    pytest.mark.filterwarnings("ignore:τ has no effect"),
]
IN_STEPS: dict[str, Any] = {
    "a constant weight": lambda: GatePenalty(0.1),
    "a ramp in steps": lambda: GatePenalty(Schedule(0.0, 0.1, begin=5, until="20 steps")),
    "a budget": lambda: BudgetController(0.8, begin=0, until=20, freeze_at=30),
    "a temperature": lambda: TemperatureAnnealing(until=20),
    "phases": lambda: ThresholdPhases(
        [Phase(0.9, 0.5, 0.0), Phase(0.6, 0.6, 1.0, begin="10 steps")], transition=5, buffer=5
    ),
    "a floor": lambda: MinimumActivity("10%"),
    "reviving": lambda: MinimumActivity("10%", revive_after=10, revive_until=30),
    "a watch": CollapseDetector,
    "a rescue": lambda: CollapseDetector("rescue", every_n_steps=4),
    "a monitor": GateMonitor,
    "RigL": lambda: RigL(0.5, every_n_steps=5, until=20, layers=["*3"]),
    "SET": lambda: SET(0.5, every_n_steps=5, until=20, layers=["*3"]),
    "fixed": lambda: StaticSparse(0.5, layers=["*3"]),
    "pruned at once": lambda: MagnitudePruning(0.5, layers=["*3"]),
    "pruned gradually": lambda: MagnitudePruning(0.5, begin=2, until=20, every_n_steps=4),
}
FRACTIONS: dict[str, Any] = {
    "`until`": lambda: GatePenalty(Schedule(0.0, 0.1)),
    "`begin`": lambda: BudgetController(0.8),
    "`freeze_at`": lambda: BudgetController(0.8, begin=0, until=20),
    "`until` ": lambda: TemperatureAnnealing(),
    "`begin` ": ThresholdPhases,
    "`revive_until`": lambda: MinimumActivity("10%", revive_after=10),
    "`until`  ": lambda: RigL(0.5, layers=["*3"]),
    "`begin`  ": lambda: MagnitudePruning(0.5, begin="50%", layers=["*3"]),
}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(1, 8, 8, generator=generator), int(torch.randint(10, ()))


class Until(Foreign):
    """Stops by itself, after a number of steps that the Trainer does not know."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.global_step >= 40


def endless(kind: str) -> tuple[dict[str, Any], Any]:
    if kind == "no length":
        return {"max_steps": -1, "max_epochs": 1}, DataLoader(Stream(), batch_size=16)
    return {"max_steps": -1, "max_epochs": -1, "max_time": timedelta(hours=1)}, data()


@pytest.mark.parametrize("kind", ["no length", "max_time"])
@pytest.mark.parametrize("callback", IN_STEPS)
def test_what_is_said_in_steps_needs_no_end(callback: str, kind: str, tmp_path: Path) -> None:
    arguments, samples = endless(kind)
    made = IN_STEPS[callback]()
    trainer = trainer_for([made], tmp_path, limit_val_batches=0, **arguments)
    trainer.fit(Until(), samples)
    assert trainer.global_step >= 40
    if callback == "a budget":
        assert made.landed
    pickle.dumps(made)


@pytest.mark.parametrize("kind", ["no length", "max_time"])
@pytest.mark.parametrize("argument", FRACTIONS)
def test_a_fraction_needs_an_end_and_names_its_argument(
    argument: str, kind: str, tmp_path: Path
) -> None:
    arguments, samples = endless(kind)
    trainer = trainer_for([FRACTIONS[argument]()], tmp_path, limit_val_batches=0, **arguments)
    line = rf"{argument.strip()} is .* no known end"
    with pytest.raises(ValueError, match=line):
        trainer.fit(Until(), samples)


def test_an_end_in_steps_is_an_end(tmp_path: Path) -> None:
    model = Foreign()
    trainer = trainer_for([make("TemperatureAnnealing")], tmp_path, limit_val_batches=0)
    trainer.fit(model, DataLoader(Stream(), batch_size=16))
    assert model.body[1].gate.temperature == 1  # type: ignore[union-attr]
