"""Heat maps: a canvas that the page's script draws from bytes, so that a hover can read them."""

import base64
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dg_lightning.dashboards.figures import as_image
from dg_lightning.report.html import attribute, json_attribute, text

__all__ = ["class_map", "confusion_map", "input_maps", "time_map"]

_MOST_ROWS = 512
_UNSEEN = 255  # 0 to 250 are shares


def heat_map(
    title: str,
    values: Tensor,
    row_names: Sequence[str],
    column_names: Sequence[str],
    row_label: str,
    column_label: str,
    said: str,
    *,
    square: bool = False,
    shown: Sequence[Sequence[str]] | None = None,
) -> str:
    """Return a map of shares between 0 and 1 (rows, columns); NaN is drawn as unseen.

    Args:
        title: What stands over it.
        values: The shares.
        row_names: Name of each row.
        column_names: Name of each column.
        row_label: What a row is.
        column_label: What a column is.
        said: What a screen reader says.
        square: Whether cells are square, as of an image.
        shown: What a hover shows of each cell, if not its share.
    """
    cells = torch.where(values.isnan(), _UNSEEN, (values.clamp(0, 1) * 250).round().nan_to_num())
    raw = base64.b64encode(bytes(cells.to(torch.uint8).flatten().tolist())).decode()
    rows, columns = values.shape
    kind = "map square" if square else "map"
    more = "" if shown is None else json_attribute("data-shown", shown)
    return (
        f'<figure class="{kind}"><figcaption>{text(title)}</figcaption>'
        f'<canvas tabindex="0" role="img" width="{columns}" height="{rows}"'
        + attribute("aria-label", said)
        + attribute("data-values", raw)
        + json_attribute("data-rows", list(row_names))
        + json_attribute("data-columns", list(column_names))
        + attribute("data-row-label", row_label)
        + attribute("data-column-label", column_label)
        + f'{more}></canvas><p class="axes">{text(column_label)} →, {text(row_label)} ↓</p>'
        "</figure>"
    )


def time_map(layer: str, units: Tensor, epochs: Sequence[int]) -> str:
    """Return each unit over time (units, looks), the most open first."""
    order = units.mean(1).argsort(descending=True, stable=True)
    rows, names = _grouped(units[order], [str(index) for index in order.tolist()])
    first, last = units[:, 0].mean().item(), units[:, -1].mean().item()
    said = f"{layer}: of {len(units)} units {first:.1%} open at first, {last:.1%} at the end"
    return heat_map(
        "Units over time", rows, names, [str(epoch) for epoch in epochs], "unit", "epoch", said
    )


def class_map(layer: str, shares: Tensor, class_names: Sequence[str]) -> str:
    """Return which units open for which class (classes, units), the most open first."""
    order = shares.nanmean(0).argsort(descending=True, stable=True)
    rows, names = _grouped(shares.T[order], [str(index) for index in order.tolist()])
    seen = shares[~shares.isnan().any(1)]
    spread = seen.std(0, correction=0).max().item() if len(seen) else 0.0
    said = f"{layer}: share of each class that opens a unit; largest spread of a unit {spread:.2f}"
    return heat_map("Units by class", rows, names, class_names, "unit", "class", said)


def input_maps(layer: str, units: Tensor, shape: Sequence[int]) -> list[str]:
    """Return an input gate as the image that it gates: a map a channel."""
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
        said = f"{layer}, {title.lower()}: {plane.mean().item():.1%} of the inputs open"
        maps.append(heat_map(title, plane, rows, columns, "row", "column", said, square=True))
    return maps


def confusion_map(names: Sequence[str], counts: Tensor) -> str:
    """Return the confusion matrix: rows are true classes, shown as shares of their samples."""
    shares = counts.double() / counts.sum(1, keepdim=True)
    right = counts.diagonal().sum() / counts.sum()
    said = f"Confusion matrix of {int(counts.sum()):,} test samples, {right:.2%} of them right"
    shown = [
        [f"{int(count):,} samples, {share:.1%}" for count, share in zip(*pair, strict=True)]
        for pair in zip(counts.tolist(), shares.tolist(), strict=True)
    ]
    return heat_map(
        "Confusion matrix of the test", shares.float(), names, names, "true class",
        "predicted class", said, square=True, shown=shown,
    )  # fmt: skip


def _grouped(rows: Tensor, names: Sequence[str]) -> tuple[Tensor, list[str]]:
    """Join neighbouring rows where there are too many for a page."""
    size = math.ceil(len(rows) / _MOST_ROWS)
    if size == 1:
        return rows, list(names)
    parts = [slice(start, start + size) for start in range(0, len(rows), size)]
    joined = torch.stack([rows[part].nanmean(0) for part in parts])
    return joined, [f"{len(names[p])} units, {', '.join(names[p][:4])}, …" for p in parts]
