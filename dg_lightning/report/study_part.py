"""The part of a report that is about a study: our figures beside the paper's."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dg_lightning.dashboards.tables import read_rows
from dg_lightning.report.charts import Bar, Point, bar_chart, line_chart, scatter_chart
from dg_lightning.report.html import blocks, details, section, text
from dg_lightning.report.run import is_run, read_run
from dg_lightning.report.run_part import run_part
from dg_lightning.study.published import published
from dg_lightning.study.tables import summarised, summary_markdown

__all__ = ["study_part"]

Row = Mapping[str, Any]
_SHAPES = (
    "<p>Filled: ours. Diamonds: the paper's table. Triangles: the paper's accuracy at the MACs "
    "that its published script gives.</p>"
)


def study_part(folder: Path, name: str, rows: Sequence[Row], notes: str | None) -> str:
    """Return everything about a study.

    Args:
        folder: Where it is.
        name: Name of the published table.
        rows: A row a run.
        notes: What a reader should know.
    """
    summaries = [summary for summary in summarised(rows) if summary["runs"]]
    points = _pareto(summaries, published(name)["rows"])
    charts = [
        bar_chart("Test accuracy", _bars(summaries, "accuracy", ".2%"), "accuracy", percent=True),
        bar_chart(
            "Parameters that are needed", _bars(summaries, "params_needed", ",.0f"), "parameters"
        ),
        bar_chart("FLOPs a sample", _bars(summaries, "flops", ",.0f"), "FLOPs"),
    ]
    return "\n".join(
        [
            section("Summary", _notes(notes), blocks(summary_markdown(name, rows))),
            section(
                "Accuracy against compute",
                scatter_chart(
                    "Test accuracy against reduction of MACs, ± standard deviation over seeds",
                    points,
                    "reduction of MACs",
                    "test accuracy",
                ),
                _SHAPES if any(point.shape != "circle" for point in points) else "",
            ),
            section("Variants side by side", f'<div class="tiles">{"".join(charts)}</div>'),
            section("Course of the trainings", _course(folder)),
            section("Runs", *_runs(folder, rows)),
        ]
    )


def _notes(notes: str | None) -> str:
    return f"<p>{text(notes)}</p>" if notes else ""


def _bars(summaries: Sequence[Row], key: str, form: str) -> list[Bar]:
    bars = []
    for summary in summaries:
        mean, spread = summary.get(f"{key}_mean"), summary.get(f"{key}_std") or 0.0
        if mean is None:
            continue
        name, runs = summary["variant"], summary["runs"]
        tip = f"{name}: {mean:{form}} ± {spread:{form}} over {runs} runs"
        bars.append(Bar(name, mean, format(mean, form), tip, spread))
    return bars


def _pareto(summaries: Sequence[Row], paper: Row) -> list[Point]:
    points = []
    for summary in summaries:
        name = summary["variant"]
        accuracy, saved = summary.get("accuracy_mean"), summary.get("macs_reduction_mean")
        if accuracy is not None and saved is not None:
            errors = [summary.get(f"{key}_std") or 0.0 for key in ("accuracy", "macs_reduction")]
            tip = (
                f"{name}: {accuracy:.2%} ± {100 * errors[0]:.2f} at {saved:.2%} ± "
                f"{100 * errors[1]:.2f} fewer MACs, {summary['runs']} runs"
            )
            points.append(Point(name, saved, accuracy, tip, errors[1], errors[0]))
        row = paper.get(name, {})
        theirs = row.get("accuracy")
        for key, shape, who in (
            ("macs_reduction", "diamond", "the paper"),
            ("script_macs_reduction", "triangle", "its published script"),
        ):
            if theirs is not None and row.get(key) is not None:
                tip = f"{name}, {who}: {theirs:.2%} at {row[key]:.2%} fewer MACs"
                points.append(Point(name, row[key], theirs, tip, shape=shape))
    return points


def _course(folder: Path) -> str:
    """Return the validation accuracy by epoch, mean over the seeds of a variant."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_rows(folder / "epochs.csv"):
        if row.get("val/accuracy"):
            found[row["variant"]][int(row["epoch"])].append(float(row["val/accuracy"]))
    lines = {
        variant: [(epoch, fmean(values)) for epoch, values in sorted(epochs.items())]
        for variant, epochs in found.items()
    }
    title = "Validation accuracy, mean over seeds"
    return line_chart(title, lines, "epoch", "validation accuracy", percent=True)


def _runs(folder: Path, rows: Sequence[Row]) -> list[str]:
    """Return one run of every variant: the first seed that is complete."""
    first: dict[str, Any] = {}
    for row in rows:
        if row["status"] == "complete":
            first.setdefault(row["variant"], row["seed"])
    parts = []
    for variant, seed in first.items():
        place = folder / "runs" / variant / f"seed_{seed}"
        if is_run(place):  # else trained on another machine
            parts.append(details(f"{variant}, seed {seed}", run_part(read_run(place), level=3)))
    return parts
