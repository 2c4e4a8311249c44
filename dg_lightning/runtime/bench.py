"""Bench: what gates save on this machine, beside what their MACs let expect."""

import copy
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dg_lightning.compute import decision_macs, executed_macs, linear_maps
from dg_lightning.files import replacing
from dg_lightning.layers import GatedMLP
from dg_lightning.protocol import gate_layers
from dg_lightning.runtime.block_gated import BlockGatedMLP
from dg_lightning.runtime.choice import fastest_compact, without_gates
from dg_lightning.runtime.engines import forget_rooms
from dg_lightning.runtime.sparse import SparseLinear, with_fast_connections
from dg_lightning.runtime.timing import median_seconds, peak_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Row", "bench", "draw", "predicted_speed_up", "random_net", "save", "table"]


@dataclass(frozen=True)
class Row:
    """One way to run a net, at one batch size.

    Args:
        way: `dense` (the net without its gates), `masked`, `compact`, `blocks` or `sparse`.
        batch_size: Samples of a batch.
        milliseconds: Median time of a batch.
        speed_up: Dense time over this time.
        predicted: Dense MACs over executed MACs, those of the gates counted.
        peak_mb: Memory that a batch takes beside the weights.
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
        """Samples a second."""
        return self.batch_size / self.milliseconds * 1e3

    @property
    def realised(self) -> float:
        """The share of the predicted speed-up that is there."""
        return self.speed_up / self.predicted


def bench(
    net: GatedMLP, batch_sizes: Sequence[int], x: Tensor | None = None, rounds: int = 15
) -> tuple[list[Row], list[str]]:
    """Measure a net: dense, masked, compact, by blocks, and with sparse connections.

    Args:
        net: The net, on its device.
        batch_sizes: The sizes of batches.
        x: Inputs to take batches from; drawn at random where None. Which gates open depends on it.
        rounds: How often each is measured.

    Returns:
        A row for every way and size, and what was found on the way.
    """
    net = copy.deepcopy(net).eval()
    like = net.output.weight
    if x is None:
        x = torch.randn(max(batch_sizes), net.in_features, device=like.device, dtype=like.dtype)
    x = x.flatten(1).to(like.device, like.dtype)
    x = x.repeat(-(-max(batch_sizes) // len(x)), 1)  # as many as the largest batch has
    compacted = fastest_compact(net, batch_sizes)
    dense = without_gates(net)
    # As plain layers, as somebody would write it who knows of no gates.
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "dense": fastest_compact(_filled(dense), batch_sizes).net,
        "masked": net,
        "compact": compacted.net,
    }
    notes = list(compacted.notes)
    if any(gate.input_dependent for gate in gate_layers(net, required=False).values()):
        ways["blocks"] = BlockGatedMLP.of(net)
    sparse, found = with_fast_connections(compacted.net, batch_sizes)
    notes += found
    if any(isinstance(module, SparseLinear) for module in sparse):
        ways["sparse"] = sparse
    rows = []
    for size in batch_sizes:
        batch = x[:size]
        predicted = predicted_speed_up(net, batch)
        with torch.inference_mode():
            runs = {name: partial(way, batch) for name, way in ways.items()}
            taken = median_seconds(runs, like.device, rounds)
            for name, way in ways.items():
                forget_rooms()  # so that the memory of every way is counted
                peak = peak_bytes(partial(way, batch), like.device) / 2**20
                rows.append(
                    Row(
                        name,
                        size,
                        taken[name] * 1e3,
                        taken["dense"] / taken[name],
                        1.0 if name == "dense" else predicted,
                        peak,
                        _weight_bytes(way) / 2**20,
                    )
                )
    return rows, notes


@torch.inference_mode()
def predicted_speed_up(net: GatedMLP, x: Tensor) -> float:
    """Return the dense MACs over those that a batch executes, decisions included."""
    net(x)
    maps = linear_maps(net)
    needed = sum(float(executed_macs(m).double().mean()) for m in maps)
    gates = gate_layers(net, required=False).values()
    needed += sum(float(decision_macs(gate, maps).double().mean()) for gate in gates)
    return sum(m.macs_dense for m in maps) / max(needed, 1.0)


@torch.no_grad()
def _filled(net: GatedMLP) -> GatedMLP:
    """Give a net's missing connections some weight: nothing of it can be left out."""
    for parameter in net.parameters():
        if parameter.ndim == 2:
            parameter[parameter == 0] = 1e-3
    return net


def _weight_bytes(way: Callable[[Tensor], Tensor]) -> int:
    assert isinstance(way, nn.Module)
    return sum(map(_bytes, (*way.parameters(), *way.buffers())))


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
    """Make a net of that shape whose gates open that share of its blocks, at random.

    Args:
        widths: Inputs, hidden layers, outputs.
        open_rate: Share of the blocks that is open.
        dynamic: Whether each sample opens others.
        block_size: Units that share a gate.
        device: Where it is made.
        dtype: Its type.
    """
    if len(widths) < 3 or min(widths) < 1:
        raise ValueError(f"`shape` must be inputs, hidden widths and outputs, got {list(widths)}.")
    if not 0 < open_rate <= 1:
        raise ValueError(f"`open_rate` must be above 0 and at most 1, got {open_rate}.")
    kind: Any = {"kind": "dynamic" if dynamic else "static", "block_size": block_size}
    made: Any = {"device": device, "dtype": dtype}
    net = GatedMLP(widths[0], list(widths[1:-1]), widths[-1], gate=kind, **made)
    h = torch.randn(512, widths[0], **made)
    with torch.no_grad():
        for layer in net.eval().layers():
            gate: Any = layer.gate
            if dynamic:
                first = gate.network[0]
                first.weight.normal_(std=first.in_features**-0.5)
                logits = gate.logits(h)
                # The share of a batch of normal inputs that is to be open is above the edge.
                first.bias -= torch.quantile(logits.float().flatten()[:100_000], 1 - open_rate)
            else:
                count = max(round(open_rate * gate.blocks), 1)
                gate.logit.fill_(-1.0)
                gate.logit[torch.randperm(gate.blocks, device=device)[:count]] = 1.0
            h = layer(h)
    return net


def table(rows: Sequence[Row], title: str) -> "Table":
    """Return the rows for the terminal."""
    from rich import box
    from rich.table import Table

    found = Table(title=title, box=box.SIMPLE)
    # Short, so that a terminal of 80 columns shows all.
    for column in ("batch", "way", "ms", "per s", "gain", "by MACs", "realised", "MB"):
        found.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        found.add_row(
            f"{row.batch_size:,}",
            row.way,
            f"{row.milliseconds:.3f}",
            f"{row.per_second:,.0f}",
            f"{row.speed_up:.2f}",
            f"{row.predicted:.2f}",
            f"{row.realised:.0%}",
            f"{row.peak_mb + row.weights_mb:.1f}",
        )
    return found


def save(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as CSV."""
    names = ["way", "batch_size", "milliseconds", "per_second", "speed_up", "predicted", "realised"]
    names += ["peak_mb", "weights_mb"]
    with (
        replacing(path) as unfinished,
        unfinished.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw speed-up over batch size, and what the MACs predict."""
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
