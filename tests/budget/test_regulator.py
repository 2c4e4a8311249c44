"""One budget over a training run, without a Trainer."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning import DynamicGate, GatedMLP, gate_layers
from dg_lightning.budget import GateBudget, Multiplier, Regulator
from dg_lightning.budget.regulator import balance_loads
from dg_lightning.compute.macs import linear_maps
from dg_lightning.gates.protocol import set_connections


def alone(value: Tensor) -> Tensor:
    """Average over the ranks of one process."""
    return value


def net_with(kind: str = "dynamic", **gate: Any) -> Any:
    torch.manual_seed(0)
    settings: Any = {"kind": kind, **gate}
    if kind == "dynamic":
        settings |= {"network": "low_rank", "rank": 2}
    net = GatedMLP(12, [64, 32], 3, gate=settings)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    net(torch.randn(64, 12))
    return net


def net_of_four_units() -> GatedMLP:
    net = GatedMLP(12, [4], 3, gate={"kind": "static"})
    net.layers()[0].gate.logit.data.copy_(torch.arange(4.0))  # type: ignore[union-attr,operator]
    net(torch.randn(4, 12))
    return net


def regulator_of(net: nn.Module, budget: float) -> Regulator:
    gates = gate_layers(net)
    held = GateBudget(gates, list(gates.values()), linear_maps(net), "macs", budget)
    return Regulator("", held, Multiplier("pi", initial=0.1, highest=100.0))


def validate(regulator: Regulator, net: nn.Module, *batches: Tensor) -> float:
    """Validate the net, and return the share that it used, by hand."""
    regulator.start_validation()
    total = rows = 0.0
    net.eval()
    for x in batches:
        net(x)
        regulator.add_validation_batch()
        total, rows = total + len(x) * regulator.budget.used().item(), rows + len(x)
    net.train()
    regulator.end_validation(alone)
    return total / rows


def test_the_allowed_share_falls_from_what_is_in_use_to_the_budget() -> None:
    net = net_with()
    for layer in net.layers():  # as sparse as RigL would make it
        mask = torch.zeros_like(layer.linear.weight, dtype=torch.bool)
        mask[:, ::4] = True
        set_connections(layer.linear, mask)
    regulator = regulator_of(net, 0.15)
    used = regulator.budget.used().item()
    regulator.begin(alone)
    assert used < 0.5
    assert regulator.start == pytest.approx(used)
    allowed = [regulator.allowed(progress) for progress in (0.0, 0.5, 1.0)]
    assert allowed == pytest.approx([used, (used * 0.15) ** 0.5, 0.15])
    assert regulator.savings == pytest.approx(used - regulator.budget.min_share())


def test_where_less_than_the_budget_is_in_use_all_of_it_is_allowed() -> None:
    regulator = regulator_of(net_with(), 0.99)
    regulator.begin(alone)
    assert [regulator.allowed(progress) for progress in (0.0, 1.0)] == [0.99, 0.99]


def test_training_passes_are_scaled_to_what_validation_uses() -> None:
    net = net_with()
    regulator = regulator_of(net, 0.4)
    before = regulator.measure(alone).item()
    share = validate(regulator, net, torch.randn(40, 12) + 1, torch.randn(24, 12) + 1)
    assert share != pytest.approx(before, rel=0.02)
    net(torch.randn(64, 12))
    now = regulator.budget.used().item()
    assert regulator.measure(alone).item() == pytest.approx(now * share / before)


@pytest.mark.parametrize("shift", [-2.0, 2.0])
def test_gates_that_have_landed_are_corrected_by_validation(shift: float) -> None:
    net, inputs = net_with(), torch.randn(256, 12) + 1  # unlike those of training
    regulator = regulator_of(net, 0.4)
    regulator.land(regulator.measure(alone), 1.0, alone)
    assert regulator.landing.landed
    for gate in gate_layers(net).values():
        gate.shift_bias(shift)
    assert abs(validate(regulator, net, inputs) / 0.4 - 1) > 0.05
    validate(regulator, net, inputs)  # the second layer sees what the first one has changed
    assert validate(regulator, net, inputs) == pytest.approx(0.4, rel=0.01)
    assert regulator.reached == pytest.approx(0.4, rel=0.01)
    for _ in range(30):  # training passes do not undo it
        net(torch.randn(64, 12))
        regulator.land(regulator.measure(alone), 1.0, alone)
    assert validate(regulator, net, inputs) == pytest.approx(0.4, rel=0.01)


def test_a_miss_that_comes_again_is_warned_of_once() -> None:
    net, inputs = net_with(), torch.randn(256, 12)
    regulator = regulator_of(net, 0.4)
    regulator.land(regulator.measure(alone), 1.0, alone)
    validate(regulator, net, inputs)
    said = r"for a budget of 40\.00% \(validation\)\. Training inputs differ"
    for expected in (pytest.warns(UserWarning, match=said), nullcontext()):
        for gate in gate_layers(net).values():
            gate.shift_bias(2.0)
        with expected:
            assert abs(validate(regulator, net, inputs) / 0.4 - 1) > 0.05


def test_a_small_strange_last_batch_does_not_mislead() -> None:
    net, inputs = net_with(), torch.randn(256, 12)
    regulator = regulator_of(net, 0.4)
    regulator.land(regulator.measure(alone), 1.0, alone)
    for gate in gate_layers(net).values():
        gate.shift_bias(0.1)
    for _ in range(4):
        share = validate(regulator, net, inputs, 20 * torch.randn(8, 12))
    assert share == pytest.approx(0.4, rel=0.01)
    assert regulator.reached == pytest.approx(share, rel=0.01)


def test_gates_of_others_that_look_at_the_input_count() -> None:
    static: Any = {"kind": "static"}
    low_rank: Any = {"kind": "dynamic", "network": "low_rank", "rank": 2}
    net = GatedMLP(12, [64, 32], 3, gate=[low_rank, static])
    net(torch.randn(8, 12))
    gates = gate_layers(net)
    own = {name: gate for name, gate in gates.items() if not gate.input_dependent}
    parts = list(gates.values()), linear_maps(net)
    assert GateBudget(own, *parts, "macs", 0.5).depends_on_input
    assert not GateBudget(own, *parts, "open_rate", 0.5).depends_on_input


def test_without_validation_ten_training_passes_correct_gates() -> None:
    net = net_with()
    regulator = regulator_of(net, 0.4)
    regulator.land(regulator.measure(alone), 1.0, alone)
    for gate in gate_layers(net).values():
        gate.shift_bias(1.0)
    for _ in range(30):
        net(torch.randn(64, 12))
        regulator.land(regulator.measure(alone), 1.0, alone)
    used = []
    for _ in range(20):
        net(torch.randn(64, 12))
        used.append(regulator.budget.used().item())
    assert sum(used) / len(used) == pytest.approx(0.4, rel=0.03)


def test_static_gates_are_measured_exactly_and_not_scaled() -> None:
    net = net_with("static")
    regulator = regulator_of(net, 0.4)
    regulator.start_validation()
    for gate in gate_layers(net).values():  # as an average of the weights would have them
        gate.shift_bias(1.0)
    net.eval()(torch.randn(8, 12))
    regulator.add_validation_batch()
    regulator.end_validation(alone)
    assert regulator.ratio == 1.0


def test_a_miss_by_less_than_a_block_is_no_miss() -> None:
    net = net_of_four_units()
    regulator = regulator_of(net, 0.45)  # a unit is a quarter of all
    regulator.land(regulator.measure(alone), 1.0, alone)
    net(torch.randn(4, 12))
    validate(regulator, net, torch.randn(4, 12))  # a warning would be an error


def test_a_budget_that_closes_everything_is_warned_of() -> None:
    net = net_of_four_units()
    regulator = regulator_of(net, 0.02)  # less than half of a unit
    regulator.land(regulator.measure(alone), 1.0, alone)
    net(torch.randn(4, 12))
    assert regulator.reached == 0.0
    regulator.report(rehearsal=True)  # a warning would be an error
    with pytest.warns(UserWarning, match=r"budget of 2\.00% .* No unit is open"):
        regulator.report(rehearsal=False)


def test_its_state_is_plain_and_restores_all() -> None:
    net = net_with()
    regulator = regulator_of(net, 0.4)
    regulator.begin(alone)
    validate(regulator, net, torch.randn(40, 12) + 1)
    regulator.multiplier.update(torch.tensor(0.9), 0.5)
    regulator.land(regulator.measure(alone), 0.4, alone)
    state = {"budgets": {"": regulator.state_dict()}}
    other = regulator_of(net, 0.4)
    other.load_from(state)
    assert other.state_dict() == regulator.state_dict()
    assert other.ratio != 1.0
    assert other.landing.start is not None


def test_biases_of_a_fixed_number_of_blocks_only_change_places() -> None:
    torch.manual_seed(0)
    options: Any = {"block_size": 2, "initial_spread": 1.0, "scale": "probability"}
    fixed = DynamicGate(6, 16, policy="top_k", k=2, **options)
    free = DynamicGate(6, 16, initial_open_rate=0.6, **options)
    biases: list[Any] = [gate.network[-1].bias for gate in (fixed, free)]
    before = [bias.detach().clone() for bias in biases]
    for gate in (fixed, free):
        gate(torch.randn(50, 6))
    balance_loads([fixed, free], torch.tensor(0.1))  # not what the fixed gate opens
    moved = [bias.detach() - old for bias, old in zip(biases, before, strict=True)]
    assert moved[0].abs().max() > 0.01
    torch.testing.assert_close(moved[0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert moved[1].mean() < -0.05
