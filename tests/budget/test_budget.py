"""Budgets without a Trainer, against the compute ledger and counts by hand."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dg_lightning import GatedMLP, gate_layers
from dg_lightning.budget.budget import GateBudget
from dg_lightning.budget.regulator import FrozenGates, Landing
from dg_lightning.compute.macs import linear_maps
from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.gates.protocol import deployed_gate


def random_net(seed: int, kind: str = "static", **gate: Any) -> GatedMLP:
    torch.manual_seed(seed)
    options: Any = {"kind": kind, **gate}
    if kind == "dynamic":
        options |= {"network": "low_rank", "rank": 2}
    net = GatedMLP(12, [8, 6], 3, gate=options, input_gate={"kind": "static"})
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    net(torch.randn(16, 12))
    return net


def alone(value: Tensor) -> Tensor:
    """Return the mean over the ranks of a run of one process."""
    return value


def budget_of(net: nn.Module, share: float, measure: Any = "macs") -> GateBudget:
    gates = gate_layers(net)
    return GateBudget(gates, list(gates.values()), linear_maps(net), measure, share)


@given(st.integers(0, 40), st.sampled_from(["static", "dynamic"]), st.sampled_from([0, 2]))
def test_what_is_used_is_what_the_ledger_counts(seed: int, kind: str, floor: int) -> None:
    net = random_net(seed, kind, min_open=floor)
    ledger = ComputeLedger(net)
    ledger.update(net.eval(), samples=16)
    report = ledger.report(net)
    used = budget_of(net, 0.5).used().item()
    assert used == pytest.approx(report.macs / report.macs_dense, rel=1e-6)
    masks = [gate.gate for gate in gate_layers(net).values() if gate.gate is not None]
    rates = torch.cat([mask.expand(16, -1).mean(0) for mask in masks])
    assert budget_of(net, 0.5, "open_rate").used().item() == pytest.approx(rates.mean().item())


def test_a_gate_that_is_drawn_is_measured_as_it_is_deployed() -> None:
    net = random_net(0, policy="bernoulli")
    drawn = budget_of(net, 0.5).used()
    net.eval()(torch.randn(16, 12))
    assert torch.equal(drawn, budget_of(net, 0.5).used())
    gate = gate_layers(net)["hidden.0.gate"]
    assert gate.probability is not None
    assert torch.equal(deployed_gate(gate), gate.probability > 0.5)


@given(st.integers(0, 40), st.floats(0.3, 0.95), st.sampled_from(["macs", "open_rate"]))
def test_a_shift_uses_the_target_and_not_more_in_the_order_that_was_learned(
    seed: int, target: float, measure: str
) -> None:
    net = random_net(seed)
    budget = budget_of(net, target, measure)
    order = [gate.probability.argsort() for gate in gate_layers(net).values()]  # type: ignore[union-attr]
    shift = budget.shift_for(target)
    budget.shift(shift)
    net(torch.randn(16, 12))
    used = budget.used().item()
    assert used <= target
    for before, gate in zip(order, gate_layers(net).values(), strict=True):
        assert torch.equal(before, gate.probability.argsort())  # type: ignore[union-attr]
    # One more unit, the next in the order, would be too much.
    missing = [
        -torch.logit(gate.probability) / price  # type: ignore[arg-type]
        for gate, price in budget._shifts(1.0).items()
    ]
    closed = torch.cat([units[units >= 0] for units in missing])
    if len(closed):
        assert budget.used(closed.min().item() + 1e-6).item() > target
    assert budget.shift_for(target) == 0.0


def test_the_least_that_can_be_used_by_hand() -> None:
    net = random_net(0, "dynamic", min_open=2)
    floor_in = 0  # the input gate has no floor
    maps = 12 * 8 * floor_in + 8 * 6 * (2 / 8) * (2 / 6) + 6 * 3 * (2 / 6)
    deciding = (0 * 2 + 2 * 8) + (2 * 2 + 2 * 6)
    budget = budget_of(net, 0.5)
    assert budget.min_share() == pytest.approx((maps + deciding) / (96 + 48 + 18))
    assert budget.least_decisions() == pytest.approx(deciding / (96 + 48 + 18))
    assert budget_of(net, 0.5, "open_rate").min_share() == pytest.approx(4 / 26)


def test_dear_units_are_shifted_more_than_cheap_ones() -> None:
    """The price of a unit: 12 inputs and 6 readers, 8 and 3, or 8 readers."""
    net = random_net(0)
    gates: Any = gate_layers(net)
    assert list(gates) == ["input_gate", "hidden.0.gate", "hidden.1.gate"]

    def moved(measure: str) -> list[float]:
        before = [gate.logit.mean().item() for gate in gates.values()]
        budget_of(net, 0.5, measure).shift(-2.0)
        after = [gate.logit.mean().item() for gate in gates.values()]
        return [b - a for a, b in zip(after, before, strict=True)]

    assert moved("macs") == pytest.approx([2 * 8 / 18, 2.0, 2 * 11 / 18])
    assert moved("open_rate") == pytest.approx([2.0, 2.0, 2.0])


def test_a_landing_is_spread_over_measurements() -> None:
    net = random_net(5)
    for gate in gate_layers(net).values():
        gate.shift_bias(2.0)
    net(torch.randn(16, 12))
    landing = Landing(budget_of(net, 0.2))
    used = [landing.budget.used().item()]
    for step in range(1, 6):
        landing.apply(landing.approach(landing.budget.used(), step / 5), alone)
        net(torch.randn(16, 12))
        used.append(landing.budget.used().item())
        assert landing.landed == (step == 5)
    assert used == sorted(used, reverse=True)
    assert len(set(used)) > 3
    assert used[-1] <= 0.2
    assert landing.used == pytest.approx(used[-1])


@pytest.mark.parametrize("measure", ["macs", "open_rate"])
def test_a_landing_from_nothing_open_opens_what_may_be_used(measure: Any) -> None:
    net = random_net(4)
    for gate in gate_layers(net).values():
        gate.shift_bias(-9.0)
    net(torch.randn(16, 12))
    landing = Landing(budget_of(net, 0.5, measure))
    assert landing.budget.used() == 0
    for progress in (-1.0, 0.5, 1.0):  # below 0: resumed in a longer training
        landing.apply(landing.approach(landing.budget.used(), progress), alone)
        net(torch.randn(16, 12))
    landing.apply(landing.correct(landing.budget.used(), 10), alone)
    net(torch.randn(16, 12))
    assert 0.3 < landing.budget.used().item() <= 0.5


def test_a_landing_before_its_time_changes_nothing() -> None:
    net = random_net(5)
    landing = Landing(budget_of(net, 0.05))
    assert landing.approach(landing.budget.used(), -0.5) == 0.0
    assert not landing.landed


def test_a_landing_trusts_several_measurements_of_gate_nets() -> None:
    net = random_net(3, "dynamic")
    landing = Landing(budget_of(net, 0.9))
    landing.apply(landing.approach(landing.budget.used(), 1.0), alone)
    assert landing.landed
    assert [landing.correct(torch.tensor(0.2)) for _ in range(9)] == [0.0] * 9
    assert landing.correct(torch.tensor(0.2)) > 0


def test_frozen_gates_undo_an_optimizer_with_momentum_and_decay() -> None:
    net = random_net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    frozen = FrozenGates(gate_layers(net).values())
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for _ in range(3):
        net(torch.randn(4, 12)).sum().backward()
        optimizer.step()
        frozen.hold()
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name]) == ("gate" in name), name
