"""Charts and maps by hand: where marks lie, and what they say."""

import base64
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dg_lightning.monitoring.report.charts import (
    Bar,
    Point,
    _Axis,
    bar_chart,
    class_map,
    confusion_map,
    input_maps,
    line_chart,
    scatter_chart,
    time_map,
)


@given(st.lists(st.floats(-1e7, 1e7, allow_nan=False), min_size=1, max_size=20), st.booleans())
def test_an_axis_holds_all_values_between_few_ticks(values: list[float], percent: bool) -> None:
    axis = _Axis.over(values, 10, 110, percent)
    for value in values:
        assert 9.9 <= axis.at(value) <= 110.1
    ticks = axis.ticks()
    assert 3 <= len(ticks) <= 8
    assert ticks[0][0] == pytest.approx(10)
    assert ticks[-1][0] == pytest.approx(110)


def test_ticks_are_round_and_told_apart() -> None:
    names = [name for _, name in _Axis.over([0.913, 0.967], 0, 100, percent=True).ticks()]
    assert names == ["90%", "92%", "94%", "96%", "98%"]
    names = [name for _, name in _Axis.over([0, 101_000], 0, 100).ticks()]
    assert names == ["0k", "50k", "100k", "150k"]
    names = [name for _, name in _Axis.over([0, 10], 0, 100).ticks()]
    assert names == ["0.0", "2.5", "5.0", "7.5", "10.0"]
    names = [name for _, name in _Axis.over([0.0, 0.004], 0, 100).ticks()]
    assert names == ["0.000", "0.001", "0.002", "0.003", "0.004"]


def test_a_line_chart_draws_points_where_they_belong() -> None:
    chart = line_chart("t", {"a": [(0, 0.0), (10, 1.0)], "b": [(0, 0.5)], "none": []}, "x", "y")
    places = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', chart)
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, place)) for place in places]
    assert x0 == x2
    assert y1 == pytest.approx(10)  # the top
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.02)
    assert x1 > x0
    assert 'data-tip="a: 1 at x 10"' in chart
    assert chart.count('class="key c') == 2  # what has no point has no key


def test_a_line_of_many_points_keeps_its_end_and_leaves_out_what_is_not_finite() -> None:
    points = [(float(step), float("nan") if step == 5 else 1.0) for step in range(5000)]
    chart = line_chart("t", {"a": points}, "x", "y")
    assert chart.count("<circle") <= 242
    assert "at x 4999" in chart
    assert "nan" not in chart


def test_nothing_to_draw_is_nothing() -> None:
    assert line_chart("t", {}, "x", "y") == ""
    assert bar_chart("t", [], "x") == ""
    assert scatter_chart("t", [], "x", "y") == ""


def test_error_bars_reach_one_standard_deviation_to_both_sides() -> None:
    points = [Point("a", 0.5, 0.5, "tip", x_error=0.25, y_error=0.1), Point("b", 0, 0, "o"),
              Point("c", 1, 1, "i")]  # fmt: skip
    chart = scatter_chart("t", points, "x", "y")
    first = re.search(r'<line class="error" x1="([\d.]+)" x2="([\d.]+)"', chart)
    circle = re.search(r'<circle cx="([\d.]+)"', chart)
    assert first is not None
    assert circle is not None
    left, right, middle = float(first[1]), float(first[2]), float(circle[1])
    assert middle == pytest.approx((left + right) / 2, abs=0.02)
    assert (right - left) / (440 - 22 - 66) == pytest.approx(0.5, abs=0.01)


def test_bars_begin_at_zero_and_are_as_long_as_their_values() -> None:
    chart = bar_chart("t", [Bar("a", 10, "ten", "a: 10"), Bar("b", 5, "five", "b: 5")], "x")
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.03)


def test_dots_show_small_differences() -> None:
    bars = [Bar("a", 0.97, "97%", "a: 97%", 0.001), Bar("b", 0.98, "98%", "b: 98%")]
    chart = bar_chart("t", bars, "x", percent=True, dots=True)
    low, high = [float(place) for place in re.findall(r'<circle cx="([\d.]+)"', chart)]
    assert high - low > 100  # of 224 units of the axis
    assert "<rect" not in chart


def bytes_of(chart: str) -> list[int]:
    found = re.search(r'data-values="([^"]*)"', chart)
    assert found is not None
    return list(base64.b64decode(found[1]))


def test_a_map_over_time_has_the_most_open_unit_first() -> None:
    chart = time_map("gate", torch.tensor([[0.0, 0.0], [1.0, 0.5]]), [0, 3])
    assert bytes_of(chart) == [250, 125, 0, 0]
    assert 'data-rows="[&quot;1&quot;,&quot;0&quot;]"' in chart
    assert "gate: 50.0% of 2 units open at first, 25.0% at the end" in chart


def test_classes_without_samples_are_drawn_as_unseen() -> None:
    shares = torch.tensor([[1.0, 0.0], [float("nan")] * 2])
    assert bytes_of(class_map("gate", shares, ["a", "b"])) == [250, 255, 0, 255]


def test_many_units_are_joined_in_groups() -> None:
    chart = time_map("gate", torch.cat([torch.ones(1500, 1), torch.zeros(1500, 1)]), [0])
    drawn = bytes_of(chart)
    assert len(drawn) == 500
    assert drawn[:250] == [250] * 250
    assert "6 units, 0, 1, 2, 3, …" in chart


def test_an_input_gate_is_drawn_as_its_image_or_as_one_a_colour() -> None:
    assert len(input_maps("g", torch.zeros(784), [1, 28, 28])) == 1
    maps = input_maps("g", torch.arange(12) / 12, [3, 2, 2])
    assert [bytes_of(chart)[0] for chart in maps] == [0, 83, 167]
    assert input_maps("g", torch.zeros(10), [2000]) == []


def test_a_confusion_matrix_shows_counts_and_shares_of_true_classes() -> None:
    chart = confusion_map(["cat", "dog"], torch.tensor([[3.0, 1.0], [0.0, 0.0]]))
    assert bytes_of(chart) == [188, 62, 255, 255]
    assert "3 samples, 75.0%" in chart
    assert "4 test samples, 75.00% of them correct" in chart
