"""Gate figures, drawn with matplotlib."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dg_lightning.monitoring.activity import BINS, GateSnapshot, HistoryEntry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MAX_FEATURES = 25
_COLOURS = "viridis"


def has_matplotlib() -> bool:
    """Return True if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def gate_figure(
    gate: GateSnapshot,
    history: Sequence[HistoryEntry],
    input_shape: Sequence[int] | None = None,
    feature_names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
) -> "Figure":
    """Draw one gate: its units over time and by class, its inputs, and the histogram of p.

    Args:
        gate: Current snapshot of the gate.
        history: Earlier snapshots, with the current one last.
        input_shape: Shape of a sample, to draw an input gate as the image that it gates.
        feature_names: Names of the inputs, to draw an input gate as a list.
        class_names: Names of the classes.
    """
    from matplotlib.figure import Figure

    panels = ["time", "histogram"]
    if gate.by_class is not None:
        panels.insert(1, "class")
    image = as_image(gate.g, input_shape)
    if image is not None:
        panels.insert(0, "image")
    elif feature_names is not None and len(feature_names) == len(gate.g):
        panels.insert(0, "names")
    # W&B requires all images under one key to have the same size.
    figure = Figure(figsize=(12.0, 3.6), layout="constrained", dpi=100)
    axes = dict(zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True))
    _draw_time(axes["time"], gate.layer, history)
    _draw_histogram(axes["histogram"], gate)
    if "class" in axes:
        _draw_classes(axes["class"], gate, class_names)
    if image is not None:
        axes["image"].imshow(image.numpy(), cmap=_COLOURS, vmin=0, vmax=1)
        axes["image"].set(title="open rate, as the input", xticks=[], yticks=[])
    if "names" in axes:
        _draw_names(axes["names"], gate, feature_names or [])
    rate = gate.g.mean().item()
    title = f"{gate.layer}: {rate:.1%} open, {gate.dead_units:,} units closed for all samples"
    figure.suptitle(title, fontsize=10)
    return figure


def as_image(values: Tensor, input_shape: Sequence[int] | None) -> Tensor | None:
    """Reshape the values of an input gate to the image it gates: (rows, columns) or (..., 3).

    >>> as_image(torch.zeros(784), (1, 28, 28)).shape
    torch.Size([28, 28])
    """
    shape = tuple(input_shape or ())
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(values) != torch.Size(shape).numel():
        return None
    if len(shape) == 2:
        return values.reshape(shape)
    if len(shape) == 3 and shape[0] == 3:
        return values.reshape(shape).permute(1, 2, 0)
    return None


def render_rgb(figure: "Figure") -> Any:
    """Render a figure as a uint8 array (rows, columns, 3)."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _draw_time(axis: Any, layer: str, history: Sequence[HistoryEntry]) -> None:
    rows = torch.stack([entry.g[layer] for entry in history], -1)  # (blocks, entries)
    # Sort by open rate, because the position of a unit has no meaning.
    order = rows.mean(-1).argsort(descending=True, stable=True)
    axis.imshow(
        rows[order].numpy(), cmap=_COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
    )
    places = sorted({0, len(history) // 2, len(history) - 1})
    axis.set_xticks(places, [str(history[place].epoch) for place in places])
    axis.set(
        title="share of samples that open a unit", xlabel="epoch", ylabel="unit, most open first"
    )


def _draw_classes(axis: Any, gate: GateSnapshot, class_names: Sequence[str] | None) -> None:
    by_class = gate.by_class
    assert by_class is not None
    order = gate.g.argsort(descending=True, stable=True)
    axis.imshow(
        by_class[:, order].T.numpy(),
        cmap=_COLOURS,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    classes = len(by_class)
    if classes <= 20:
        names = class_names if class_names and len(class_names) == classes else range(classes)
        axis.set_xticks(range(classes), [str(name) for name in names], rotation=90, fontsize=7)
    axis.set(title="share by class", xlabel="class", ylabel="unit, most open first")


def _draw_histogram(axis: Any, gate: GateSnapshot) -> None:
    axis.bar([(i + 0.5) / BINS for i in range(BINS)], gate.histogram.tolist(), width=0.9 / BINS)
    axis.axvline(gate.threshold, color="tab:red", label=f"θ = {gate.threshold:.3g}")
    axis.set(title=f"p, with τ = {gate.temperature:.3g}", xlabel="p", ylabel="share", xlim=(0, 1))
    axis.legend(fontsize=8)


def _draw_names(axis: Any, gate: GateSnapshot, names: Sequence[str]) -> None:
    order = (gate.g * 2 + gate.p).argsort(descending=True, stable=True)[:_MAX_FEATURES].tolist()
    axis.barh(range(len(order)), gate.p[order].tolist(), color="tab:blue")
    axis.set_yticks(range(len(order)), [names[index] for index in order], fontsize=6)
    axis.invert_yaxis()
    axis.set(title="inputs, most open first", xlabel="p", xlim=(0, 1))
