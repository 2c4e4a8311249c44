import itertools
from typing import Any

import pytest
import torch
from gated_nets import randomised
from torch import nn

from dg_lightning import GatedMLP, SwitchMoE
from dg_lightning.runtime import (
    block_usage,
    fastest_plain_net,
    freeze_gates,
    freeze_if_faster,
    plain_net,
)
from dg_lightning.runtime.lowering import without_gates

STATIC: Any = {"kind": "static"}
GATES: Any = {
    "none": None,
    "static": STATIC,
    "static blocks": {**STATIC, "block_size": 4, "threshold": 0.6, "temperature": 0.3},
    "static hard concrete": {**STATIC, "policy": "hard_concrete"},
    "static top k": {**STATIC, "policy": "top_k", "k": 5},
    "dynamic blocks": {"kind": "dynamic", "network": "low_rank", "rank": 3, "block_size": 4},
    "dynamic floor": {
        "kind": "dynamic",
        "network": "mlp",
        "hidden": 5,
        "threshold": 0.7,
        "temperature": 2.0,
        "min_open": 3,
    },
    "dynamic top k": {"kind": "dynamic", "policy": "top_k", "k": 5},
    "dynamic saturated top k": {
        "kind": "dynamic",
        "policy": "top_k",
        "k": 4,
        "temperature": 0.001,
    },
    "dynamic threshold 0": {"kind": "dynamic", "threshold": 0.0},
    "dynamic hard concrete": {"kind": "dynamic", "policy": "hard_concrete"},
    "static scaled": {**STATIC, "scale": "probability", "block_size": 2},
    "static scaled top k": {**STATIC, "scale": "probability", "policy": "top_k", "k": 5},
    "dynamic scaled": {"kind": "dynamic", "scale": "probability", "block_size": 4, "min_open": 2},
}


def net_with(
    gate: Any,
    norm: Any = None,
    input_norm: Any = None,
    input_gate: Any = None,
    activation: Any = "relu",
) -> Any:
    net = GatedMLP(
        24,
        [20, 12],
        5,
        activation=activation,
        norm=norm,
        input_norm=input_norm,
        gate=gate,
        input_gate=input_gate,
        dtype=torch.float64,
    )
    with torch.no_grad():  # units that read nothing, that nobody reads; an input nobody reads
        net.layers()[0].linear.weight[3] = 0
        net.layers()[1].linear.weight[2] = 0
        net.layers()[1].linear.weight[:, 7] = 0
        net.output.weight[:, 5] = 0
        net.layers()[0].linear.weight[:, 4] = 0
    return randomised(net)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_the_compact_net_is_the_masked_one(gate: Any, activation: Any) -> None:
    norms = (None, "layer", "batch")
    for norm, input_norm, input_gate, selects in itertools.product(
        norms, norms, (None, STATIC, {**STATIC, "scale": "probability"}), (True, False)
    ):
        net = net_with(GATES[gate], norm, input_norm, input_gate, activation)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        for multiple in (1, 8):
            made = plain_net(net, selects_inputs=selects, multiple=multiple)
            x = torch.randn(30, 24, dtype=torch.float64)
            torch.testing.assert_close(made.net(x), net(x))
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_units_of_a_small_net_by_hand() -> None:
    net: Any = GatedMLP(3, [3], 1, gate=STATIC)
    layer = net.layers()[0]
    with torch.no_grad():
        layer.linear.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 0, 0], [5, 5, 5]]))
        layer.linear.bias.copy_(torch.tensor([0.0, 2, 0]))
        layer.gate.logit.copy_(torch.tensor([1.0, 1, -1]))  # the third unit is closed
        net.output.weight.copy_(torch.tensor([[3.0, 4, 7]]))
        net.output.bias.fill_(1.0)
    made = plain_net(net)
    # The second unit says relu(2) = 2, always: 4 x 2 more in the bias. Only the first input counts.
    assert made.units == {"inputs": (3, 1), "hidden.0": (3, 1)}
    steps: Any = list(made.net)
    select, first, _, last = steps[1:]
    assert select.index.tolist() == [0]
    assert (first.weight.tolist(), first.bias.tolist()) == ([[1.0]], [0.0])
    assert (last.weight.tolist(), last.bias.tolist()) == ([[3.0]], [9.0])


def test_a_layer_norm_keeps_its_units_and_says_so() -> None:
    made = plain_net(net_with(STATIC, norm="layer", input_norm="layer", input_gate=STATIC))
    assert made.units == {}
    assert any(note.startswith("hidden.0: all 20 units are kept") for note in made.notes)
    assert any(note.startswith("input_gate: all inputs are kept") for note in made.notes)


def test_nothing_is_left_but_one_unit_where_all_are_closed() -> None:
    net: Any = GatedMLP(4, [8], 3, gate=STATIC)
    net.layers()[0].gate.logit.data.fill_(-1)
    made = plain_net(net)
    x = torch.randn(5, 4)
    assert made.units["hidden.0"] == (8, 1)
    torch.testing.assert_close(made.net(x), net.output.bias.expand(5, 3))


def test_blocks_that_are_hardly_ever_open_go() -> None:
    net = randomised(GatedMLP(6, [8], 3, gate={"kind": "dynamic", "block_size": 2}))
    gate = net.layers()[0].gate
    with torch.no_grad():
        gate.network[0].weight.zero_()
        gate.network[0].weight[0, 0] = 1.0
        gate.network[0].bias.copy_(torch.tensor([-1.5, 9.0, 9.0, -9.0]))
    x = torch.randn(1000, 6)
    usage = block_usage(net, x.split(300))
    share = (x[:, 0] > 1.5).float().mean()
    torch.testing.assert_close(usage["hidden.0"], torch.tensor([share, 1.0, 1.0, 0.0]))
    assert plain_net(net, usage=usage, min_usage=0.01).units == {"hidden.0": (8, 6)}
    made = plain_net(net, usage=usage, min_usage=0.5)
    assert made.units == {"hidden.0": (8, 4)}
    closed = x[:, 0] < 1.4  # here nothing has changed
    torch.testing.assert_close(made.net(x[closed]), net(x[closed]))
    assert not torch.allclose(made.net(x[x[:, 0] > 1.6]), net(x[x[:, 0] > 1.6]))


def test_a_frozen_gate_has_open_what_is_open_often_enough_and_looks_at_nothing() -> None:
    net = randomised(GatedMLP(6, [8, 4], 3, gate={"kind": "dynamic", "block_size": 2}))
    first, second = (layer.gate.network[0] for layer in net.layers())
    with torch.no_grad():
        first.weight.zero_()
        first.weight[0, 0] = 1.0
        first.bias.copy_(torch.tensor([-1.5, 9.0, 9.0, -9.0]))
        second.weight.zero_()
        second.bias.copy_(torch.tensor([9.0, -9.0]))
    x = torch.randn(1000, 6)
    usage = block_usage(net, [x])
    before = {name: value.clone() for name, value in net.state_dict().items()}
    frozen = freeze_gates(net, usage, 0.5)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    same = x[:, 0] < 1.4
    torch.testing.assert_close(frozen(x[same]), net(x[same]))
    made = plain_net(frozen)
    assert made.units == {"hidden.0": (8, 4), "hidden.1": (4, 2)}
    assert not any(step["kind"] == "gated" for step in made.steps)
    torch.testing.assert_close(made.net(x), frozen(x))
    # The block that 7 % of the samples open is open for all of them, or for none.
    often = freeze_gates(net, usage, 0.01)
    opened = x[:, 0] > 1.6
    torch.testing.assert_close(often(x[opened]), net(x[opened]))
    assert plain_net(often).units == {"hidden.0": (8, 6), "hidden.1": (4, 2)}


@pytest.mark.parametrize("rule", [{"min_open": 3}, {"policy": "top_k", "k": 3}, {}])
def test_what_a_gate_always_has_open_stays_when_it_is_frozen(rule: dict[str, Any]) -> None:
    gate: Any = {"kind": "dynamic", **rule}
    net = GatedMLP(6, [8], 3, gate=gate)
    usage = torch.tensor([0.01, 0.04, 0.0, 0.03, 0.02, 0.0, 0.0, 0.0])
    frozen: Any = freeze_gates(net, {"hidden.0": usage}, 0.05).layers()[0].gate
    is_open = [i for i, z in enumerate(frozen.logit.tolist()) if z > 0]
    assert is_open == ([1, 3, 4] if rule else [1])


def test_what_cannot_be_frozen_is_refused() -> None:
    net = GatedMLP(6, [8], 3, gate={"kind": "dynamic"})
    for usage in ({}, {"hidden.0": torch.ones(4)}):
        with pytest.raises(ValueError, match=r"must have 8 shares for hidden\.0"):
            freeze_gates(net, usage)
    with pytest.raises(TypeError, match="input_gate"):
        freeze_gates(GatedMLP(6, [8], 3, input_gate={"kind": "dynamic"}), {})
    scaled: Any = {"kind": "dynamic", "scale": "probability"}
    with pytest.raises(TypeError, match=r"hidden\.0: the gate scales units by p"):
        freeze_gates(GatedMLP(6, [8], 3, gate=scaled), {"hidden.0": torch.ones(8)})


def test_gates_that_cost_more_than_they_save_are_frozen_if_little_is_lost() -> None:
    net = randomised(GatedMLP(6, [8], 3, gate={"kind": "dynamic"})).requires_grad_(False)
    gate: Any = net.layers()[0].gate
    gate.network[0].weight.zero_()
    gate.network[0].weight[0, 0] = 9.0  # one unit looks at the input, the others do not
    gate.network[0].bias.fill_(9.0)
    gate.network[0].bias[0] = 0.0
    x = torch.randn(500, 6)
    said, frozen_says = net(x).argmax(-1), freeze_gates(net, block_usage(net, [x]))(x).argmax(-1)
    lost = float((said != frozen_says).float().mean())
    assert 0 < lost < 1
    data = [(part, net(part).argmax(-1)) for part in x.split(100)]
    net.train()  # which changes nothing, and is not changed
    chosen, made = freeze_if_faster(net, lambda: data, [1], max_accuracy_drop=lost + 1e-6)
    assert net.training
    assert not any(step["kind"] == "gated" for step in made.steps)
    torch.testing.assert_close(made.net(x), chosen(x))
    assert any(
        f"frozen: validation accuracy is 100.00% with them and {1 - lost:.2%}" in note
        for note in made.notes
    )
    kept, made = freeze_if_faster(net, lambda: data, [1], max_accuracy_drop=lost - 1e-6)
    assert kept is net
    assert any("They are kept" in note for note in made.notes)
    torch.testing.assert_close(made.net(x), net(x))


def test_gates_that_scale_stay_and_the_notes_say_why() -> None:
    scaled: Any = {"kind": "dynamic", "scale": "probability", "network": "mlp", "hidden": 99}
    net = randomised(GatedMLP(6, [8], 3, gate=scaled)).requires_grad_(False)
    data = [(torch.randn(5, 6), torch.zeros(5))]
    kept, made = freeze_if_faster(net, lambda: data, [1])
    assert kept is net
    assert any("they scale units by p" in note for note in made.notes)


def test_static_gates_need_no_freezing() -> None:
    net, x = randomised(GatedMLP(6, [8], 3, gate=STATIC)), torch.randn(4, 6)
    kept, made = freeze_if_faster(net, lambda: [(x, torch.zeros(4))], [1])
    assert kept is net
    torch.testing.assert_close(made.net(x), net(x))


def test_the_fastest_is_still_the_same_function() -> None:
    net = randomised(GatedMLP(64, [48, 32], 10, gate=STATIC, input_gate=STATIC))
    made = fastest_plain_net(net, [1, 64])
    x = torch.randn(20, 64)
    torch.testing.assert_close(made.net(x), net(x))
    assert any("variants" in note for note in made.notes)


def test_without_gates_all_is_computed_and_the_net_keeps_its_own() -> None:
    net = randomised(GatedMLP(6, [8], 3, gate=STATIC, input_gate=STATIC))
    dense = without_gates(net)
    layer = net.layers()[0]
    x = torch.randn(4, 6)
    torch.testing.assert_close(dense(x), net.output(torch.relu(layer.linear(x))))
    assert net.input_gate is not None
    assert layer.gate is not None


def test_nets_that_cannot_be_made_compact_are_refused() -> None:
    with pytest.raises(TypeError, match=r"GatedMLP.*Linear"):
        plain_net(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got a SwitchMoE"):
        plain_net(SwitchMoE(6, 3))
    dynamic: Any = {"kind": "dynamic"}
    with pytest.raises(TypeError, match=r"input_gate: .*must be static"):
        plain_net(GatedMLP(6, [4], 2, input_gate=dynamic))


def test_half_precision_stays_and_a_net_without_hidden_layers_works() -> None:
    net = randomised(GatedMLP(16, [32], 4, gate=STATIC, dtype=torch.bfloat16))
    assert plain_net(net).net(torch.randn(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
    linear = randomised(GatedMLP(5, [], 2, input_gate=STATIC))
    x = torch.randn(3, 5)
    torch.testing.assert_close(plain_net(linear).net(x), linear(x))


def test_gates_of_a_half_precision_net_decide_in_float32() -> None:
    net = randomised(GatedMLP(64, [256], 10, gate={"kind": "dynamic"}, dtype=torch.bfloat16))
    made: Any = plain_net(net)
    x = torch.randn(100, 64, dtype=torch.bfloat16)
    assert made.net[1].gate[0].weight.dtype == torch.float32
    torch.testing.assert_close(made.net(x), net(x))
    normed = GatedMLP(6, [8], 3, input_norm="batch", norm="batch").bfloat16().eval()
    x = torch.randn(9, 6, dtype=torch.bfloat16)
    torch.testing.assert_close(plain_net(normed).net(x), normed(x), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_usage": 0.5}, "`min_usage` must be .* needs `usage`"),
        (
            {"usage": {"net.hidden.0.gate": torch.ones(1)}, "min_usage": 0.5},
            "'net.hidden.0.gate': use hidden.0",
        ),
        ({"multiple": 0}, "`multiple` must be at least 1"),
    ],
)
def test_arguments_that_would_do_nothing_are_refused(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plain_net(GatedMLP(6, [8], 3, gate={"kind": "dynamic"}), **options)
