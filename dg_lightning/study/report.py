"""HTML reports on runs and studies, which also show the paper's results."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dg_lightning.monitoring.report import page, run_page, write_page
from dg_lightning.monitoring.report.charts import (
    Bar,
    Point,
    bar_chart,
    blocks,
    details,
    line_chart,
    prose,
    scatter_chart,
    section,
)
from dg_lightning.monitoring.report.page import is_run, read_run, run_part
from dg_lightning.monitoring.views import read_rows
from dg_lightning.study.tables import TEXTS, published, summarised, summary_markdown

Row = Mapping[str, Any]
_SHAPES = (
    "<p>Filled points are this study's results. Diamonds are the values in the paper's table. "
    "Triangles show the paper's accuracy at the MACs of its published script.</p>"
)


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write a report on a study or a run, and return its path.

    Args:
        folder: Folder of a study, of a run, or of several runs (the newest is reported).
        output: Path of the report; `report.html` in the folder if None.
    """
    if not folder.is_dir():
        raise ValueError(
            f"No folder found at {str(folder)!r}: pass the folder of a study or a run."
        )
    rows = read_rows(folder / "results.csv")
    is_study = bool(rows) and "variant" in rows[0]  # a search has a results.csv too
    content = _read_study_page(folder, rows) if is_study else run_page(folder)
    return write_page(folder, content, output)


def _read_study_page(folder: Path, cells: Sequence[Mapping[str, str]]) -> str:
    description = folder / "study.json"
    about = json.loads(description.read_text(encoding="utf-8")) if description.is_file() else {}
    rows = [
        {key: value if key in TEXTS else _parse_number(value) for key, value in row.items()}
        for row in cells
    ]
    name = about.get("table") or rows[0].get("dataset") or folder.name
    return study_page(folder, str(name), rows, about.get("notes"))


def study_page(
    folder: Path, name: str, rows: Sequence[Mapping[str, Any]], notes: str | None
) -> str:
    """Return the page of a study from its rows."""
    return page(name, study_part(folder, name, rows, notes))


def _parse_number(value: str) -> Any:
    """Convert a cell of results.csv back to its original type."""
    if value == "":
        return None
    try:
        return float(value) if any(mark in value for mark in ".en") else int(value)
    except ValueError:
        return value


def study_part(folder: Path, name: str, rows: Sequence[Row], notes: str | None) -> str:
    """Return a study's report as HTML.

    Args:
        folder: Folder of the study.
        name: Name of the published table.
        rows: One row per run.
        notes: Notes for the reader.
    """
    summaries = [summary for summary in summarised(rows) if summary["runs"]]
    points = _scatter_points(summaries, published(name)["rows"])
    charts = [
        bar_chart(
            "Test accuracy", _bars(summaries, "accuracy", ".2%"), "accuracy", True, dots=True
        ),
        bar_chart("Needed parameters", _bars(summaries, "params_needed", ",.0f"), "parameters"),
        bar_chart("FLOPs per sample", _bars(summaries, "flops", ",.0f"), "FLOPs"),
    ]
    return "\n".join(
        [
            section(
                "Accuracy against compute",
                scatter_chart(
                    "Test accuracy against reduction of MACs, ± standard deviation over seeds",
                    points,
                    "reduction of MACs",
                    "test accuracy",
                ),
                "<p>The dashed line joins the variants that no other one beats on both axes.</p>",
                _SHAPES if any(point.shape != "circle" for point in points) else "",
            ),
            section("Summary", _notes(notes), blocks(summary_markdown(name, rows))),
            section("Variants side by side", f'<div class="tiles">{"".join(charts)}</div>'),
            section("Training curves", _validation_curves(folder)),
            section("Runs", *_runs(folder, rows)),
        ]
    )


def _notes(notes: str | None) -> str:
    return prose(notes) if notes else ""


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


def _scatter_points(summaries: Sequence[Row], paper: Row) -> list[Point]:
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
        paper_accuracy = row.get("accuracy")
        for key, shape, who in (
            ("macs_reduction", "diamond", "the paper"),
            ("script_macs_reduction", "triangle", "its published script"),
        ):
            if paper_accuracy is not None and row.get(key) is not None:
                tip = f"{name}, {who}: {paper_accuracy:.2%} at {row[key]:.2%} fewer MACs"
                points.append(Point(name, row[key], paper_accuracy, tip, shape=shape))
    return points


def _validation_curves(folder: Path) -> str:
    """Return a chart of validation accuracy by epoch, averaged over the seeds of a variant."""
    accuracies: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_rows(folder / "epochs.csv"):
        if row.get("val/accuracy"):
            accuracies[row["variant"]][int(row["epoch"])].append(float(row["val/accuracy"]))
    lines = {
        variant: [(epoch, fmean(values)) for epoch, values in sorted(epochs.items())]
        for variant, epochs in accuracies.items()
    }
    title = "Validation accuracy, mean over seeds"
    return line_chart(title, lines, "epoch", "validation accuracy", percent=True)


def _runs(folder: Path, rows: Sequence[Row]) -> list[str]:
    """Return one run report for each variant, from its first complete seed."""
    first: dict[str, Any] = {}
    for row in rows:
        if row["status"] == "complete":
            first.setdefault(row["variant"], row["seed"])
    parts = []
    for variant, seed in first.items():
        run = folder / "runs" / variant / f"seed_{seed}"
        if is_run(run):  # otherwise, it was trained on another machine
            parts.append(details(f"{variant}, seed {seed}", run_part(read_run(run), level=3)))
    return parts
