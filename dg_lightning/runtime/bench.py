"""Benchmark: measured speed-up of gates, compared with the speed-up that MACs predict."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dg_lightning.compute.macs import decision_macs, executed_macs, linear_maps
from dg_lightning.files import replacing, write_csv
from dg_lightning.gates.protocol import gate_layers
from dg_lightning.layers.mlp import GatedMLP
from dg_lightning.runtime.block_gated import BlockGatedMLP
from dg_lightning.runtime.choice import fastest_compact, without_gates
from dg_lightning.runtime.engines import release_buffers
from dg_lightning.runtime.sparse import SparseLinear, with_fast_connections
from dg_lightning.runtime.timing import median_seconds, peak_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Row", "bench", "draw", "predicted_speed_up", "random_net", "save", "table"]


@dataclass(frozen=True)
class Row:
    """Measurement of one execution method at one batch size.

    Args:
        way: `dense` (the net without its gates), `masked`, `compact`, `blocks` or `sparse`.
        batch_size: Samples per batch.
        milliseconds: Median time per batch.
        speed_up: Dense time over this time.
        predicted: Dense MACs over executed MACs, including those of the gates.
        peak_mb: Peak memory of a batch, without the weights.
        weights_mb: Memory of the weights.
    """

    way: str
    batch_size: int
    milliseconds: float
    speed_up: float
    predicted: float
    peak_mb: float
    weights_mb: float

    @property
    def per_second(self) -> float:
        """Samples per second."""
        return self.batch_size / self.milliseconds * 1e3

    @property
    def realised(self) -> float:
        """Fraction of the predicted speed-up that is achieved."""
        return self.speed_up / self.predicted


def bench(
    net: GatedMLP, batch_sizes: Sequence[int], x: Tensor | None = None, rounds: int = 15
) -> tuple[list[Row], list[str]]:
    """Measure a net: dense, masked, compact, block-wise and with sparse connections.

    Args:
        net: The net, on its device.
        batch_sizes: The batch sizes to measure.
        x: Inputs to take batches from, random if None. They determine which gates open.
        rounds: Number of measurements of each method.

    Returns:
        A row for each method and batch size, and notes.
    """
    net = copy.deepcopy(net).eval()
    like = net.output.weight
    if x is None:
        x = torch.randn(max(batch_sizes), net.in_features, device=like.device, dtype=like.dtype)
    x = x.flatten(1).to(like.device, like.dtype)
    x = x.repeat(-(-max(batch_sizes) // len(x)), 1)  # at least one largest batch
    compacted = fastest_compact(net, batch_sizes)
    dense = without_gates(net)
    # The dense baseline consists of plain layers.
    methods: dict[str, Callable[[Tensor], Tensor]] = {
        "dense": fastest_compact(_fill_missing_connections(dense), batch_sizes).net,
        "masked": net,
        "compact": compacted.net,
    }
    notes = list(compacted.notes)
    if any(gate.input_dependent for gate in gate_layers(net, required=False).values()):
        methods["blocks"] = BlockGatedMLP.of(net)
    sparse, sparse_notes = with_fast_connections(compacted.net, batch_sizes)
    notes += sparse_notes
    if any(isinstance(module, SparseLinear) for module in sparse):
        methods["sparse"] = sparse
    rows = []
    for size in batch_sizes:
        batch = x[:size]
        predicted = predicted_speed_up(net, batch)
        with torch.inference_mode():
            runs = {name: partial(method, batch) for name, method in methods.items()}
            seconds = median_seconds(runs, like.device, rounds)
            for name, method in methods.items():
                release_buffers()  # so that every method's peak includes its buffers
                peak = peak_bytes(partial(method, batch), like.device) / 2**20
                rows.append(
                    Row(
                        name,
                        size,
                        seconds[name] * 1e3,
                        seconds["dense"] / seconds[name],
                        1.0 if name == "dense" else predicted,
                        peak,
                        _weight_bytes(method) / 2**20,
                    )
                )
    return rows, notes


@torch.inference_mode()
def predicted_speed_up(net: GatedMLP, x: Tensor) -> float:
    """Return the ratio of dense MACs to the MACs that a batch executes, gates included."""
    net(x)
    maps = linear_maps(net)
    needed = sum(float(executed_macs(m).double().mean()) for m in maps)
    gates = gate_layers(net, required=False).values()
    needed += sum(float(decision_macs(gate, maps).double().mean()) for gate in gates)
    return sum(m.macs_dense for m in maps) / max(needed, 1.0)


@torch.no_grad()
def _fill_missing_connections(net: GatedMLP) -> GatedMLP:
    # Nonzero weights everywhere, so that compaction cannot remove anything.
    for parameter in net.parameters():
        if parameter.ndim == 2:
            parameter[parameter == 0] = 1e-3
    return net


def _weight_bytes(net: Callable[[Tensor], Tensor]) -> int:
    assert isinstance(net, nn.Module)
    return sum(map(_bytes, (*net.parameters(), *net.buffers())))


def _bytes(tensor: Tensor) -> int:
    if tensor.layout == torch.strided:
        return tensor.numel() * tensor.element_size()
    parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return sum(map(_bytes, parts))


def random_net(
    widths: Sequence[int],
    open_rate: float,
    *,
    dynamic: bool,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> GatedMLP:
    """Create a net whose gates open a random subset of its blocks.

    Args:
        widths: Number of inputs, hidden widths, number of outputs.
        open_rate: Fraction of open blocks.
        dynamic: Whether the open blocks depend on the sample.
        block_size: Units that share a gate.
        device: Device of the net.
        dtype: Data type of the net.
    """
    if len(widths) < 3 or min(widths) < 1:
        raise ValueError(f"`shape` must be inputs, hidden widths and outputs, got {list(widths)}.")
    if not 0 < open_rate <= 1:
        raise ValueError(f"`open_rate` must be above 0 and at most 1, got {open_rate}.")
    gate_settings: Any = {"kind": "dynamic" if dynamic else "static", "block_size": block_size}
    options: Any = {"device": device, "dtype": dtype}
    net = GatedMLP(widths[0], list(widths[1:-1]), widths[-1], gate=gate_settings, **options)
    h = torch.randn(512, widths[0], **options)
    with torch.no_grad():
        for layer in net.eval().layers():
            gate: Any = layer.gate
            if dynamic:
                first = gate.network[0]
                first.weight.normal_(std=first.in_features**-0.5)
                logits = gate.logits(h)
                # Logits above this quantile of normal inputs are open.
                first.bias -= torch.quantile(logits.float().flatten()[:100_000], 1 - open_rate)
            else:
                count = max(round(open_rate * gate.blocks), 1)
                gate.logit.fill_(-1.0)
                gate.logit[torch.randperm(gate.blocks, device=device)[:count]] = 1.0
            h = layer(h)
    return net


def table(rows: Sequence[Row], title: str) -> "Table":
    """Return the rows as a table for the terminal."""
    from rich import box
    from rich.table import Table

    result = Table(title=title, box=box.SIMPLE)
    # Short headers, to fit into 80 columns.
    for column in ("batch", "way", "ms", "per s", "gain", "by MACs", "realised", "MB"):
        result.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        result.add_row(
            f"{row.batch_size:,}",
            row.way,
            f"{row.milliseconds:.3f}",
            f"{row.per_second:,.0f}",
            f"{row.speed_up:.2f}",
            f"{row.predicted:.2f}",
            f"{row.realised:.0%}",
            f"{row.peak_mb + row.weights_mb:.1f}",
        )
    return result


def save(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as CSV."""
    names = ["way", "batch_size", "milliseconds", "per_second", "speed_up", "predicted", "realised"]
    names += ["peak_mb", "weights_mb"]
    write_csv(path, [names, *([getattr(row, name) for name in names] for row in rows)])


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Plot measured and predicted speed-up over batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for way in dict.fromkeys(row.way for row in rows):
        chosen = [row for row in rows if row.way == way]
        sizes = [row.batch_size for row in chosen]
        axis.plot(sizes, [row.speed_up for row in chosen], marker="o", label=way)
    gated = {row.batch_size: row.predicted for row in rows if row.way == "compact"}
    axis.plot(list(gated), list(gated.values()), "k--", label="predicted by MACs")
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(gated), [f"{size:,}" for size in gated])
    axis.minorticks_off()
    axis.set_xlabel("batch size")
    axis.set_ylabel("times as fast as dense")
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=120, format=path.suffix.removeprefix("."))
