from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from dg_lightning import GatedMLP, StaticGate, gate_layers
from dg_lightning.budget.penalty import (
    MacsCost,
    gates_without_macs,
    mean_rates,
    penalty,
    unit_costs_by_connections,
    usage_term,
)
from dg_lightning.compute.macs import linear_maps


def net_with_rates(*rates: float) -> tuple[GatedMLP, torch.Tensor]:
    """A net whose gates have these probabilities, and their means."""
    options: Any = {"kind": "static"}
    net = GatedMLP(6, [4, 3], 2, gate=options, input_gate=options)
    for gate, rate in zip(gate_layers(net).values(), rates, strict=True):
        assert isinstance(gate, StaticGate)
        nn.init.constant_(gate.logit, torch.logit(torch.tensor(rate)).item())
    net(torch.randn(5, 6))
    return net, mean_rates(gate_layers(net))


def prices_of(net: nn.Module) -> MacsCost:
    return MacsCost(list(gate_layers(net).values()), linear_maps(net))


def test_expected_macs_are_the_products_over_each_map_by_hand() -> None:
    net, rates = net_with_rates(0.5, 0.25, 0.8)
    by_hand = (24 * 0.5 * 0.25 + 12 * 0.25 * 0.8 + 6 * 0.8) / (24 + 12 + 6)
    torch.testing.assert_close(prices_of(net).usage(rates), torch.tensor(by_hand))


def test_rates_are_means_over_units_by_hand() -> None:
    net, _ = net_with_rates(0.5, 0.5, 0.5)
    gate = gate_layers(net)["hidden.0.gate"]
    gate.logit.data = torch.tensor([0.0, 1.0, -1.0, 2.0])  # type: ignore[attr-defined]
    net(torch.randn(5, 6))
    by_hand = (0.5 + 0.7310586 + 0.2689414 + 0.8807971) / 4
    assert mean_rates({"gate": gate}).item() == pytest.approx(by_hand)
    assert mean_rates({"gate": gate}, "g").item() == 0.5


def test_expected_macs_give_no_credit_for_rows_behind_a_layer_norm() -> None:
    net = GatedMLP(6, [4], 3, gate={"kind": "static", "initial_open_rate": 0.6}, norm="layer")
    net(torch.randn(5, 6))
    usage = prices_of(net).usage(mean_rates(gate_layers(net)))
    assert usage.item() == pytest.approx((24 + 12 * 0.6) / 36)


def test_expected_macs_count_connections_and_see_them_change() -> None:
    net, rates = net_with_rates(0.5, 0.5, 0.5)
    first = linear_maps(net)[0].linear
    first.connection_mask = torch.rand(4, 6) < 0.5
    prices = prices_of(net)
    for kept in (first.connection_mask, torch.rand(4, 6) < 0.2):
        first.connection_mask = kept
        by_hand = (int(kept.sum()) * 0.25 + 12 * 0.25 + 6 * 0.5) / 42
        torch.testing.assert_close(prices.usage(rates), torch.tensor(by_hand))


@given(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), st.integers(0, 10))
def test_gradients_by_hand(values: list[float], seed: int) -> None:
    net, _ = net_with_rates(0.5, 0.5, 0.5)
    generator = torch.Generator().manual_seed(seed)
    rates = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    targets = torch.rand(3, generator=generator, dtype=torch.float64)
    weights = torch.rand(3, generator=generator, dtype=torch.float64)
    distance, (a, b, c) = rates.detach() - targets, values
    by_hand: dict[tuple[Any, int], Any] = {
        ("open_rate", 1): torch.ones(3, dtype=torch.float64),
        ("target", 1): 2 * distance,
        ("hinge_below", 1): -(distance < 0).double(),
        ("hinge_below", 2): 2 * distance.clamp(max=0),
        ("hinge_above", 1): (distance > 0).double(),
        ("hinge_above", 2): 2 * distance.clamp(min=0),
        ("expected_macs", 1): torch.tensor([24 * b, 24 * a + 12 * c, 12 * b + 6]).double() / 42,
    }
    for (usage, power), expected in by_hand.items():
        terms: Any = {"targets": targets, "power": power, "prices": prices_of(net)}
        term = usage_term(usage, rates, layer_weights=weights, **terms)
        (found,) = torch.autograd.grad(term, rates)
        torch.testing.assert_close(found, weights * expected)


@pytest.mark.parametrize("of", ["p", "g"])
def test_anybody_may_add_the_penalty_to_a_loss(of: Any) -> None:
    net, rates = net_with_rates(0.5, 0.25, 0.8)
    prices = prices_of(net)
    term = penalty(gate_layers(net), "expected_macs", rate=of, prices=prices)
    expected = rates if of == "p" else torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(term, prices.usage(expected))
    (0.1 * term).backward()
    by_hand = 0.1 * torch.tensor([24 * expected[1], 24 * expected[0] + 12 * expected[2]]) / 42
    for gate, slope in zip(gate_layers(net).values(), by_hand, strict=False):
        assert isinstance(gate, StaticGate)
        p = torch.sigmoid(gate.logit.detach())
        torch.testing.assert_close(gate.logit.grad, slope * p * (1 - p) / len(p))


def test_terms_by_hand() -> None:
    rates, targets = torch.tensor([0.5, 0.25]), torch.tensor([0.25, 0.5])

    def value(usage: Any, **terms: Any) -> float:
        return usage_term(usage, rates, targets=targets, **terms).item()

    assert value("open_rate") == 0.75
    assert value("target") == 0.125
    assert value("hinge_below") == value("hinge_above") == 0.0625
    assert value("hinge_below", power=1) == value("hinge_above", power=1) == 0.25
    weights = torch.tensor([2.0, 0.0])
    assert value("open_rate", layer_weights=weights) == 1.0
    assert value("hinge_below", layer_weights=weights) == 0.0


def test_costs_of_units_weigh_the_mean_and_count_connections_in_and_out() -> None:
    net, _ = net_with_rates(0.5, 0.5, 0.5)
    first = linear_maps(net)[0].linear
    first.connection_mask = torch.zeros(4, 6, dtype=torch.bool)
    first.connection_mask[0, :5] = True
    gates = gate_layers(net)
    costs = unit_costs_by_connections(gates["hidden.0.gate"], linear_maps(net))
    assert costs == [5 + 3, 3, 3, 3]
    gate = gates["hidden.0.gate"]
    gate.probability = torch.tensor([1.0, 0.0, 0.0, 0.0])
    shares = torch.tensor(costs) / sum(costs)
    rates = mean_rates({"gate": gate}, "p", {"gate": shares})
    assert rates.item() == pytest.approx(8 / 17)


def test_gates_that_no_map_depends_on_are_named() -> None:
    net = nn.Sequential(StaticGate(4), nn.Linear(4, 2))
    assert gates_without_macs(gate_layers(net), linear_maps(net)) == ["0"]


def test_a_gate_that_took_no_part_is_named() -> None:
    net = GatedMLP(4, [3], 2, gate={"kind": "static"})
    with pytest.raises(RuntimeError, match=r"'hidden.0.gate' has no probability"):
        mean_rates(gate_layers(net))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_penalty_without_a_gradient_is_refused(kind: Any) -> None:
    net = GatedMLP(6, [4, 3], 2, gate={"kind": kind})
    x = torch.randn(5, 6, requires_grad=True)
    checkpoint(net, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        penalty(gate_layers(net))
    with torch.no_grad():
        assert penalty(gate_layers(net)) > 0
    checkpoint(net, x, use_reentrant=False)
    assert penalty(gate_layers(net)).requires_grad
    net.requires_grad_(False)
    net(torch.randn(5, 6))
    assert penalty(gate_layers(net)) > 0  # nothing can train
