"""Gates that depend on the input become static ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning import (
    DynamicGate,
    GatedFeedForward,
    GatedLinear,
    GatedMLP,
    StaticGate,
    add_gates,
    compact,
)
from dg_lightning.surgery import freeze_gates


def by_first_input(gate: Any, open_share: Tensor) -> None:
    """Let each block open for a share of uniformly distributed first inputs."""
    (linear,) = gate.network
    linear.weight.data.zero_()[:, 0] = 100.0
    linear.bias.data = -100.0 * (1 - open_share)


def uniform(rows: int, width: int) -> Tensor:
    x = torch.rand(rows, width)
    x[:, 0] = torch.linspace(0, 1, rows)
    return x


def test_blocks_that_are_often_open_stay_open() -> None:
    mlp = GatedMLP(6, [8], 3, gate={"kind": "dynamic", "block_size": 2}).eval()
    gate: Any = mlp.layers()[0].gate
    by_first_input(gate, torch.tensor([0.9, 0.02, 0.5, 0.0]))
    x = uniform(1000, 6)
    frozen = freeze_gates(mlp, x.split(300), 0.4)
    static: Any = frozen.hidden[0].gate  # type: ignore[union-attr, index]
    assert isinstance(static, StaticGate)
    expected = mlp(x) * 0 + mlp.output(
        mlp.layers()[0].linear(x).relu() * torch.tensor([1, 1, 0, 0, 1, 1, 0, 0])
    )
    torch.testing.assert_close(frozen(x), expected)
    assert compact(frozen, x).units == {"output": (8, 4)}
    assert mlp.layers()[0].gate is gate  # not changed


@pytest.mark.parametrize("settings", [{"min_open": 3}, {"policy": "top_k", "k": 3}])
def test_as_many_blocks_stay_open_as_the_gate_asks_for(settings: Any) -> None:
    gate: Any = {"kind": "dynamic", "block_size": 2, **settings}
    layer = GatedFeedForward(4, 10, gate=gate).eval()
    by_first_input(layer.gate, torch.tensor([0.02, 0.01, 0.03, 0.0, 0.0]))
    frozen: Any = freeze_gates(layer, [uniform(500, 4)], 0.9)
    assert frozen.gate.logit.tolist() == [1, 1, 1, -1, -1]


def test_what_cannot_be_frozen_is_said() -> None:
    x = torch.randn(4, 6)
    scaled = GatedMLP(6, [8], 3, gate={"kind": "dynamic", "scale": "probability"})
    inputs = GatedMLP(6, [8], 3, input_gate={"kind": "dynamic"})
    theirs = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    add_gates(theirs, feed_forward={"kind": "dynamic"}, example=x)
    for model, name in ((scaled, "hidden.0.gate"), (inputs, "input_gate"), (theirs, "2.dg_gate")):
        with pytest.raises(ValueError, match=name):
            freeze_gates(model, [x])
    mlp = GatedMLP(6, [8], 3, gate={"kind": "dynamic"})
    with pytest.raises(ValueError, match="`batches`"):
        freeze_gates(mlp, [])
    with pytest.raises(ValueError, match=r"`min_usage`.*1\.5"):
        freeze_gates(mlp, [x], 1.5)
    with pytest.raises(ValueError, match="`batches`"):
        freeze_gates(mlp, x)


class Twice(nn.Module):
    """Runs a gated layer twice in a pass, and another one for large batches only."""

    def __init__(self) -> None:
        super().__init__()
        gate: Any = {"kind": "dynamic", "initial_spread": 4.0, "initial_open_rate": 0.3}
        self.a = GatedLinear(16, 16, gate=gate)
        self.b = GatedLinear(16, 16, gate=gate)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(self.a(x))
        return self.b(h) if len(x) > 4 else h


def test_every_call_of_a_gate_counts_and_no_earlier_one() -> None:
    torch.manual_seed(0)
    net = Twice()
    x = torch.randn(64, 16)
    shares = {"a": torch.zeros(16), "b": torch.zeros(16)}
    h = x
    for _ in range(2):
        h = net.a(h)
        assert isinstance(net.a.gate, DynamicGate)
        assert net.a.gate.gate is not None
        shares["a"] += net.a.gate.gate.detach().mean(0) / 2
    net.b(h)
    assert isinstance(net.b.gate, DynamicGate)
    assert net.b.gate.gate is not None
    shares["b"] = net.b.gate.gate.detach().mean(0)
    small = [torch.randn(2, 16)] * 20  # too few to change the shares of `a` much; `b` rests
    frozen: Any = freeze_gates(net, [x, *small], 0.01)
    assert torch.equal(frozen.b.gate.logit > 0, shares["b"] >= 0.01)
    frozen = freeze_gates(net, [x], 0.25)
    assert torch.equal(frozen.a.gate.logit > 0, shares["a"] >= 0.25)
    with pytest.raises(ValueError, match=r"b\.gate .*`batches`"):
        freeze_gates(net, small)
