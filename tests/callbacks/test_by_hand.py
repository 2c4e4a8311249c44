"""Manual optimization: steps that bypass Lightning are rejected in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_nets import Foreign, data, make, trainer_for
from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gate collapse"),
    pytest.mark.filterwarnings("ignore:BudgetController"),
    pytest.mark.filterwarnings("ignore:τ has no effect"),
    pytest.mark.filterwarnings("ignore:.*never rewires"),
]
COUNTING = [
    "BudgetController", "CollapseDetector", "GatePenalty", "MagnitudePruning", "MinimumActivity",
    "RigL", "SET", "StaticSparse", "TemperatureAnnealing", "ThresholdPhases", "ThresholdRamp",
]  # fmt: skip


class ByHand(Foreign):
    """Steps and differentiates by hand, the right way."""

    raw_step = raw_backward = False
    every = 1

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers(use_pl_optimizer=not self.raw_step)
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        if self.raw_backward:
            loss.backward()
        else:
            self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()


class RawStep(ByHand):
    raw_step = True


class LateStep(ByHand):
    """Steps where Lightning does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(nn.functional.cross_entropy(self.body(batch[0]), batch[1]))

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class RawBackward(ByHand):
    raw_backward = True


class RawAutograd(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        torch.autograd.backward([loss])
        self.optimizers().step()  # type: ignore[union-attr]


class EveryFourth(ByHand):
    every = 4


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("model", [RawStep, LateStep])
def test_a_step_that_lightning_does_not_count_is_refused(
    model: Any, name: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=rf"{name} counts optimizer steps.*self.optimizers\(\)"):
        trainer_for([make(name)], tmp_path).fit(model(), data())


@pytest.mark.parametrize("name", ["BudgetController", "GatePenalty"])
@pytest.mark.parametrize("model", [RawBackward, RawAutograd])
def test_a_loss_that_is_differentiated_past_the_penalty_is_refused(
    model: Any, name: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"`self.manual_backward\(loss\)`"):
        trainer_for([make(name)], tmp_path).fit(model(), data())


@pytest.mark.parametrize("name", COUNTING)
def test_afterwards_the_model_is_free(name: str, tmp_path: Path) -> None:
    """A loop of one's own behind a training, or behind a cli_error, meets no hooks of ours."""
    for cls in (ByHand, RawBackward):
        model, trainer = cls(), trainer_for([make(name)], tmp_path)
        try:
            trainer.fit(model, data())
        except RuntimeError:
            assert cls is RawBackward
        optimizers = [model.configure_optimizers()]
        for optimizer in optimizers:
            model.body(torch.randn(2, 1, 8, 8)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("known", [True, False])
def test_steps_that_happen_are_counted_and_the_assumed_end_is_said(
    known: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """21 batches an epoch, every fourth a step: 5 steps an epoch, not 21."""
    annealing = make("TemperatureAnnealing")  # from 2 to 1 within 0.7 of the training
    end = {"max_steps": 20} if known else {"max_steps": -1}
    trainer = trainer_for([annealing], tmp_path, **end, max_epochs=4)
    model = EveryFourth()
    with caplog.at_level("INFO"):
        trainer.fit(model, data())
    said = [m for m in caplog.messages if "assumes that every optimizer" in m]
    assert trainer.global_step == 20
    temperature = model.body[1].gate.temperature.item()  # type: ignore[union-attr,operator]
    if known:
        assert not said
        assert temperature == 1.0
    else:
        assert "84 steps" in said[0]
        assert "`max_steps`" in said[0]
        assert temperature > 1.5
