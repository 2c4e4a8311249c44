"""Compute report: MACs per layer, totals, the paper's proxies, and a terminal table."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ComputeReport", "LayerCompute"]


@dataclass(frozen=True)
class LayerCompute:
    """Compute of one layer, averaged over samples."""

    name: str
    macs_dense: int = 0
    macs: float = 0.0
    macs_expected: float = 0.0
    gate_macs: float = 0.0
    gate_macs_expected: float = 0.0
    gate_macs_dense: int = 0
    open_rate_g: float | None = None
    open_rate_p: float | None = None
    dead_units: int | None = None  # units that no sample opened
    density: float = 1.0
    is_map: bool = True  # False: an input gate, which costs only its decision


@dataclass(frozen=True)
class ComputeReport:
    """Compute of a network: layers, totals and the paper's proxies."""

    layers: tuple[LayerCompute, ...]
    uncounted: tuple[str, ...] = ()  # modules whose MACs are not included
    other_macs: int = 0  # convolutions, attention etc., which gates do not reduce

    @property
    def macs_dense(self) -> int:
        """MACs of the network without gates."""
        return sum(layer.macs_dense for layer in self.layers) + self.other_macs

    @property
    def gate_macs(self) -> float:
        """MACs of all gate decisions, over their open inputs."""
        return sum(layer.gate_macs for layer in self.layers)

    @property
    def macs(self) -> float:
        """Executed MACs, including gate decisions."""
        return sum(layer.macs for layer in self.layers) + self.gate_macs + self.other_macs

    @property
    def macs_expected(self) -> float:
        """Expected MACs: `macs` with p instead of g."""
        expected = sum(layer.macs_expected + layer.gate_macs_expected for layer in self.layers)
        return expected + self.other_macs

    @property
    def macs_as_implemented(self) -> int:
        """MACs with plain masking, which multiplies by 0 and skips nothing."""
        return self.macs_dense + sum(layer.gate_macs_dense for layer in self.layers)

    def _hidden(self) -> list[LayerCompute]:
        # The paper sums over L - 1 layers, without output layer and input gate.
        return [layer for layer in self.layers if layer.is_map][:-1]

    def compute_proxy(self, kind: str) -> float:
        """Return the paper's ComputeProxy, the mean open rate of hidden layers (`p` or `g`)."""
        hidden = self._hidden()
        return sum(_rate(layer, kind) for layer in hidden) / len(hidden) if hidden else 1.0

    def relative_macs(self, kind: str, *, fused: bool = False) -> float:
        """Return the paper's RelMAC (`p` or `g`); RelMAC_fuse also counts connection density."""
        hidden = self._hidden()
        dense = sum(layer.macs_dense for layer in hidden)
        used = sum(
            layer.macs_dense * _rate(layer, kind) * (layer.density if fused else 1.0)
            for layer in hidden
        )
        return used / dense if dense else 1.0

    def metrics(self) -> dict[str, float]:
        """Return the metrics by their logged keys."""
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

        table = Table(title="Compute ledger: MACs a sample", box=box.SIMPLE, padding=(0, 1, 0, 0))
        if self.uncounted:
            table.caption = (
                f"Shares are of the linear maps alone; not counted: {', '.join(self.uncounted)}."
            )
        table.add_column("layer", no_wrap=True)
        for column in ("dense", "executed", "deciding", "of dense", "open g", "mean p", "dead"):
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
                _percent(executed / layer.macs_dense if layer.macs_dense else None),
                _percent(layer.open_rate_g),
                _percent(layer.open_rate_p),
                "" if layer.dead_units is None else f"{layer.dead_units:,}",
            )
        return table


def _rate(layer: LayerCompute, kind: str) -> float:
    rate = layer.open_rate_g if kind == "g" else layer.open_rate_p
    return 1.0 if rate is None else rate


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1%}"
