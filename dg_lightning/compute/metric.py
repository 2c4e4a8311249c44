"""The compute ledger, a torchmetrics metric, and its report."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from dg_lightning.compute.whole_net import WholeNet
from dg_lightning.gates.protocol import GateLike, gate_layers

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class LayerCompute:
    """The compute that one layer uses, averaged over samples."""

    name: str
    macs_dense: int = 0
    macs: float = 0.0
    macs_expected: float = 0.0
    gate_macs: float = 0.0
    gate_macs_expected: float = 0.0
    gate_macs_dense: int = 0
    open_rate_g: float | None = None
    open_rate_p: float | None = None
    dead_units: int | None = None  # units closed for every sample
    density: float = 1.0
    is_map: bool = True  # False for an input gate, which costs only its decision

    def open_rate(self, kind: str) -> float:
        """Return the open rate by `g` or `p`, which is 1 without a gate."""
        rate = self.open_rate_g if kind == "g" else self.open_rate_p
        return 1.0 if rate is None else rate


@dataclass(frozen=True)
class ComputeReport:
    """The compute that a network uses, by layer, in total and as the paper's proxies."""

    layers: tuple[LayerCompute, ...]
    uncounted: tuple[str, ...] = ()  # modules whose MACs are not included
    other_macs: int = 0  # MACs that gates do not reduce, such as attention

    @property
    def macs_dense(self) -> int:
        """MACs that the network would use without gates."""
        return sum(layer.macs_dense for layer in self.layers) + self.other_macs

    @property
    def gate_macs(self) -> float:
        """MACs for all gate decisions, over open inputs only."""
        return sum(layer.gate_macs for layer in self.layers)

    @property
    def macs(self) -> float:
        """Executed MACs, including gate decisions."""
        return sum(layer.macs for layer in self.layers) + self.gate_macs + self.other_macs

    @property
    def macs_expected(self) -> float:
        """Expected MACs, computed like `macs` with p in place of g."""
        expected = sum(layer.macs_expected + layer.gate_macs_expected for layer in self.layers)
        return expected + self.other_macs

    @property
    def macs_as_implemented(self) -> int:
        """MACs that plain masking uses, which multiplies by 0 and skips nothing."""
        return self.macs_dense + sum(layer.gate_macs_dense for layer in self.layers)

    def _hidden(self) -> list[LayerCompute]:
        # The paper sums over L - 1 layers, without the output layer and the input gate.
        return [layer for layer in self.layers if layer.is_map][:-1]

    def compute_proxy(self, kind: str) -> float:
        """Return the paper's ComputeProxy, the mean of p or g over hidden layers."""
        hidden = self._hidden()
        return sum(layer.open_rate(kind) for layer in hidden) / len(hidden) if hidden else 1.0

    def relative_macs(self, kind: str, *, fused: bool = False) -> float:
        """Return the paper's RelMAC for p or g. With `fused`, return RelMAC_fuse.

        RelMAC_fuse also takes the density of connections into account.
        """
        hidden = self._hidden()
        dense = sum(layer.macs_dense for layer in hidden)
        used = sum(
            layer.macs_dense * layer.open_rate(kind) * (layer.density if fused else 1.0)
            for layer in hidden
        )
        return used / dense if dense else 1.0

    def metrics(self) -> dict[str, float]:
        """Return the metrics under the keys used for logging."""
        return {
            "compute/macs": self.macs,
            "compute/macs_dense": self.macs_dense,
            "compute/macs_share": self.macs / self.macs_dense if self.macs_dense else 1.0,
            "compute/macs_expected": self.macs_expected,
            "compute/macs_as_implemented": self.macs_as_implemented,
            "compute/gate_macs": self.gate_macs,
            "compute/relmac_g": self.relative_macs("g"),
            "compute/relmac_p": self.relative_macs("p"),
            "compute/relmac_fuse_g": self.relative_macs("g", fused=True),
            "compute/relmac_fuse_p": self.relative_macs("p", fused=True),
            "compute/proxy_g": self.compute_proxy("g"),
            "compute/proxy_p": self.compute_proxy("p"),
        }

    def table(self) -> "Table":
        """Return the report as a rich table."""
        from rich import box
        from rich.table import Table

        table = Table(title="Compute ledger: MACs per sample", box=box.SIMPLE, padding=(0, 1, 0, 0))
        if self.uncounted:
            table.caption = (
                f"Shares cover linear layers only; not counted: {', '.join(self.uncounted)}."
            )
        table.add_column("layer", no_wrap=True)
        for column in (
            "dense",
            "executed",
            "gate cost",
            "% of dense",
            "open",
            "mean prob.",
            "dead",
        ):
            table.add_column(column, justify="right")
        total = LayerCompute(
            "total", self.macs_dense, self.macs - self.gate_macs, gate_macs=self.gate_macs
        )
        other = LayerCompute("everything else", self.other_macs, self.other_macs)
        for layer in (*self.layers, *([other] if self.other_macs else []), total):
            if layer is total:
                table.add_section()
            executed = layer.macs + layer.gate_macs
            table.add_row(
                layer.name.removesuffix(".linear"),
                f"{layer.macs_dense:,}",
                f"{layer.macs:,.0f}",
                f"{layer.gate_macs:,.0f}",
                _format_rate(executed / layer.macs_dense if layer.macs_dense else None),
                _format_rate(layer.open_rate_g),
                _format_rate(layer.open_rate_p),
                "" if layer.dead_units is None else f"{layer.dead_units:,}",
            )
        return table


def _format_rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1%}"


class ComputeLedger(Metric):
    """Accumulates the MACs that a network executes, over batches and processes.

    Counts for hard gates are exact integers. Expected values are float32 fractions of the dense
    MACs. `update` reads the gates recorded in the last forward pass.

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
    macs: Tensor  # (layers,)
    expected: Tensor  # (layers,), fractions of the dense MACs
    gate_macs: Tensor  # (gates,)
    expected_gate: Tensor  # (gates,), fractions of the dense MACs
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
        """Add the last forward pass of `net`, which processed `samples` samples."""
        maps = linear_maps(net)
        gates = gate_layers(net, required=False)
        masks = [gate.gate for gate in gates.values() if gate.gate is not None]
        rows = {mask.shape[:-1].numel() for mask in masks if mask.ndim > 1}
        if len(rows) == 1:
            (samples,) = rows  # each position in a sequence counts as a sample
        self.samples += samples
        for index, linear_map in enumerate(maps):
            self.macs[index] += _total(executed_macs(linear_map), samples)
            self.expected[index] += _total(expected_macs(linear_map), samples)
        for index, (name, gate) in enumerate(gates.items()):
            if gate.gate is None or gate.probability is None:
                raise RuntimeError(f"Gate {name!r} did not run in the last forward pass.")
            self.gate_macs[index] += _total(decision_macs(gate, maps), samples)
            self.expected_gate[index] += _total(expected_decision_macs(gate, maps), samples)
            self.probability[index] += _total(gate.probability.mean(-1), samples)
            opened = _total((gate.gate != 0).long(), samples, item_ndim=1)
            setattr(self, f"opened_{index}", getattr(self, f"opened_{index}") + opened)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the accumulated sums, divided by the number of samples."""
        if not self.samples:
            raise RuntimeError("The ledger has no samples yet: call `update` after a forward pass.")
        states = {name: getattr(self, name) for name in self.names if name != "samples"}
        return {name: state.cpu().double() / self.samples.cpu() for name, state in states.items()}

    def report(self, net: nn.Module, whole: WholeNet | None = None) -> ComputeReport:
        """Return a report on all samples so far, reduced over all processes.

        Args:
            net: The network.
            whole: How often each linear layer runs per sample, and the MACs of other modules. If
                None, each layer counts as run once, and other modules are not counted.
        """
        counted = WholeNet() if whole is None else whole
        # Torchmetrics squeezes tensors with one element, so restore their axis.
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
                continue  # its MACs are in `other`
            layers.append(
                LayerCompute(
                    m.name,
                    macs_dense=round(m.macs_dense * runs),
                    macs=mean["macs"][index].item() * runs,
                    macs_expected=mean["expected"][index].item() * m.macs_dense * runs,
                    density=m.connections / m.macs_dense,
                    # Count a decision only once, with the first layer that the gate applies to.
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
    """Sum a value over samples, leaving its last `item_ndim` axes unchanged.

    A value without sample axes is the same for all samples. If the number of rows differs from the
    number of samples, for example after pooling a sequence, every sample counts as the mean row.
    """
    if value.ndim == item_ndim:
        return value * samples
    by_row = value.flatten(0, value.ndim - item_ndim - 1)
    total = by_row.sum(0)
    if len(by_row) == samples:
        return total
    rounding = None if value.is_floating_point() else "floor"
    return (total * samples).div(len(by_row), rounding_mode=rounding)
