"""Torchmetrics of gated nets; their sums are reduced over all processes."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from dg_lightning.compute import (
    ComputeReport,
    LayerCompute,
    decision_macs,
    executed_macs,
    expected_macs,
    linear_maps,
)
from dg_lightning.protocol import GateLike, gate_layers

__all__ = ["ComputeLedger"]


class ComputeLedger(Metric):
    """Keeps the compute ledger of a net over many batches and processes.

    Counts of hard gates are whole numbers and stay exact; what uses probabilities is kept as shares
    of the dense figure in float32. `update` reads what the last forward pass left in the gates.

    Args:
        net: The net whose forward passes are counted.
        **kwargs: Arguments of `torchmetrics.Metric`.

    >>> from dg_lightning import GatedMLP
    >>> mlp = GatedMLP(784, [256], 10, gate={"kind": "static"}).eval()
    >>> ledger = ComputeLedger(mlp)
    >>> _ = mlp(torch.randn(5, 784))
    >>> ledger.update(mlp, samples=5)
    >>> ledger.report(mlp).macs
    203264.0
    """

    full_state_update = False
    samples: Tensor
    macs: Tensor  # (maps,)
    expected: Tensor  # (maps,), shares
    gate_macs: Tensor  # (gates,)
    probability: Tensor  # (gates,)

    def __init__(self, net: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        gates = list(gate_layers(net, required=False).values())
        maps = len(linear_maps(net))
        sums = {
            "samples": torch.tensor(0),
            "macs": torch.zeros(maps, dtype=torch.int64),
            "expected": torch.zeros(maps),
            "gate_macs": torch.zeros(len(gates), dtype=torch.int64),
            "probability": torch.zeros(len(gates)),
        }
        for index, gate in enumerate(gates):
            blocks = gate.units // gate.block_size
            sums[f"opened_{index}"] = torch.zeros(blocks, dtype=torch.int64)
        for name, zero in sums.items():
            self.add_state(name, zero, dist_reduce_fx="sum")

    @override
    @torch.no_grad()
    def update(self, net: nn.Module, samples: int) -> None:
        """Add the last forward pass of `net`, which was over so many samples."""
        maps = linear_maps(net)
        self.samples += samples
        for index, linear_map in enumerate(maps):
            self.macs[index] += _total(executed_macs(linear_map), samples)
            self.expected[index] += _total(expected_macs(linear_map), samples)
        for index, gate in enumerate(gate_layers(net, required=False).values()):
            self.gate_macs[index] += _total(decision_macs(gate, maps), samples)
            assert gate.gate is not None
            assert gate.probability is not None
            self.probability[index] += _total(gate.probability.mean(-1), samples)
            is_open = gate.gate != 0
            opened = is_open * samples if is_open.ndim == 1 else is_open.flatten(0, -2).sum(0)
            setattr(self, f"opened_{index}", getattr(self, f"opened_{index}") + opened)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the mean of every sum over the samples."""
        if not self.samples:
            raise RuntimeError("The ledger has seen no sample: call `update` after a forward pass.")
        states = {name: getattr(self, name) for name in self._defaults if name != "samples"}
        return {name: state.cpu().double() / self.samples.cpu() for name, state in states.items()}

    def report(self, net: nn.Module) -> ComputeReport:
        """Return the ledger of everything seen so far, reduced over all processes."""
        # A metric squeezes what has one element.
        mean = {name: value.reshape(-1) for name, value in self.compute().items()}
        maps = linear_maps(net)
        gates = gate_layers(net, required=False)

        def of_gate(gate: GateLike | None) -> dict[str, Any]:
            if gate is None:
                return {}
            index = next(i for i, other in enumerate(gates.values()) if other is gate)
            opened = mean[f"opened_{index}"]
            width = next((m.linear.in_features for m in maps if m.output_gate is gate), gate.units)
            return {
                "gate_macs": mean["gate_macs"][index].item(),
                "gate_macs_dense": int(gate.decision_macs(torch.tensor(width))),
                "open_rate_g": opened.mean().item(),
                "open_rate_p": mean["probability"][index].item(),
                "dead_units": int((opened == 0).sum()) * gate.block_size,
            }

        attached = [m.output_gate for m in maps if m.output_gate is not None]
        layers = [
            LayerCompute(name, **of_gate(gate), is_map=False)
            for name, gate in gates.items()
            if not any(gate is other for other in attached)
        ]
        layers += [
            LayerCompute(
                m.name,
                macs_dense=m.macs_dense,
                macs=mean["macs"][index].item(),
                macs_expected=mean["expected"][index].item() * m.macs_dense,
                density=m.density,
                **of_gate(m.output_gate),
            )
            for index, m in enumerate(maps)
        ]
        return ComputeReport(tuple(layers))


def _total(value: Tensor, samples: int) -> Tensor:
    """Sum a figure over samples; a 0-d one is the same for all of them."""
    return value * samples if value.ndim == 0 else value.sum()
