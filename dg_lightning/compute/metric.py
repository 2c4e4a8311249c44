"""Compute ledger as a torchmetric, reduced over all processes."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from dg_lightning.compute.macs import (
    decision_macs,
    dense_decision_macs,
    executed_macs,
    expected_decision_macs,
    expected_macs,
    linear_maps,
    uncounted_modules,
)
from dg_lightning.compute.report import ComputeReport, LayerCompute
from dg_lightning.compute.whole_net import WholeNet
from dg_lightning.gates.protocol import GateLike, gate_layers

__all__ = ["ComputeLedger"]


class ComputeLedger(Metric):
    """Accumulates the compute ledger of a network over batches and processes.

    Counts of hard gates are exact integers; expected values are kept in float32 as fractions of the
    dense MACs. `update` reads the gates recorded by the last forward pass.

    Args:
        net: The network whose forward passes are counted.
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
    expected: Tensor  # (maps,), fractions
    gate_macs: Tensor  # (gates,)
    expected_gate: Tensor  # (gates,), fractions
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
        self.names = list(sums)
        for name, zero in sums.items():
            self.add_state(name, zero, dist_reduce_fx="sum")

    @override
    @torch.no_grad()
    def update(self, net: nn.Module, samples: int) -> None:
        """Add the last forward pass of `net` over `samples` samples."""
        maps = linear_maps(net)
        gates = gate_layers(net, required=False)
        masks = [gate.gate for gate in gates.values() if gate.gate is not None]
        rows = {mask.shape[:-1].numel() for mask in masks if mask.ndim > 1}
        if len(rows) == 1:
            (samples,) = rows  # each position of a sequence counts as a sample
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
        states = {name: getattr(self, name) for name in self.names if name != "samples"}
        return {name: state.cpu().double() / self.samples.cpu() for name, state in states.items()}

    def report(self, net: nn.Module, whole: WholeNet | None = None) -> ComputeReport:
        """Return the ledger of all samples so far, reduced over all processes.

        Args:
            net: The network.
            whole: Runs of each linear map per sample and the MACs of other modules. If None, each
                map counts as run once, and other modules are not counted.
        """
        counted = WholeNet() if whole is None else whole
        # Torchmetrics squeezes states with one element.
        mean = {name: value.reshape(-1) for name, value in self.compute().items()}
        maps = linear_maps(net)
        gates = gate_layers(net, required=False)

        def gate_metrics(gate: GateLike | None, runs: float = 0.0) -> dict[str, Any]:
            if gate is None:
                return {}
            index = next(i for i, other in enumerate(gates.values()) if other is gate)
            opened = mean[f"opened_{index}"]
            dense = round(dense_decision_macs(gate) * runs)
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
            LayerCompute(name, **gate_metrics(gate, counted.runs.get(name, 1.0)), is_map=False)
            for name, gate in gates.items()
            if not any(gate is other for other in attached)
        ]
        for index, m in enumerate(maps):
            if (runs := counted.runs.get(m.name, 1.0)) == 0:
                continue  # counted in `other`
            layers.append(
                LayerCompute(
                    m.name,
                    macs_dense=round(m.macs_dense * runs),
                    macs=mean["macs"][index].item() * runs,
                    macs_expected=mean["expected"][index].item() * m.macs_dense * runs,
                    density=m.connections / m.macs_dense,
                    # A decision is counted once, with the first of the maps that it is made for.
                    **gate_metrics(m.output_gate, runs if m.is_first_of_gate else 0.0),
                )
            )
        for name, macs in counted.between.items():
            rates = gate_metrics(gates[name])
            saved = (1.0, 1.0)
            if not gates[name].input_dependent:
                saved = rates["open_rate_g"], rates["open_rate_p"]
            executed, expected = (macs * share for share in saved)
            layers.append(LayerCompute(f"{name} (between)", macs, executed, expected, **rates))
        uncounted = uncounted_modules(net) if whole is None else whole.uncounted
        return ComputeReport(tuple(layers), tuple(uncounted), counted.other)


def _total(value: Tensor, samples: int, item_ndim: int = 0) -> Tensor:
    """Sum a value over samples; its last `item_ndim` axes are not summed.

    A value without sample axes is the same for all samples. If rows are not samples, for example
    after pooling a sequence, each sample counts with the mean over rows.
    """
    if value.ndim == item_ndim:
        return value * samples
    by_row = value.flatten(0, value.ndim - item_ndim - 1)
    total = by_row.sum(0)
    if len(by_row) == samples:
        return total
    rounding = None if value.is_floating_point() else "floor"
    return (total * samples).div(len(by_row), rounding_mode=rounding)
