import re
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from dg_lightning import GatedMLP
from dg_lightning.callbacks import (
    BudgetController,
    GatePenalty,
    TemperatureAnnealing,
    ThresholdPhases,
    ThresholdRamp,
)
from dg_lightning.schedules import (
    Clock,
    Phase,
    Schedule,
    acting,
    collect_plan,
    find_risks,
    find_unused,
)

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
    "target of a layer on threshold": (
        [GatePenalty(1.0, "target", target={"*": 0.6})],
        0.6,
        r"target .*θ \(0.6 and 0.6\)",
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
    of_g = [GatePenalty(1.0, "target", rate="g"), ThresholdPhases([Phase(keep=0.6)])]
    assert risks_of(*of_g, threshold=0.6) == []
    sampled = Module()
    sampled.net = GatedMLP(8, [6], 2, gate={"kind": "static", "policy": "bernoulli"})
    assert not find_risks(collect_plan([TemperatureAnnealing()], CLOCK, sampled), CLOCK, sampled)


def test_the_papers_phases_stop_at_the_buffer_before_the_last_descent() -> None:
    curves = {c.label: c.value_at for c in ThresholdPhases().plan(CLOCK, Module())}
    keep = curves["keep target"]
    assert [keep(0), keep(400), keep(800), keep(850)] == pytest.approx([0.9, 0.55, 0.3, 0.3])
    assert keep(950) == pytest.approx(0.25)
    assert [curves["λ factor"](s) for s in (0, 400, 999)] == pytest.approx([0.0, 1.0, 1.5])
    without = ThresholdPhases(buffer_keep=None).plan(CLOCK, Module())[0].value_at
    assert without(800) == pytest.approx(0.25)


def unused_in(*callbacks: Any, clock: Clock = CLOCK) -> list[str]:
    return find_unused(collect_plan(callbacks, clock, Module(0.6)), clock)


UNUSED: dict[str, tuple[list[Any], str]] = {
    "keep target": (
        [ThresholdPhases(), GatePenalty(1.0)],
        "The keep target of ThresholdPhases has no effect on net.hidden.0.gate and 1 others",
    ),
    "keep target of one gate": (
        [
            ThresholdPhases(),
            GatePenalty(1.0, "target", layers=["*.0.*"], rate="g"),
            GatePenalty(1.0, layers=["*.1.*"], name="second"),
        ],
        "The keep target of ThresholdPhases has no effect on net.hidden.1.gate, because",
    ),
    "keep target under a budget": (
        [ThresholdPhases([Phase(keep=0.3)]), BudgetController(0.5)],
        "The keep target of ThresholdPhases has no effect",
    ),
    "factor": (
        [ThresholdPhases([Phase(weight_factor=0.5)])],
        "The λ factor of ThresholdPhases has no effect .* leave `weight_factor` out",
    ),
    "factor of a budget without a penalty": (
        [ThresholdPhases([Phase(weight_factor=0.5)]), BudgetController(0.5, method="shift")],
        "The λ factor of ThresholdPhases has no effect",
    ),
    "temperature after the freeze": (
        [TemperatureAnnealing(until="80%"), BudgetController(0.5, freeze_at="40%")],
        "τ still changes after step 400, when BudgetController freezes",
    ),
    "threshold after the freeze": (
        [ThresholdRamp(0.5, 0.7, until="80%"), BudgetController(0.5, freeze_at="40%")],
        "θ still changes after step 400",
    ),
    "keep target beside targets by layer": (
        [ThresholdPhases([Phase(keep=0.3)]), GatePenalty(1.0, "target", target={"*": 0.4})],
        "The keep target of ThresholdPhases has no effect",
    ),
    "weight whose factor is always 0": (
        [ThresholdPhases([Phase(weight_factor=0.0)]), GatePenalty(1.0)],
        "λ × factor is 0 for the whole training run",
    ),
    "weight of 0": ([GatePenalty(0.0)], "λ is 0 for the whole training run"),
    "ramp after the end": (
        [TemperatureAnnealing(begin="20 epochs", until="30 epochs")],
        "τ changes from step 2000 on, but training ends at step 1000",
    ),
    "phase after the end": (
        [ThresholdPhases([Phase(threshold=0.6), Phase(threshold=0.7, begin="12 epochs")])],
        "θ changes from step 1200 on, but training ends",
    ),
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_setting_without_effect_is_named_and_nothing_else(name: str) -> None:
    callbacks, message = UNUSED[name]
    found = unused_in(*callbacks)
    assert len(found) == 1
    assert re.search(message, found[0])


def test_settings_that_act_are_not_named() -> None:
    annealing = TemperatureAnnealing(until="40%")
    ramp = Schedule(0.0, 1.0, begin="1 epoch")
    assert unused_in(ThresholdPhases(), GatePenalty(ramp, "target", rate="g"), annealing) == []
    assert unused_in(ThresholdPhases([Phase(weight_factor=0.5)]), BudgetController(0.5)) == []
    assert unused_in(ThresholdRamp(0.5, 0.7, until="30%"), BudgetController(0.5)) == []
    assert unused_in(ThresholdPhases([Phase(threshold=0.6)])) == []


def test_the_plan_shows_what_acts() -> None:
    ramp, layers = Schedule(0.0, 2.0, until="100%"), ["*.1.*"]
    phases = [Phase(weight_factor=0.0), Phase(weight_factor=0.5, begin="50%")]
    callbacks = [GatePenalty(ramp), ThresholdPhases(phases, transition=0, layers=layers)]
    curves = {curve.label: curve for curve in acting(collect_plan(callbacks, CLOCK, Module(0.6)))}
    assert list(curves) == ["λ", "λ × factor"]
    assert curves["λ"].gates == ("net.hidden.0.gate",)
    assert [curves["λ"].value_at(step) for step in (0, 400, 800)] == [0.0, 0.8, 1.6]
    assert curves["λ × factor"].gates == ("net.hidden.1.gate",)
    assert [curves["λ × factor"].value_at(step) for step in (0, 400, 800)] == [0.0, 0.0, 0.8]
    frozen = [TemperatureAnnealing(2.0, 1.0, until="100%"), BudgetController(0.5, freeze_at="50%")]
    temperature, _ = acting(collect_plan(frozen, CLOCK, Module(0.6)))
    assert [temperature.value_at(step) for step in (250, 500, 900)] == [1.75, 1.5, 1.5]
