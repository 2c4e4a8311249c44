import re
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from dg_lightning import GatedMLP
from dg_lightning.callbacks import GatePenalty, TemperatureAnnealing, ThresholdPhases
from dg_lightning.schedules import Clock, Phase, Schedule
from dg_lightning.schedules.schedule import collect_plan, find_risks

CLOCK = Clock(1000, 100)


class Module(pl.LightningModule):
    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__()
        self.net: nn.Module = GatedMLP(
            8, [6, 4], 2, gate={"kind": "static", "threshold": threshold}
        )


def risks_of(*callbacks: Any, threshold: float = 0.5) -> list[str]:
    module = Module(threshold)
    return find_risks(collect_plan(callbacks, CLOCK, module), CLOCK, module)


RISKY: dict[str, tuple[list[Any], float, str]] = {
    "sudden cooling": (
        [TemperatureAnnealing(2.0, 0.3, begin="50%", until="52%")],
        0.6,
        r"τ drops from 2 to 0\.\d+ between step",
    ),
    "cold start": ([TemperatureAnnealing(0.4, 0.2)], 0.6, "τ starts at 0.4, below 0.5"),
    "high threshold": (
        [ThresholdPhases([Phase(0.9, 0.6, 1.0), Phase(0.5, 0.95, 1.0, "50%")])],
        0.6,
        r"θ rises above 0.9 \(to 0.95",
    ),
    "target on threshold": (
        [GatePenalty(1.0, "hinge_below", target=0.6)],
        0.6,
        r"target .*θ \(0.6 and 0.6\)",
    ),
    "keep on threshold": (
        [ThresholdPhases([Phase(0.9, 0.6, 1.0), Phase(0.7, 0.7, 1.0, "50%")])],
        0.6,
        r"keep target .*θ \(0.7 and 0.7\)",
    ),
    "all at once": (
        [GatePenalty(1.0), ThresholdPhases(transition=0)],
        0.6,
        "λ, θ and the keep target all jump at step",
    ),
    "idle temperature": ([TemperatureAnnealing()], 0.5, "τ has no effect on which gates are open"),
}


@pytest.mark.parametrize("name", RISKY)
def test_a_risky_setting_is_named_and_nothing_else(name: str) -> None:
    callbacks, threshold, message = RISKY[name]
    found = risks_of(*callbacks, threshold=threshold)
    assert len(found) == 1
    assert re.search(message, found[0])


def test_gentle_settings_raise_nothing() -> None:
    ramp = Schedule(0.0, 1.0, "cosine", begin="1 epoch")
    assert risks_of(GatePenalty(ramp), TemperatureAnnealing(2.0, 1.0), ThresholdPhases()) == []
    assert risks_of(GatePenalty(1.0, "target", rate="g", target=0.6), threshold=0.6) == []


def test_the_papers_phases_stop_at_the_buffer_before_the_last_descent() -> None:
    curves = {c.label: c.value_at for c in ThresholdPhases().plan(CLOCK, Module())}
    keep = curves["keep target"]
    assert [keep(0), keep(400), keep(800), keep(850)] == pytest.approx([0.9, 0.55, 0.3, 0.3])
    assert keep(950) == pytest.approx(0.25)
    assert [curves["λ factor"](s) for s in (0, 400, 999)] == pytest.approx([0.0, 1.0, 1.5])
    without = ThresholdPhases(buffer_keep=None).plan(CLOCK, Module())[0].value_at
    assert without(800) == pytest.approx(0.25)
