"""Torchmetrics of gated nets; their sums are reduced over all processes."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from dg_lightning.compute import (
    decision_macs,
    executed_macs,
    expected_decision_macs,
    expected_macs,
    linear_maps,
    uncounted_modules,
)
from dg_lightning.compute_report import ComputeReport, LayerCompute
from dg_lightning.protocol import GateLike, gate_layers
from dg_lightning.whole_net import WholeNet

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
    expected_gate: Tensor  # (gates,), shares
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
            "expected_gate": torch.zeros(len(gates)),
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
        gates = gate_layers(net, required=False)
        masks = [gate.gate for gate in gates.values() if gate.gate is not None]
        rows = {mask.shape[:-1].numel() for mask in masks if mask.ndim > 1}
        if len(rows) == 1:
            (samples,) = rows  # in a sequence every position counts as a sample
        self.samples += samples
        for index, linear_map in enumerate(maps):
            self.macs[index] += _total(executed_macs(linear_map), samples)
            self.expected[index] += _total(expected_macs(linear_map), samples)
        for index, (name, gate) in enumerate(gates.items()):
            if gate.gate is None or gate.probability is None:
                raise RuntimeError(f"Gate {name!r} took no part in the last forward pass.")
            self.gate_macs[index] += _total(decision_macs(gate, maps), samples)
            self.expected_gate[index] += _total(expected_decision_macs(gate, maps), samples)
            self.probability[index] += _total(gate.probability.mean(-1), samples)
            opened = _total((gate.gate != 0).long(), samples, item_ndim=1)
            setattr(self, f"opened_{index}", getattr(self, f"opened_{index}") + opened)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the mean of every sum over the samples."""
        if not self.samples:
            raise RuntimeError("The ledger has seen no sample: call `update` after a forward pass.")
        states = {name: getattr(self, name) for name in self._defaults if name != "samples"}
        return {name: state.cpu().double() / self.samples.cpu() for name, state in states.items()}

    def report(self, net: nn.Module, whole: WholeNet | None = None) -> ComputeReport:
        """Return the ledger of everything seen so far, reduced over all processes.

        Args:
            net: The net.
            whole: How often its linear maps run for a sample, and what everything else costs; else
                each map counts as run once, and everything else is left out.
        """
        counted = WholeNet() if whole is None else whole
        # A metric squeezes what has one element.
        mean = {name: value.reshape(-1) for name, value in self.compute().items()}
        maps = linear_maps(net)
        gates = gate_layers(net, required=False)

        def of_gate(gate: GateLike | None, runs: float = 1.0) -> dict[str, Any]:
            if gate is None:
                return {}
            index = next(i for i, other in enumerate(gates.values()) if other is gate)
            opened = mean[f"opened_{index}"]
            dense = round(int(gate.decision_macs()) * runs)
            return {
                "gate_macs": mean["gate_macs"][index].item() * runs,
                "gate_macs_expected": mean["expected_gate"][index].item() * dense,
                "gate_macs_dense": dense,
                "open_rate_g": opened.mean().item(),
                "open_rate_p": mean["probability"][index].item(),
                "dead_units": int((opened == 0).sum()) * gate.block_size,
            }

        attached = [m.output_gate for m in maps if m.output_gate is not None]
        layers = [
            LayerCompute(name, **of_gate(gate, counted.runs.get(name, 1.0)), is_map=False)
            for name, gate in gates.items()
            if not any(gate is other for other in attached)
        ]
        for index, m in enumerate(maps):
            if (runs := counted.runs.get(m.name, 1.0)) == 0:
                continue  # among the others
            layers.append(
                LayerCompute(
                    m.name,
                    macs_dense=round(m.macs_dense * runs),
                    macs=mean["macs"][index].item() * runs,
                    macs_expected=mean["expected"][index].item() * m.macs_dense * runs,
                    density=int(m.connections) / m.macs_dense,
                    **of_gate(m.output_gate, runs),
                )
            )
        uncounted = uncounted_modules(net) if whole is None else whole.uncounted
        return ComputeReport(tuple(layers), tuple(uncounted), counted.other)


def _total(value: Tensor, samples: int, item_ndim: int = 0) -> Tensor:
    """Sum a figure over samples; `item_ndim` of its axes belong to the figure itself.

    Without further axes it is the same for all samples. Where rows are not samples, as when a net
    pools a sequence half-way, the mean over rows counts for each sample.
    """
    if value.ndim == item_ndim:
        return value * samples
    by_row = value.flatten(0, value.ndim - item_ndim - 1)
    total = by_row.sum(0)
    if len(by_row) == samples:
        return total
    rounding = None if value.is_floating_point() else "floor"
    return (total * samples).div(len(by_row), rounding_mode=rounding)
