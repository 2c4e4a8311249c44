from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dg_lightning import DynamicGate, GatedFeedForward
from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.layers import MoEFeedForward

SPREAD: Any = {"kind": "dynamic", "block_size": 4, "initial_spread": 1.0, "initial_open_rate": 0.6}


def drawn(layer: torch.nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5)
    return layer.double().eval()


def test_under_autocast_the_gate_reads_what_the_layers_read() -> None:
    layer = GatedFeedForward(
        6, 12, gate={"kind": "dynamic", "block_size": 4, "initial_spread": 1.0}
    )
    h = torch.randn(40, 6)
    with torch.autocast("cpu", torch.bfloat16):
        layer(h)
    gate: Any = layer.gate
    found = gate.probability
    gate(h.bfloat16().float())
    torch.testing.assert_close(found, gate.probability)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert layer.double()(h.double()).dtype == torch.float64


@pytest.mark.parametrize("scale", [None, "probability"])
@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)], ids=str)
def test_it_is_the_formula_token_by_token(shape: Any, glu: bool, scale: Any) -> None:
    gate: Any = {"kind": "dynamic", "block_size": 4, "scale": scale}
    layer = drawn(GatedFeedForward(6, 12, gate=gate, activation="silu", glu=glu))
    h = torch.randn(*shape, dtype=torch.float64)
    out = layer(h)
    for token, found in zip(h.reshape(-1, 6), out.reshape(-1, 6), strict=True):
        units = F.silu(layer.fc1.weight @ token + layer.fc1.bias)
        if glu:
            units = units * (layer.fc1_gate.weight @ token + layer.fc1_gate.bias)
        for block in range(3):
            z = layer.gate.network[0].weight[block] @ token + layer.gate.network[0].bias[block]
            p = torch.sigmoid(z)
            factor = p if scale else 1.0
            units[4 * block : 4 * block + 4] *= factor if p > 0.5 else 0.0
        torch.testing.assert_close(found, layer.fc2.weight @ units + layer.fc2.bias)
    assert layer.gate.gate.shape == (*shape[:-1], 3)
    assert 0 < layer.gate.gate.mean() < 1


def test_without_a_gate_it_is_dense() -> None:
    layer = GatedFeedForward(6)
    h = torch.randn(3, 6)
    expected = layer.fc2(F.gelu(layer.fc1(h)))
    assert layer.fc1.out_features == 24
    assert torch.equal(layer(h), expected)


def test_the_ledger_counts_what_a_token_runs() -> None:
    layer = GatedFeedForward(6, 12, gate=SPREAD, glu=True).eval()
    layer(torch.randn(7, 5, 6))
    ledger = ComputeLedger(layer)
    ledger.update(layer, samples=35)
    assert layer.gate is not None
    assert layer.gate.gate is not None
    opened = float(layer.gate.gate.sum()) * 4 / 35  # units of a token
    report = ledger.report(layer)
    assert report.macs == pytest.approx(3 * 6 * opened + 6 * 3)
    assert report.macs_dense == 3 * 6 * 12


def test_a_gate_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="The gate has 8 units, but the feed-forward has 12"):
        GatedFeedForward(6, 12, gate=DynamicGate(6, 8))


@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_are_those_that_the_router_has_chosen(top_k: int) -> None:
    layer = drawn(MoEFeedForward(6, 12, experts=3, top_k=top_k))
    h = torch.randn(2, 5, 6, dtype=torch.float64)
    out = layer(h)
    weights: Tensor = layer.router.gate.double()
    experts = layer.experts
    for token, found, own in zip(h.reshape(-1, 6), out.reshape(-1, 6), weights, strict=True):
        total = torch.zeros(6, dtype=torch.float64)
        for expert in own.nonzero()[:, 0].tolist():
            units = slice(4 * expert, 4 * expert + 4)
            hidden = F.gelu(experts.fc1.weight[units] @ token + experts.fc1.bias[units])
            bias = experts.bias[6 * expert : 6 * expert + 6]
            total += own[expert] * (experts.fc2.weight[:, units] @ hidden + bias)
        torch.testing.assert_close(found, total, rtol=1e-6, atol=1e-6)
    assert (weights != 0).sum(-1).eq(top_k).all()


def test_experts_must_divide_the_units() -> None:
    with pytest.raises(ValueError, match="`experts`=5 must divide `hidden`=12"):
        MoEFeedForward(6, 12, experts=5)
