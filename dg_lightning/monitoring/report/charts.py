"""HTML elements of a report: text, tables, charts and heat maps."""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor

from dg_lightning.monitoring.figures import as_image


def text(value: Any) -> str:
    """Return a value as escaped text.

    >>> text("<script>")
    '&lt;script&gt;'
    """
    return escape("" if value is None else str(value))


def prose(value: str) -> str:
    """Return a paragraph, with text between backticks as code.

    >>> prose("`a` < b")
    '<p><code>a</code> &lt; b</p>'
    """
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", text(value))
    return f"<p>{marked}</p>"


def attribute(name: str, value: Any) -> str:
    """Return an escaped attribute, with a leading space."""
    return f' {name}="{escape(str(value))}"'


def json_attribute(name: str, value: Any) -> str:
    """Return an attribute that contains a list or dict for the page's script."""
    return attribute(name, json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def table(columns: Sequence[Any], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Return a table that scrolls if it is too wide, with row headers in the first column."""
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{text(first)}</th>'
        + "".join(f"<td>{text(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    caption_tag = f"<caption>{text(caption)}</caption>" if caption else ""
    label = attribute("aria-label", caption or "Table")
    return (
        f'<div class="wide" tabindex="0" role="region"{label}><table>{caption_tag}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def section(title: str, *content: str, level: int = 2) -> str:
    """Return a section with a heading, or an empty string if it has no content."""
    inner = "\n".join(part for part in content if part)
    return f"<section><h{level}>{text(title)}</h{level}>\n{inner}\n</section>" if inner else ""


def details(summary: str, *content: str, opened: bool = False) -> str:
    """Return a collapsible block, or an empty string if it has no content."""
    inner = "\n".join(part for part in content if part)
    state = " open" if opened else ""
    return (
        f"<details{state}><summary>{text(summary)}</summary>\n{inner}\n</details>" if inner else ""
    )


def blocks(markdown: str) -> str:
    """Convert the Markdown summary of a study to HTML."""
    return "\n".join(_block(block) for block in markdown.strip().split("\n\n"))


def _block(block: str) -> str:
    lines = block.splitlines()
    if block.startswith("# "):
        return ""  # the page has its own title
    if block.startswith("| "):
        head, _, *body = [[cell.strip(" `") for cell in line[2:-2].split(" | ")] for line in lines]
        # Drop empty columns, such as the paper's results for a dataset that it does not use.
        kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in body)]
        return table([head[i] for i in kept], [[line[i] for i in kept] for line in body])
    if block.startswith("- "):
        return "<ul>" + "".join(f"<li>{text(line[2:])}</li>" for line in lines) + "</ul>"
    return prose(block)


# Small, so that text stays legible on a phone.
_WIDTH, _HEIGHT = 440, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 22, 10, 44
_NAME_WIDTH, _LABEL_WIDTH = 140, 76  # space for the names and labels of bars
_NUM_COLOURS = 10  # number of series colours in style.css
_MAX_POINTS = 240  # points per line


@dataclass(frozen=True)
class Point:
    """A point in a scatter plot: a circle, diamond or triangle in its series' colour."""

    series: str
    x: float
    y: float
    tip: str
    x_error: float = 0.0
    y_error: float = 0.0
    shape: str = "circle"


@dataclass(frozen=True)
class Bar:
    """A bar with a name, a label next to it, and a tooltip."""

    name: str
    value: float
    label: str
    tip: str
    error: float = 0.0


@dataclass(frozen=True)
class _Axis:
    """A linear scale with round ticks."""

    low: float
    high: float
    step: float
    start: float
    end: float
    percent: bool = False

    @classmethod
    def over(
        cls, values: Sequence[float], start: float, end: float, percent: bool = False
    ) -> "_Axis":
        low, high = min(values), max(values)
        if high - low < 1e-12:
            margin = abs(high) * 0.1 or 1.0
            low, high = low - margin, high + margin
        step = _round_step(high - low)
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        return cls(low, high, step, start, end, percent)

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> list[tuple[float, str]]:
        count = round((self.high - self.low) / self.step)
        values = [self.low + index * self.step for index in range(count + 1)]
        return [(self.at(value), self.format(value)) for value in values]

    def format(self, value: float) -> str:
        digits = len(f"{self.step:.9f}".rstrip("0").partition(".")[2])
        if self.percent:
            return f"{value:.{max(0, digits - 2)}%}"
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if self.high >= 10 * size:
                return f"{value / size:g}{unit}"
        return f"{value:.3g}" if digits > 4 else f"{value:,.{digits}f}"


def _round_step(span: float) -> float:
    """Return a round step that divides the span into about four parts."""
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def line_chart(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    percent: bool = False,
) -> str:
    """Return a line chart with a legend that toggles the lines."""
    lines = {name: line for name, points in series.items() if (line := _thin(points))}
    if not lines:
        return ""
    points = [point for line in lines.values() for point in line]
    x_axis, y_axis = _axes([x for x, _ in points], [y for _, y in points], False, percent)
    marks = []
    for index, (name, line) in enumerate(lines.items()):
        path = " ".join(f"{x_axis.at(x)},{y_axis.at(y)}" for x, y in line)
        dots = "".join(
            f'<circle cx="{x_axis.at(x)}" cy="{y_axis.at(y)}" r="3"'
            + attribute("data-tip", f"{name}: {_format_value(y, percent)} at {x_label} {x:g}")
            + "/>"
            for x, y in line
        )
        marks.append(f'<g{_series_attributes(index)}><polyline points="{path}"/>{dots}</g>')
    summary = "; ".join(
        f"{name} from {_format_value(line[0][1], percent)} to {_format_value(line[-1][1], percent)}"
        for name, line in lines.items()
    )
    frame = _draw_axes(x_axis, y_axis, x_label, y_label)
    return _figure("lines", title, f"{title}: {summary}", frame + "".join(marks), list(lines))


def scatter_chart(title: str, points: Sequence[Point], x_label: str, y_label: str) -> str:
    """Return a scatter chart with error bars and both axes in percent.

    A line joins the measured points that no other point beats on both axes.
    """
    if not points:
        return ""
    xs = [v for p in points for v in (p.x - p.x_error, p.x + p.x_error)]
    ys = [v for p in points for v in (p.y - p.y_error, p.y + p.y_error)]
    x_axis, y_axis = _axes(xs, ys, True, True)
    names = list(dict.fromkeys(point.series for point in points))
    marks = []
    for index, name in enumerate(names):
        group = "".join(_draw_point(p, x_axis, y_axis) for p in points if p.series == name)
        marks.append(f"<g{_series_attributes(index)}>{group}</g>")
    frame = _draw_axes(x_axis, y_axis, x_label, y_label) + _draw_frontier(points, x_axis, y_axis)
    description = f"{title}: {len(points)} points, whose values are in the study's table"
    return _figure("points", title, description, frame + "".join(marks), names)


def pareto_frontier(points: Sequence[Point]) -> list[Point]:
    """Return the measured points with no other one further right and higher, from left to right.

    >>> a, b, c = (Point("", x, y, "") for x, y in ((0.1, 0.9), (0.5, 0.8), (0.4, 0.7)))
    >>> pareto_frontier([a, b, c]) == [a, b]
    True
    """
    frontier: list[Point] = []
    measured = [point for point in points if point.shape == "circle"]
    for point in sorted(measured, key=lambda p: (p.x, p.y), reverse=True):
        if not frontier or point.y > frontier[-1].y:
            frontier.append(point)
    return frontier[::-1]


def _draw_frontier(points: Sequence[Point], x_axis: _Axis, y_axis: _Axis) -> str:
    at = " L".join(f"{x_axis.at(p.x)},{y_axis.at(p.y)}" for p in pareto_frontier(points))
    return f'<path class="frontier" d="M{at}"/>' if " L" in at else ""


def _draw_point(point: Point, x_axis: _Axis, y_axis: _Axis) -> str:
    x, y = x_axis.at(point.x), y_axis.at(point.y)
    bars = [
        f'<line class="error" x1="{x_axis.at(point.x - point.x_error)}" '
        f'x2="{x_axis.at(point.x + point.x_error)}" y1="{y}" y2="{y}"/>'
        if point.x_error
        else "",
        f'<line class="error" x1="{x}" x2="{x}" y1="{y_axis.at(point.y - point.y_error)}" '
        f'y2="{y_axis.at(point.y + point.y_error)}"/>'
        if point.y_error
        else "",
    ]
    tip = attribute("data-tip", point.tip)
    if point.shape == "diamond":
        body = f'<path class="hollow" d="M{x},{y - 8} l8,8 l-8,8 l-8,-8 z"{tip}/>'
    elif point.shape == "triangle":
        body = f'<path class="hollow" d="M{x},{y - 8} l8,14 h-16 z"{tip}/>'
    else:
        body = f'<circle cx="{x}" cy="{y}" r="6"{tip}/>'
    return "".join(bars) + body


def bar_chart(
    title: str, bars: Sequence[Bar], x_label: str, percent: bool = False, dots: bool = False
) -> str:
    """Return a chart of horizontal bars that start at zero, or of dots, with error bars.

    Dots show small differences, because their axis spans the values alone.
    """
    if not bars:
        return ""
    row, left, right = 24, _NAME_WIDTH, _WIDTH - _LABEL_WIDTH
    height = _TOP + row * len(bars) + _BOTTOM
    ends = [end for bar in bars for end in (bar.value - bar.error, bar.value + bar.error)]
    axis = _Axis.over(ends if dots else [0.0, *ends], left, right, percent)
    parts = [
        f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{height - _BOTTOM}"/>'
        f'<text x="{x}" y="{height - _BOTTOM + 16}" text-anchor="middle">{text(name)}</text>'
        for x, name in axis.ticks()
    ]
    for index, bar in enumerate(bars):
        y = _TOP + row * index
        end = axis.at(bar.value)
        error = (
            f'<line class="error" x1="{axis.at(bar.value - bar.error)}" '
            f'x2="{axis.at(bar.value + bar.error)}" y1="{y + row / 2}" y2="{y + row / 2}"/>'
            if bar.error
            else ""
        )
        name = bar.name if len(bar.name) <= 19 else f"{bar.name[:18]}…"
        tip = attribute("data-tip", bar.tip)
        size = f'width="{max(0, end - left):.2f}" height="{row - 8}"'
        mark = f'<rect x="{left}" y="{y + 4}" {size}{tip}/>'
        if dots:
            mark = f'<circle cx="{end}" cy="{y + row / 2}" r="5"{tip}/>'
        parts.append(
            f'<text x="{left - 8}" y="{y + row / 2 + 4}" text-anchor="end">{text(name)}</text>'
            f'<g class="series c0">{mark}{error}</g>'
            f'<text x="{max(end, axis.at(bar.value + bar.error)) + 6}" y="{y + row / 2 + 4}">'
            f"{text(bar.label)}</text>"
        )
    parts.append(
        f'<text x="{(left + right) / 2}" y="{height - 8}" text-anchor="middle">'
        f"{text(x_label)}</text>"
    )
    description = f"{title}: " + "; ".join(f"{bar.name} {bar.label}" for bar in bars)
    return _figure("bars", title, description, "".join(parts), [], height)


def _axes(
    xs: Sequence[float], ys: Sequence[float], x_percent: bool, y_percent: bool
) -> tuple[_Axis, _Axis]:
    return (
        _Axis.over(xs, _LEFT, _WIDTH - _RIGHT, x_percent),
        _Axis.over(ys, _HEIGHT - _BOTTOM, _TOP, y_percent),
    )


def _draw_axes(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> str:
    bottom, middle = _HEIGHT - _BOTTOM, (_LEFT + _WIDTH - _RIGHT) / 2
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{text(name)}</text>'
        for y, name in y_axis.ticks()
    ]
    parts += [
        f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>'
        f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{text(name)}</text>'
        for x, name in x_axis.ticks()
    ]
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{text(x_label)}</text>'
        f'<text transform="translate(13,{(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{text(y_label)}</text>"
    )
    return "".join(parts)


def _figure(
    kind: str, title: str, description: str, inner: str, names: Sequence[str], height: int = _HEIGHT
) -> str:
    keys = "".join(
        f'<button type="button" class="key{_colour_class(index)}" aria-pressed="true"'
        f' data-series="{index}">{text(name)}</button>'
        for index, name in enumerate(names)
    )
    legend = f'<div class="keys">{keys}</div>' if keys else ""
    return (
        f'<figure class="chart {kind}"><figcaption>{text(title)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" tabindex="0" role="img"'
        f"{attribute('aria-label', description)}>{inner}</svg>{legend}</figure>"
    )


def _series_attributes(index: int) -> str:
    return f' class="series{_colour_class(index)}" data-series="{index}"'


def _colour_class(index: int) -> str:
    return f" c{index % _NUM_COLOURS}"


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    finite = [point for point in points if all(map(math.isfinite, point))]
    if not finite:
        return []
    kept = finite[:: math.ceil(len(finite) / _MAX_POINTS)]
    return kept if kept[-1] == finite[-1] else [*kept, finite[-1]]


def _format_value(value: float, percent: bool) -> str:
    return f"{value:.2%}" if percent else f"{value:.4g}"


_MAX_ROWS = 512
_MISSING = 255  # byte for a missing value; shares use 0 to 250


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
        tooltips: Tooltip for each cell; the cell's share if None.
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
    label = f"{layer}: {first:.1%} of {len(units)} units open at first, {last:.1%} at the end"
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
    """Return maps of an input gate, laid out as the image that it gates, one per channel."""
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
    """Return the confusion matrix: rows are true classes, cells are shares of each class."""
    shares = counts.double() / counts.sum(1, keepdim=True)
    accuracy = counts.diagonal().sum() / counts.sum()
    label = (
        f"Confusion matrix of {int(counts.sum()):,} test samples, {accuracy:.2%} of them correct"
    )
    tooltips = [
        [f"{int(count):,} samples, {share:.1%}" for count, share in zip(*pair, strict=True)]
        for pair in zip(counts.tolist(), shares.tolist(), strict=True)
    ]
    return heat_map(
        "Confusion matrix of the test", shares.float(), names, names, "true class",
        "predicted class", label, square=True, tooltips=tooltips,
    )  # fmt: skip


def task_map(accuracies: Tensor) -> str:
    """Return a map of the accuracy on every task (columns) after learning each task (rows)."""
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
