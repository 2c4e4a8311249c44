"""Gates that depend on the input become static ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning import GatedFeedForward, GatedMLP, StaticGate, add_gates, compact
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
