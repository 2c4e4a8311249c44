"""Charts as SVG that the page's script makes speak: every mark carries what a hover shows.

A chart can be entered with the keyboard; arrow keys go from mark to mark.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dg_lightning.report.html import attribute, text

__all__ = ["Bar", "Point", "bar_chart", "line_chart", "scatter_chart"]

# Small, so that the text of a chart is still read when a phone shows all of it.
_WIDTH, _HEIGHT = 440, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 22, 10, 44
_NAMES, _LABELS = 140, 76  # room for the names of bars, and for what stands behind them
_COLOURS = 10  # in style.css
_MOST = 240  # points of a line


@dataclass(frozen=True)
class Point:
    """A point of a scatter plot: a circle, diamond or triangle in the colour of its series."""

    series: str
    x: float
    y: float
    tip: str
    x_error: float = 0.0
    y_error: float = 0.0
    shape: str = "circle"


@dataclass(frozen=True)
class Bar:
    """A bar with its name, what is written behind it, and what a hover shows."""

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
            room = abs(high) * 0.1 or 1.0
            low, high = low - room, high + room
        step = _step(high - low)
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        return cls(low, high, step, start, end, percent)

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> list[tuple[float, str]]:
        count = round((self.high - self.low) / self.step)
        values = [self.low + index * self.step for index in range(count + 1)]
        return [(self.at(value), self.written(value)) for value in values]

    def written(self, value: float) -> str:
        digits = len(f"{self.step:.9f}".rstrip("0").partition(".")[2])
        if self.percent:
            return f"{value:.{max(0, digits - 2)}%}"
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if self.high >= 10 * size:
                return f"{value / size:g}{unit}"
        return f"{value:.3g}" if digits > 4 else f"{value:,.{digits}f}"


def _step(span: float) -> float:
    """Return a round step, of which some four make the span."""
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
    """Return lines over a common axis, with a legend whose entries switch them on and off."""
    drawn = {name: line for name, points in series.items() if (line := _thinned(points))}
    if not drawn:
        return ""
    points = [point for line in drawn.values() for point in line]
    x_axis, y_axis = _axes([x for x, _ in points], [y for _, y in points], False, percent)
    marks = []
    for index, (name, line) in enumerate(drawn.items()):
        path = " ".join(f"{x_axis.at(x)},{y_axis.at(y)}" for x, y in line)
        dots = "".join(
            f'<circle cx="{x_axis.at(x)}" cy="{y_axis.at(y)}" r="3"'
            + attribute("data-tip", f"{name}: {_value(y, percent)} at {x_label} {x:g}")
            + "/>"
            for x, y in line
        )
        marks.append(f'<g{_series(index)}><polyline points="{path}"/>{dots}</g>')
    ends = "; ".join(
        f"{name} from {_value(line[0][1], percent)} to {_value(line[-1][1], percent)}"
        for name, line in drawn.items()
    )
    frame = _frame(x_axis, y_axis, x_label, y_label)
    return _chart("lines", title, f"{title}: {ends}", frame + "".join(marks), list(drawn))


def scatter_chart(title: str, points: Sequence[Point], x_label: str, y_label: str) -> str:
    """Return points with error bars, both axes in percent."""
    if not points:
        return ""
    xs = [v for p in points for v in (p.x - p.x_error, p.x + p.x_error)]
    ys = [v for p in points for v in (p.y - p.y_error, p.y + p.y_error)]
    x_axis, y_axis = _axes(xs, ys, True, True)
    names = list(dict.fromkeys(point.series for point in points))
    marks = []
    for index, name in enumerate(names):
        own = "".join(_mark(p, x_axis, y_axis) for p in points if p.series == name)
        marks.append(f"<g{_series(index)}>{own}</g>")
    frame = _frame(x_axis, y_axis, x_label, y_label)
    said = f"{title}: {len(points)} points; the table above has their values"
    return _chart("points", title, said, frame + "".join(marks), names)


def _mark(point: Point, x_axis: _Axis, y_axis: _Axis) -> str:
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
    row, left, right = 24, _NAMES, _WIDTH - _LABELS
    height = _TOP + row * len(bars) + _BOTTOM
    reach = [bar.value + bar.error for bar in bars]
    axis = _Axis.over([0.0, *reach], left, right, percent)
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
        shown = bar.name if len(bar.name) <= 19 else f"{bar.name[:18]}…"
        parts.append(
            f'<text x="{left - 8}" y="{y + row / 2 + 4}" text-anchor="end">{text(shown)}</text>'
            f'<g class="series c0"><rect x="{left}" y="{y + 4}" width="{max(0, end - left):.2f}" '
            f'height="{row - 8}"{attribute("data-tip", bar.tip)}/>{error}</g>'
            f'<text x="{max(end, axis.at(bar.value + bar.error)) + 6}" y="{y + row / 2 + 4}">'
            f"{text(bar.label)}</text>"
        )
    parts.append(
        f'<text x="{(left + right) / 2}" y="{height - 8}" text-anchor="middle">'
        f"{text(x_label)}</text>"
    )
    said = f"{title}: " + "; ".join(f"{bar.name} {bar.label}" for bar in bars)
    return _chart("bars", title, said, "".join(parts), [], height)


def _axes(
    xs: Sequence[float], ys: Sequence[float], x_percent: bool, y_percent: bool
) -> tuple[_Axis, _Axis]:
    return (
        _Axis.over(xs, _LEFT, _WIDTH - _RIGHT, x_percent),
        _Axis.over(ys, _HEIGHT - _BOTTOM, _TOP, y_percent),
    )


def _frame(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> str:
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


def _chart(
    kind: str, title: str, said: str, inner: str, names: Sequence[str], height: int = _HEIGHT
) -> str:
    keys = "".join(
        f'<button type="button" class="key{_colour(index)}" aria-pressed="true"'
        f' data-series="{index}">{text(name)}</button>'
        for index, name in enumerate(names)
    )
    legend = f'<div class="keys">{keys}</div>' if keys else ""
    return (
        f'<figure class="chart {kind}"><figcaption>{text(title)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" tabindex="0" role="img"'
        f"{attribute('aria-label', said)}>{inner}</svg>{legend}</figure>"
    )


def _series(index: int) -> str:
    return f' class="series{_colour(index)}" data-series="{index}"'


def _colour(index: int) -> str:
    return f" c{index % _COLOURS}"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    finite = [point for point in points if all(map(math.isfinite, point))]
    if not finite:
        return []
    kept = finite[:: math.ceil(len(finite) / _MOST)]
    return kept if kept[-1] == finite[-1] else [*kept, finite[-1]]


def _value(value: float, percent: bool) -> str:
    return f"{value:.2%}" if percent else f"{value:.4g}"
