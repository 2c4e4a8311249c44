from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning import DynamicGate, GatedLinear, GatedMLP, StaticGate, gate_layers
from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.gates.protocol import detach_graph


def test_a_gate_in_a_wrapper_is_found_once() -> None:
    net = GatedMLP(6, [4], 3, gate={"kind": "dynamic"})
    layer: Any = net.hidden[0]
    layer.gate = torch.compile(layer.gate)
    assert list(gate_layers(net)) == ["hidden.0.gate"]
    assert isinstance(gate_layers(net)["hidden.0.gate"], DynamicGate)


def test_anybodys_gate_can_be_attached_and_only_once() -> None:
    class Theirs(nn.Module):
        """A gate that knows the protocol, and none of our classes."""

        def __init__(self) -> None:
            super().__init__()
            ours = StaticGate(4)
            for name in ("temperature", "threshold", "min_open"):
                self.register_buffer(name, getattr(ours, name))
            self.units, self.block_size, self.input_dependent = 4, 1, False
            self.initial_open_rate, self.feeds = 0.8, ours.feeds
            self.probability = self.gate = None
            self.decision_macs, self.set_min_open = ours.decision_macs, ours.set_min_open
            self.shift_bias, self.revive = ours.shift_bias, ours.revive

        def forward(self, h: Tensor) -> Tensor:
            self.probability = self.gate = torch.tensor([1.0, 0.0, 0.0, 0.0])  # type: ignore[assignment]
            return self.gate  # type: ignore[return-value]

    gate = Theirs()
    layer = GatedLinear(6, 4, gate=gate)
    layer(torch.randn(2, 6))
    ledger = ComputeLedger(layer)
    ledger.update(layer, 2)
    assert ledger.report(layer).macs == 6
    with pytest.raises(ValueError, match="belongs to another layer"):
        GatedLinear(6, 4, gate=gate)
    with pytest.raises(TypeError, match="must be a gate or its settings, got Linear"):
        GatedLinear(6, 4, gate=nn.Linear(6, 4))


def test_gate_layers_finds_gates_in_anybodys_module_and_names_patterns_that_fit_none() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(GatedLinear(4, 4, gate=StaticGate(4)), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.block(x)
            return out

    theirs = Theirs()
    assert list(gate_layers(theirs)) == ["block.0.gate"]
    assert list(gate_layers(torch.compile(theirs))) == ["block.0.gate"]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'head\.\*'.*block\.0\.gate"):
        gate_layers(theirs, ["head.*"])
    with pytest.raises(ValueError, match="Linear has no gate"):
        gate_layers(nn.Linear(2, 2))


def test_detaching_drops_the_graph_and_keeps_the_values() -> None:
    net = GatedMLP(6, [4], 3, gate={"kind": "dynamic"})
    net(torch.randn(5, 6))
    gate = gate_layers(net)["hidden.0.gate"]
    before = gate.probability
    assert before is not None
    detach_graph(gate_layers(net).values())
    assert gate.probability is not None
    assert not gate.probability.requires_grad
    assert torch.equal(gate.probability, before)
