"""Heat maps: canvases that the page's script draws from bytes, with tooltips."""

import base64
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dg_lightning.monitoring.figures import as_image
from dg_lightning.monitoring.report.html import attribute, json_attribute, text

__all__ = ["class_map", "confusion_map", "input_maps", "task_map", "time_map"]

_MAX_ROWS = 512
_MISSING = 255  # shares are 0 to 250


def heat_map(
    title: str,
    values: Tensor,
    row_names: Sequence[str],
    column_names: Sequence[str],
    row_label: str,
    column_label: str,
    label: str,
    *,
    square: bool = False,
    tooltips: Sequence[Sequence[str]] | None = None,
) -> str:
    """Return a heat map of shares between 0 and 1; NaN is drawn as missing.

    Args:
        title: Caption.
        values: Shares (rows, columns).
        row_names: Name of each row.
        column_names: Name of each column.
        row_label: Label of the row axis.
        column_label: Label of the column axis.
        label: Description for screen readers.
        square: Whether cells are square, as in an image.
        tooltips: Tooltip of each cell; its share if None.
    """
    cells = torch.where(values.isnan(), _MISSING, (values.clamp(0, 1) * 250).round().nan_to_num())
    raw = base64.b64encode(bytes(cells.to(torch.uint8).flatten().tolist())).decode()
    rows, columns = values.shape
    kind = "map square" if square else "map"
    extra = "" if tooltips is None else json_attribute("data-shown", tooltips)
    return (
        f'<figure class="{kind}"><figcaption>{text(title)}</figcaption>'
        f'<canvas tabindex="0" role="img" width="{columns}" height="{rows}"'
        + attribute("aria-label", label)
        + attribute("data-values", raw)
        + json_attribute("data-rows", list(row_names))
        + json_attribute("data-columns", list(column_names))
        + attribute("data-row-label", row_label)
        + attribute("data-column-label", column_label)
        + f'{extra}></canvas><p class="axes">{text(column_label)} →, {text(row_label)} ↓</p>'
        "</figure>"
    )


def time_map(layer: str, units: Tensor, epochs: Sequence[int]) -> str:
    """Return a map of units over time (units, snapshots), most open first."""
    order = units.mean(1).argsort(descending=True, stable=True)
    rows, names = _group_rows(units[order], [str(index) for index in order.tolist()])
    first, last = units[:, 0].mean().item(), units[:, -1].mean().item()
    label = f"{layer}: of {len(units)} units {first:.1%} open at first, {last:.1%} at the end"
    return heat_map(
        "Units over time", rows, names, [str(epoch) for epoch in epochs], "unit", "epoch", label
    )


def class_map(layer: str, shares: Tensor, class_names: Sequence[str]) -> str:
    """Return a map of open rates by class (classes, units), most open units first."""
    order = shares.nanmean(0).argsort(descending=True, stable=True)
    rows, names = _group_rows(shares.T[order], [str(index) for index in order.tolist()])
    complete = shares[~shares.isnan().any(1)]
    spread = complete.std(0, correction=0).max().item() if len(complete) else 0.0
    label = f"{layer}: share of each class that opens a unit; largest spread {spread:.2f}"
    return heat_map("Units by class", rows, names, class_names, "unit", "class", label)


def input_maps(layer: str, units: Tensor, shape: Sequence[int]) -> list[str]:
    """Return an input gate as the image that it gates, one map per channel."""
    image = as_image(units, shape)
    if image is None:
        return []
    if image.ndim == 2:
        planes = {"As the input": image}
    else:
        planes = {
            f"As the input, {colour}": image[..., index]
            for index, colour in enumerate(("red", "green", "blue"))
        }
    maps = []
    for title, plane in planes.items():
        rows, columns = ([str(index) for index in range(size)] for size in plane.shape)
        label = f"{layer}, {title.lower()}: {plane.mean().item():.1%} of the inputs open"
        maps.append(heat_map(title, plane, rows, columns, "row", "column", label, square=True))
    return maps


def confusion_map(names: Sequence[str], counts: Tensor) -> str:
    """Return the confusion matrix; rows are true classes, cells are shares of their samples."""
    shares = counts.double() / counts.sum(1, keepdim=True)
    accuracy = counts.diagonal().sum() / counts.sum()
    label = f"Confusion matrix of {int(counts.sum()):,} test samples, {accuracy:.2%} of them right"
    tooltips = [
        [f"{int(count):,} samples, {share:.1%}" for count, share in zip(*pair, strict=True)]
        for pair in zip(counts.tolist(), shares.tolist(), strict=True)
    ]
    return heat_map(
        "Confusion matrix of the test", shares.float(), names, names, "true class",
        "predicted class", label, square=True, tooltips=tooltips,
    )  # fmt: skip


def task_map(accuracies: Tensor) -> str:
    """Return a map of the accuracy on every task (columns) after learning each (rows)."""
    names = [str(task) for task in range(len(accuracies))]
    last = accuracies[~accuracies.isnan().all(1)][-1:].nanmean()
    label = f"Accuracy on {len(names)} tasks after learning each; at the end {last:.2%} on average"
    return heat_map(
        "Accuracy on every task, after learning each", accuracies, names, names,
        "task just learned", "task", label, square=True,
    )  # fmt: skip


def _group_rows(rows: Tensor, names: Sequence[str]) -> tuple[Tensor, list[str]]:
    """Average neighbouring rows if there are too many for a page."""
    size = math.ceil(len(rows) / _MAX_ROWS)
    if size == 1:
        return rows, list(names)
    parts = [slice(start, start + size) for start in range(0, len(rows), size)]
    means = torch.stack([rows[part].nanmean(0) for part in parts])
    return means, [f"{len(names[p])} units, {', '.join(names[p][:4])}, …" for p in parts]
