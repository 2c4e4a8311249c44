"""Gates that scale open units by their p."""

from typing import Any

import pytest
import torch

from dg_lightning import GatedMLP, StaticGate
from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.gates import make_gate

KINDS: Any = [
    {"kind": "static"},
    {"kind": "static", "policy": "top_k", "k": 3},
    {"kind": "dynamic", "network": "mlp", "hidden": 5, "block_size": 2},
    {"kind": "dynamic", "min_open": 5},
    {"kind": "dynamic", "policy": "bernoulli"},
]


def random_gate(settings: Any) -> Any:
    torch.manual_seed(0)
    scaled: Any = {**settings, "scale": "probability"}
    gate = make_gate(scaled, 6, 8, dtype=torch.float64)
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    return gate


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_open_units_are_multiplied_by_p_and_closed_ones_by_0(settings: Any, training: bool) -> None:
    gate = random_gate(settings).train(training)
    value = gate(torch.randn(16, 6, dtype=torch.float64))
    p, g = (gate.expand_blocks(recorded) for recorded in (gate.probability, gate.gate))
    assert set(g.unique().tolist()) == {0.0, 1.0}  # the decision is recorded, not the scale
    torch.testing.assert_close(value, torch.where(g == 1, p, 0.0).expand_as(value))
    assert ((value != 0) == (g != 0)).all()


@pytest.mark.parametrize("settings", KINDS)
def test_the_loss_reaches_p_through_open_units_only(settings: Any) -> None:
    gate = random_gate(settings)
    value = gate(torch.randn(16, 6, dtype=torch.float64))
    gate.probability.retain_grad()
    weights = torch.randn(16, 8, dtype=torch.float64)
    (value * weights).sum().backward()
    by_block = weights.unflatten(-1, (gate.blocks, gate.block_size)).sum(-1)
    expected = gate.gate.detach() * by_block
    if gate.probability.ndim == 1:
        expected = expected.sum(0)
    torch.testing.assert_close(gate.probability.grad, expected)


def test_the_scale_changes_no_decision_and_no_count() -> None:
    reports = []
    for scale in (None, "probability"):
        torch.manual_seed(0)
        gate: Any = {"kind": "dynamic", "network": "low_rank", "rank": 2, "scale": scale}
        net = GatedMLP(12, [8, 6], 3, gate=[gate, {"kind": "static", "scale": scale}]).eval()
        for layer in net.layers():
            for parameter in layer.gate.parameters():  # type: ignore[union-attr]
                torch.nn.init.normal_(parameter)
        ledger = ComputeLedger(net)
        net(torch.randn(16, 12, generator=torch.Generator().manual_seed(1)))
        ledger.update(net, samples=16)
        reports.append(ledger.report(net))
    assert reports[0].macs == reports[1].macs < reports[0].macs_dense


def test_policies_that_scale_by_themselves_and_unknown_scales_are_refused() -> None:
    for policy in ("soft", "concrete", "hard_concrete"):
        with pytest.raises(ValueError, match=f"`scale` .*got '{policy}'"):
            StaticGate(4, policy=policy, scale="probability")
    with pytest.raises(ValueError, match="`scale` must be 'probability' or None, got 'p'"):
        StaticGate(4, scale="p")  # type: ignore[arg-type]
