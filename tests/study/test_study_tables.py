"""Tables by hand."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from dg_lightning.study.report import study_page
from dg_lightning.study.tables import (
    paired_difference,
    summarised,
    summary_markdown,
    write_rows,
)


def row(variant: str, seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "variant": variant, "seed": seed, "status": "complete", "accuracy": accuracy,
        "macs": 100.0, "train_seconds": 2.0, "device": "cpu", **more,
    }  # fmt: skip


ROWS = [
    row("baseline", 0, 0.90),
    row("baseline", 1, 0.80),
    row("baseline", 2, 0.70),
    row("dynamicgate", 0, 0.92, macs_reduction=0.5),
    row("dynamicgate", 1, 0.80, macs_reduction=0.7),
    {"variant": "dynamicgate", "seed": 2, "status": "failed", "reason": "ValueError: <b> & no"},
]


def test_mean_and_spread_are_of_what_is_complete() -> None:
    baseline, gated = summarised(ROWS)
    assert baseline["accuracy_mean"] == pytest.approx(0.8)
    assert baseline["accuracy_std"] == pytest.approx(0.1)
    assert (gated["runs"], gated["failed"]) == (2, 1)
    assert gated["macs_reduction_mean"] == pytest.approx(0.6)


def test_a_lead_is_of_equal_seeds() -> None:
    found = paired_difference(ROWS, "dynamicgate")
    assert found is not None
    mean, error, seeds = found
    # Differences 0.02 and 0: mean 0.01, standard deviation 0.01414, over the root of 2.
    assert mean == pytest.approx(0.01)
    assert seeds == 2
    assert error == pytest.approx(0.02 / math.sqrt(2) / math.sqrt(2))
    assert paired_difference(ROWS, "baseline") is None
    assert paired_difference(ROWS, "rigl") is None


def test_results_have_the_promised_columns_and_leave_unknown_values_empty(tmp_path: Path) -> None:
    write_rows(tmp_path / "results.csv", [{**ROWS[0], "macro_f1": None, "own": 3}, ROWS[-1]])
    with (tmp_path / "results.csv").open() as file:
        first, second = csv.DictReader(file)
    promised = "dataset variant seed accuracy macro_f1 macs macs_dense macs_reduction gate_macs"
    promised += " relmac_paper params train_seconds epochs status"
    assert set(promised.split()) <= set(first)
    assert (first["accuracy"], first["macro_f1"], first["own"]) == ("0.9", "", "3")
    assert (second["status"], second["reason"]) == ("failed", "ValueError: <b> & no")
    assert list(tmp_path.iterdir()) == [tmp_path / "results.csv"]


def test_the_summary_stands_beside_the_paper() -> None:
    text = summary_markdown("mnist", ROWS, "Read this.")
    lines = text.splitlines()
    assert "Read this." in lines
    gated = [line for line in lines if line.startswith("| `dynamicgate`")]
    assert "| 2 (1 failed) | 86.00% ± 8.49 | +1.00 ± 1.00 |  | 98.07% |" in gated[0]
    assert "| 60.00% ± 14.14 |  |  | 21.71% | 1.26% |" in gated[1]
    assert any("straight-through estimator" in line for line in lines)
    assert "- dynamicgate, seed 2: ValueError: <b> & no" in lines


def test_the_page_escapes_what_comes_from_outside(tmp_path: Path) -> None:
    rows = [*ROWS, row("<script>alert(1)</script>", 0, 0.5, macs_reduction=0.1)]
    page = study_page(tmp_path, "mnist", rows, "a < b")
    assert page.count("<script>") == 1  # the page's own
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4  # tables, bars, Pareto, legend
    assert "ValueError: &lt;b&gt; &amp; no" in page
    assert "a &lt; b" in page
    assert page.count("<table>") == page.count("</table>") == 2


FORMULAS = ["=cmd|'/c calc'!A1", "+1+cmd", "-1+cmd", "@SUM(1)", "\t=1", "\r=1", "  =1", "=1\n=2"]
FORMULAS += ["＝1+1", "\ufeff=1", "\v=1"]


@pytest.mark.parametrize("text", FORMULAS)
def test_no_text_in_a_table_is_a_formula(text: str, tmp_path: Path) -> None:
    rows = [
        row("baseline", 0, -0.5, training=text, device=text, reason=text, own=-1e-5),
        row("baseline", 1, float("-inf"), **{text: 1}),
    ]
    write_rows(tmp_path / "results.csv", rows)
    with (tmp_path / "results.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    for cell in (cell for line in lines for cell in line if cell):
        assert cell.strip()[0] not in "=@+" or cell[0] in "'", cell
        if cell.strip()[0] == "-":
            float(cell)  # a number may be negative
    assert sum(text.strip() in cell for line in lines for cell in line) == 4
    numbers = [line[lines[0].index("accuracy")] for line in lines[1:]]
    assert numbers == ["-0.5", "-inf"]


def test_a_reason_does_not_break_the_summary() -> None:
    failed = {"variant": "rigl", "seed": 0, "status": "failed", "reason": "a\n# b\n| c | d |"}
    lines = summary_markdown("mnist", [*ROWS, failed]).splitlines()
    assert "# b" not in lines
    assert "| c | d |" not in lines
