"""Gates in other people's models: nothing else changes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning import GatedFeedForward, add_gates, gate_layers, remove_gates
from dg_lightning.compute import executed_macs, linear_maps
from dg_lightning.compute.macs import decision_macs
from dg_lightning.compute.whole_net import FlopRecorder
from dg_lightning.surgery import compact

STATIC: Any = {"kind": "static"}
BLOCKS: Any = {"kind": "static", "block_size": 2}
ODD: Any = {"kind": "odd"}
LOW_RANK: Any = {"kind": "dynamic", "network": "low_rank", "rank": 2}
X = torch.randn(4, 8)


def plain() -> Any:
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 6), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def run(net: nn.Module, x: Any = X) -> Tensor:
    torch.manual_seed(3)  # dropout
    out: Tensor = net(x)
    return out


@pytest.mark.parametrize("settings", [STATIC, LOW_RANK])
@pytest.mark.parametrize("training", [True, False])
def test_open_gates_change_nothing_and_can_be_removed(settings: Any, training: bool) -> None:
    net = plain().train(training)
    keys, modules = list(net.state_dict()), dict(net.named_modules())
    before = run(net)
    found = add_gates(net, feed_forward=settings, example=X)
    assert list(gate_layers(net)) == [f"{name}.dg_gate" for name in found.units]
    assert torch.equal(run(net), before)
    assert [key for key in net.state_dict() if ".dg_gate." not in key] == keys
    remove_gates(net)
    assert torch.equal(run(net), before)
    assert list(net.state_dict()) == keys
    assert dict(net.named_modules()) == modules
    assert not any(child._forward_pre_hooks for child in net.modules())
    assert not any(key.startswith("dg_") for child in net.modules() for key in vars(child))


def test_closed_units_are_out_of_the_net_and_of_its_macs() -> None:
    net = plain().eval()
    add_gates(net, feed_forward=STATIC, example=X)
    gate_layers(net)["3.dg_gate"].logit.data[4:] = -1.0  # type: ignore[attr-defined]
    closed = run(net)
    assert [int(executed_macs(m)) for m in linear_maps(net)] == [8 * 4, 4 * 6, 6 * 3]
    remove_gates(net)
    net[3].weight.data[:, 4:] = 0.0
    torch.testing.assert_close(run(net), closed)


def test_gates_that_look_at_the_input_decide_by_position() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    add_gates(layer, feed_forward=LOW_RANK, example=torch.randn(2, 5, 8))
    gate: Any = layer.linear2.dg_gate
    gate.network[-1].weight.data.normal_()
    layer(torch.randn(2, 5, 8))
    assert gate.gate.shape == (2, 5, 16)
    # Two small maps: 8 x 2 + 2 x 16, at five positions of a sample.
    assert int(decision_macs(gate, linear_maps(layer))) == 5 * 48
    layer.eval()
    x = torch.randn(2, 5, 8)
    mixed = layer.self_attn(x, x, x, need_weights=False)[0]
    h = layer.norm1(x + mixed)
    by_hand = layer.norm2(h + layer.linear2(layer.linear1(h).relu()))
    torch.testing.assert_close(layer(x), by_hand)  # torch's fused path would pass the gate by


def test_only_gates_that_look_at_each_position_can_decide_by_the_input() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    with pytest.raises(ValueError, match=r"channels of 2 .*static gates"):
        add_gates(net, channels=LOW_RANK, example=torch.randn(1, 3, 8, 8))
    assert not any(child._forward_pre_hooks for child in net)


def test_blocks_of_units_close_together() -> None:
    net = plain().eval()
    add_gates(net, feed_forward=BLOCKS, example=X)
    net[3].dg_gate.logit.data[0] = -1.0
    run(net)
    assert net[3].dg_gate.gate.shape == (8,)
    assert int(executed_macs(linear_maps(net)[0])) == 8 * 14


@pytest.mark.parametrize("settings", [STATIC, LOW_RANK])
def test_a_copy_has_gates_of_its_own(settings: Any) -> None:
    net = plain().eval()
    add_gates(net, feed_forward=settings, example=X)
    before = run(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(run(twin), before)
        for gate in gate_layers(twin).values():
            gate.shift_bias(-9.0)
        assert not torch.equal(run(twin), before)
        remove_gates(twin)
        assert torch.equal(run(twin), before)
        assert torch.equal(run(net), before)


def test_the_loss_reaches_gates_and_weights() -> None:
    net = plain()
    add_gates(net, feed_forward=LOW_RANK, example=X)
    run(net).square().mean().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_compiled_model_has_gates_too() -> None:
    net = plain().eval()
    add_gates(net, feed_forward=STATIC, example=X)
    net[3].dg_gate.logit.data[4:] = -1.0
    compiled: Any = torch.compile(net, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), net(X))


def test_patterns_choose_units() -> None:
    net = plain()
    assert list(add_gates(net, feed_forward=STATIC, layers=["3"], example=X).units) == ["3"]
    assert list(gate_layers(net)) == ["3.dg_gate"]


def test_a_pair_of_names_gates_what_is_not_found() -> None:
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)).eval()
    add_gates(net, feed_forward=STATIC, pairs=[("0", "2")])
    gate: Any = net[2].dg_gate
    gate.logit.data[4:] = -1.0
    before = run(net)
    # The norm needs all outputs of the first layer.
    assert [int(executed_macs(m)) for m in linear_maps(net)] == [8 * 16, 4 * 2]
    expected = net[2].bias + net[1](net[0](X))[:, :4] @ net[2].weight[:, :4].T
    torch.testing.assert_close(before, expected)


def test_weights_are_loaded_from_before_the_surgery() -> None:
    net = plain()
    before = copy.deepcopy(net.state_dict())
    add_gates(net, feed_forward=STATIC, example=X)
    missing = net.load_state_dict(before, strict=False)
    assert not missing.unexpected_keys
    assert all(".dg_gate." in key for key in missing.missing_keys)


def test_padding_takes_the_same_way_with_gates() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        before = net(x, src_key_padding_mask=padding)[~padding]
        add_gates(net, feed_forward=STATIC, example=x)
        torch.testing.assert_close(net(x, src_key_padding_mask=padding)[~padding], before)
    assert not net.use_nested_tensor
    remove_gates(net)
    assert net.use_nested_tensor


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda net: add_gates(net, example=X), "`feed_forward`"),
        (lambda net: add_gates(net, feed_forward=STATIC, example=X, layers=["no"]), "'no'"),
        (lambda net: add_gates(net, heads=STATIC, example=X), "has no heads to gate"),
        (lambda net: add_gates(nn.Linear(8, 2), feed_forward=STATIC, example=X), "no feed_forward"),
        (lambda net: add_gates(net.to("meta"), feed_forward=STATIC, example=X), "meta device"),
        (lambda net: add_gates(net, feed_forward=ODD, example=X), "`kind` in `gate`"),
        (lambda net: add_gates(net, feed_forward=STATIC, pairs=[("0", "9")]), "`pairs`.*'9'"),
        (lambda net: add_gates(net, feed_forward=STATIC, pairs=[("0", "5")]), "`pairs`.*'5'"),
        (lambda net: remove_gates(net), "has no gates"),
    ],
)
def test_bad_input_gets_one_line_and_changes_nothing(wrong: Any, said: str) -> None:
    net = plain()
    with pytest.raises(ValueError, match=said) as caught:
        wrong(net)
    assert "\n" not in str(caught.value)
    assert not gate_layers(net, required=False)
    assert not any(child._forward_pre_hooks for child in net)


def test_gates_are_added_once() -> None:
    net = plain()
    add_gates(net, feed_forward=STATIC, example=X)
    with pytest.raises(ValueError, match=r"already has gates \(at 3\)"):
        add_gates(net, feed_forward=STATIC, example=X)
    assert net(X).shape == (4, 3)


def test_a_missing_example_leaves_no_hook_behind() -> None:
    net = plain().eval()
    before = run(net)
    with pytest.raises(ValueError, match="pass an `example`"):
        add_gates(net, feed_forward=STATIC)
    assert torch.equal(run(net), before)
    assert not any(child._forward_hooks for child in net)


def test_code_that_was_compiled_before_sees_gates() -> None:
    net = plain().eval()
    compiled: Any = torch.compile(net, backend="eager")
    compiled(X)
    add_gates(net, feed_forward=STATIC, example=X)
    net[3].dg_gate.logit.data[4:] = -1.0
    assert torch.equal(compiled(X), net(X))


def test_a_convolution_without_a_batch_is_gated_by_channel() -> None:
    net: Any = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    images = torch.randn(2, 3, 8, 8)
    add_gates(net, channels=STATIC, example=images)
    net[2].dg_gate.logit.data[::2] = -1.0
    torch.testing.assert_close(net(images)[0], net(images[0]))


class Beside(nn.Module):
    """Does something else between two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        mixed = (x @ x.transpose(1, 2)) @ x
        out: Tensor = self.second(h) + mixed
        return out


def test_only_products_of_the_units_are_saved_with_them() -> None:
    net, x = Beside().eval(), torch.randn(2, 5, 8)
    add_gates(net, feed_forward=STATIC, example=x)
    with FlopRecorder(net) as count:
        net(x)
    whole = count.result(samples=2)
    assert whole is not None
    assert whole.between == {}
    assert whole.other == 2 * 5 * 5 * 8


def test_a_pair_whose_units_are_gated_already_is_refused() -> None:
    layer = GatedFeedForward(8, 16, gate={"kind": "dynamic", "block_size": 4})
    with pytest.raises(ValueError, match=r"`pairs`.*'fc1'.*'gate'"):
        add_gates(layer, feed_forward=STATIC, pairs=[("fc1", "fc2")])


@pytest.mark.parametrize("settings", [STATIC, LOW_RANK])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_a_model_with_gates_is_not_quantized(settings: Any) -> None:
    net = plain().eval()
    add_gates(net, feed_forward=settings, example=X)
    quantized = torch.ao.quantization.quantize_dynamic(net, {nn.Linear})
    with pytest.raises(RuntimeError, match="call `compact`"):
        quantized(X)
    if settings is STATIC:
        net[3].dg_gate.logit.data[::2] = -1.0
        small = compact(net, X).model
        torch.testing.assert_close(
            torch.ao.quantization.quantize_dynamic(small, {nn.Linear})(X),
            net(X),
            rtol=0.1,
            atol=0.1,
        )
