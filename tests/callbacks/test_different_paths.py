"""Batches, and ranks, that run different gates, as with stochastic depth."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_nets import ARGUMENTS, Foreign, data, make, trainer_for
from torch import Tensor, nn

from dg_lightning import DynamicGate, GatedLinear, StaticGate, gate_layers
from dg_lightning.callbacks import BudgetController, GatePenalty

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gate collapse"),
    pytest.mark.filterwarnings("ignore:BudgetController"),
    pytest.mark.filterwarnings("ignore:τ has no effect"),
    pytest.mark.filterwarnings("ignore:.*never rewires"),
]
PENALTIES: dict[str, Callable[[], Any]] = {
    "linear": lambda: GatePenalty(0.5),
    "target": lambda: GatePenalty(0.5, usage="target", target=0.3),
    "target of g": lambda: GatePenalty(0.5, usage="target", rate="g", target=0.3),
    "hinge_above": lambda: GatePenalty(0.5, usage="hinge_above", target=0.2),
    "expected_macs": lambda: GatePenalty(0.5, usage="expected_macs"),
    "budget": lambda: BudgetController(0.8),
    "open rate": lambda: BudgetController(0.6, measure="open_rate"),
}


class Deep(Foreign):
    """Leaves a gated block out of some batches; on each rank out of others.

    Args:
        kind: Of the gates.
        all_gates: Whether no gate at all runs where the block is left out.
    """

    def __init__(self, kind: str = "static", all_gates: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)

        def gate(inputs: int) -> nn.Module:
            if kind == "static":
                return StaticGate(32)
            return DynamicGate(inputs, 32, network="low_rank", rank=2)

        self.first = nn.Linear(64, 32) if all_gates else GatedLinear(64, 32, gate=gate(64))
        self.block = GatedLinear(32, 32, gate=gate(32))
        self.last = nn.Linear(32, 10)
        self.body: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.first(batch[0].flatten(1)).relu()
        if (batch_idx + self.global_rank) % 2 == 1:  # the first batch of rank 0 leaves it out
            hidden = hidden + self.block(hidden)
        return nn.functional.cross_entropy(self.last(hidden), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        hidden = self.first(batch[0].flatten(1)).relu()
        self.last(hidden + self.block(hidden))


@pytest.mark.parametrize("all_gates", [True, False])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_gate_that_does_not_run_in_a_batch_has_no_penalty_in_it(
    penalty: str, kind: str, all_gates: bool, tmp_path: Path
) -> None:
    gradients: list[bool] = []

    class Watched(Deep):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients.append(any(p.grad is not None for p in self.block.parameters()))

    callback = PENALTIES[penalty]()
    trainer_for([callback], tmp_path, num_sanity_val_steps=0).fit(Watched(kind, all_gates), data())
    assert gradients == [False, True] * 6


# Those of `PENALTIES` apart, those that look for other layers, and those that call the module.
ELSEWHERE = {"AddGates", "BudgetController", "MagnitudePruning", "RigL", "RoutingMonitor", "SET"}
ELSEWHERE |= {"ContinualBackprop", "Distill", "ReviveDormant"}


@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - ELSEWHERE))
def test_every_callback_takes_it(name: str, tmp_path: Path) -> None:
    callback = make(name) if name != "MinimumActivity" else type(make(name))("10%")
    trainer = trainer_for([callback], tmp_path, num_sanity_val_steps=0, max_steps=50)
    trainer.fit(Deep("static"), data())
    assert trainer.global_step == 50


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "all_gates"), [("static", True), ("dynamic", False)])
def test_ranks_that_run_different_gates_stay_equal(
    kind: str, all_gates: bool, in_two_processes: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    ranks = in_two_processes(f"""
from test_different_paths import *
result = {{}}
for name, penalty in PENALTIES.items():
    model = Deep({kind!r}, {all_gates})
    callbacks = [penalty(), *(make(n) for n in ("CollapseDetector", "TemperatureAnnealing"))]
    trainer_for(callbacks, Path({str(tmp_path)!r}), devices=2, max_steps=20,
                strategy="ddp_find_unused_parameters_true").fit(model, data())
    result[name] = [{{k: v.tolist() for k, v in model.state_dict().items()}},
                    str(callbacks[0].state_dict())]
""")
    assert ranks[0] == ranks[1]


@pytest.mark.slow
@pytest.mark.parametrize("usage", ["target", "expected_macs"])
def test_a_gate_without_a_graph_on_one_rank_stops_both_with_one_line(
    usage: str, in_two_processes: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    ranks = in_two_processes(f"""
from test_different_paths import *
class Blind(Deep):
    def training_step(self, batch, batch_idx):
        hidden = self.first(batch[0].flatten(1)).relu()
        with torch.set_grad_enabled(self.global_rank == 0):
            hidden = hidden + self.block(hidden)
        return nn.functional.cross_entropy(self.last(hidden), batch[1])
target = None if {usage!r} == "expected_macs" else 0.3
trainer = trainer_for([GatePenalty(0.5, usage={usage!r}, target=target)], Path({str(tmp_path)!r}),
                      devices=2, strategy="ddp_find_unused_parameters_true")
try:
    trainer.fit(Blind(), data())
    result = "no error"
except RuntimeError as error:
    result = str(error)
""")
    assert "cannot act on a gate on another process" in ranks[0]
    assert "cannot act on block.gate" in ranks[1]


def test_what_gates_record_outlasts_batches_without_them(tmp_path: Path) -> None:
    model = Deep()
    trainer_for([BudgetController(0.8)], tmp_path, max_steps=1, num_sanity_val_steps=0).fit(
        model, data()
    )
    (gate,) = gate_layers(model).values()
    assert gate.probability is not None
    assert torch.equal(gate.probability, torch.ones(32))  # it has not run: it counts as open
