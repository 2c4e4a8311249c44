"""SVG charts. Every mark carries its tooltip, which the page's script shows.

With the keyboard, Tab focuses a chart and the arrow keys move from mark to mark.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dg_lightning.monitoring.report.html import attribute, text

__all__ = ["Bar", "Point", "bar_chart", "line_chart", "scatter_chart"]

# Small, so that text stays legible when a whole chart is shown on a phone.
_WIDTH, _HEIGHT = 440, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 22, 10, 44
_NAME_WIDTH, _LABEL_WIDTH = 140, 76  # space for the names and labels of bars
_NUM_COLOURS = 10  # in style.css
_MAX_POINTS = 240  # per line


@dataclass(frozen=True)
class Point:
    """A point of a scatter plot: a circle, diamond or triangle in its series' colour."""

    series: str
    x: float
    y: float
    tip: str
    x_error: float = 0.0
    y_error: float = 0.0
    shape: str = "circle"


@dataclass(frozen=True)
class Bar:
    """A bar with its name, the label next to it, and its tooltip."""

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
    """Return lines over a common axis, with a legend that toggles them."""
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
    """Return points with error bars; both axes are in percent."""
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
    frame = _draw_axes(x_axis, y_axis, x_label, y_label)
    description = f"{title}: {len(points)} points; their values are in the table above"
    return _figure("points", title, description, frame + "".join(marks), names)


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


def bar_chart(title: str, bars: Sequence[Bar], x_label: str, percent: bool = False) -> str:
    """Return horizontal bars from zero, with error bars."""
    if not bars:
        return ""
    row, left, right = 24, _NAME_WIDTH, _WIDTH - _LABEL_WIDTH
    height = _TOP + row * len(bars) + _BOTTOM
    ends = [bar.value + bar.error for bar in bars]
    axis = _Axis.over([0.0, *ends], left, right, percent)
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
        parts.append(
            f'<text x="{left - 8}" y="{y + row / 2 + 4}" text-anchor="end">{text(name)}</text>'
            f'<g class="series c0"><rect x="{left}" y="{y + 4}" width="{max(0, end - left):.2f}" '
            f'height="{row - 8}"{attribute("data-tip", bar.tip)}/>{error}</g>'
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
