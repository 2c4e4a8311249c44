"""HTML report on a run, as a single page."""

import json
import re
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from dg_lightning.files import write_text
from dg_lightning.monitoring.report.charts import (
    Bar,
    bar_chart,
    class_map,
    confusion_map,
    details,
    input_maps,
    line_chart,
    section,
    table,
    task_map,
    text,
    time_map,
)
from dg_lightning.monitoring.views import read_lines, read_rows


@dataclass(frozen=True)
class UnitHistory:
    """One gate's units over the snapshots of a run."""

    epochs: list[int]
    g: Tensor  # (units, snapshots), share of samples that open a unit
    p: Tensor  # (units,), mean probability in the last snapshot


@dataclass(frozen=True)
class GateInput:
    """Sample shape and feature names of an input gate."""

    shape: list[int]
    features: list[str]


@dataclass
class RunRecord:
    """A run's logged metrics, gate activity and setup."""

    metrics: list[dict[str, float]]  # one row per logged step
    test: dict[str, float]
    layers: list[dict[str, str]]  # layers.csv
    units: dict[str, UnitHistory]
    classes: dict[str, tuple[list[str], Tensor]]  # layer -> class names, shares (classes, units)
    positions: dict[str, list[tuple[float, float]]]  # layer -> (position, share open there)
    histograms: dict[str, list[tuple[float, float]]]  # layer -> last histogram: (lower edge, share)
    inputs: dict[str, GateInput]
    confusion: tuple[list[str], Tensor] | None
    compute: list[dict[str, str]]
    verdicts: list[dict[str, str]]
    watched: set[str] | None  # gates that were watched for collapse; None if not recorded
    tasks: Tensor | None = None  # accuracy on each task (columns) after learning each (rows)
    config: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    title: str = ""
    finished: datetime | None = None

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs for a logged key."""
        return [(row["step"], row[key]) for row in self.metrics if key in row]

    def keys(self, *prefixes: str) -> list[str]:
        """Return the logged keys with one of these prefixes, in order of appearance."""
        keys = dict.fromkeys(key for row in self.metrics for key in row)
        return [key for key in keys if key.startswith(prefixes)]


def is_run(folder: Path) -> bool:
    """Return True if the folder contains the files of a run."""
    return any((folder / name).exists() for name in ("metrics.csv", "gates", "config.yaml"))


def read_run(folder: Path) -> RunRecord:
    """Read a run and, for a training run, the newest test of its checkpoint."""
    tested = folder if (folder / "confusion.csv").exists() else _find_test(folder) or folder
    gates = folder / "gates"
    times = [path.stat().st_mtime for path in _output_paths(folder) if path.is_file()]
    if not gates.is_dir():  # a test without training
        gates = next((path for path in sorted(folder.glob("gates_*")) if path.is_dir()), gates)
    return RunRecord(
        metrics=[row for row in _read_numbers(folder / "metrics.csv") if not _is_test_row(row)],
        test=_test_metrics(_read_numbers(tested / "metrics.csv")),
        layers=read_rows(gates / "layers.csv"),
        units=_read_units(gates / "units.csv"),
        classes=_read_classes(gates / "classes.csv"),
        positions=_read_positions(gates / "positions.csv"),
        histograms=_read_histograms(gates / "histogram.csv"),
        inputs=_read_inputs(gates / "inputs.csv"),
        confusion=_read_confusion(tested / "confusion.csv"),
        compute=read_rows(tested / "compute.csv"),
        verdicts=read_rows(gates / "collapse.csv"),
        watched=_read_watched(gates / "watched.csv"),
        tasks=read_tasks(folder / "tasks.csv"),
        config=_read_text(folder / "config.yaml"),
        versions=_read_json(folder / "versions.json"),
        title=next(iter(_read_json(folder / "run.json").get("configs") or []), str(folder)),
        finished=datetime.fromtimestamp(max(times)) if times else None,
    )


def _find_test(folder: Path) -> Path | None:
    """Return the folder of the newest test that used a checkpoint from this folder."""
    tests = [
        path.parent
        for path in folder.parent.glob("*/confusion.csv")
        # Compare only the last parts, because the path depends on where the test was started.
        if _tested_checkpoint(path.parent).parts[-3:-1] == (folder.name, "checkpoints")
    ]
    return max(tests, key=lambda path: (path / "confusion.csv").stat().st_mtime, default=None)


def _tested_checkpoint(folder: Path) -> Path:
    try:
        settings = yaml.safe_load(_read_text(folder / "config.yaml"))
    except yaml.YAMLError:  # edited by a user
        return Path()
    return Path(settings.get("ckpt_path") or "" if isinstance(settings, dict) else "")


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(_read_text(path) or "{}")
    except json.JSONDecodeError:  # cut off, or edited by a user
        return {}
    return values if isinstance(values, dict) else {}


def _read_watched(path: Path) -> set[str] | None:
    return {row["layer"] for row in read_rows(path)} if path.is_file() else None


def _read_numbers(path: Path) -> list[dict[str, float]]:
    try:
        return [{k: float(value) for k, value in row.items() if value} for row in read_rows(path)]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, or use another run.") from error


def _is_test_row(row: dict[str, float]) -> bool:
    return any(key.startswith("test/") for key in row)


def _test_metrics(rows: list[dict[str, float]]) -> dict[str, float]:
    return next((row for row in reversed(rows) if _is_test_row(row)), {})


def _read_units(path: Path) -> dict[str, UnitHistory]:
    """Read each layer's unit history, in which every snapshot starts with unit 0."""
    epochs: dict[str, list[int]] = {}
    shares: dict[str, tuple[array[float], array[float]]] = {}
    lines = read_lines(path)
    next(lines, None)
    for epoch, _, layer, unit, p, g in lines:
        if unit == "0":
            epochs.setdefault(layer, []).append(int(epoch))
        p_values, g_values = shares.setdefault(layer, (array("f"), array("f")))
        p_values.append(float(p))
        g_values.append(float(g))
    return {layer: _unit_history(epochs[layer], *shares[layer]) for layer in shares}


def _unit_history(epochs: list[int], p: "array[float]", g: "array[float]") -> UnitHistory:
    units = -(-len(g) // len(epochs))  # the last snapshot may be incomplete
    snapshots = len(g) // units
    table = torch.tensor(g[: snapshots * units]).reshape(snapshots, units).T
    return UnitHistory(epochs[:snapshots], table, torch.tensor(p[: snapshots * units][-units:]))


def _read_classes(path: Path) -> dict[str, tuple[list[str], Tensor]]:
    shares_by_layer: dict[str, list[list[float]]] = {}
    lines = read_lines(path)
    header = next(lines, [])
    for layer, _, *shares in lines:
        shares_by_layer.setdefault(layer, []).append([float(share) for share in shares])
    return {layer: (header[2:], torch.tensor(rows).T) for layer, rows in shares_by_layer.items()}


def _read_positions(path: Path) -> dict[str, list[tuple[float, float]]]:
    shares: dict[str, list[tuple[float, float]]] = {}
    for row in read_rows(path):
        point = float(row["position"]), float(row["open_rate_g"])
        shares.setdefault(row["layer"], []).append(point)
    return shares


def _read_histograms(path: Path) -> dict[str, list[tuple[float, float]]]:
    last = {row["layer"]: row for row in read_rows(path)}
    return {
        layer: [
            (float(column.removeprefix("p_")), float(share))
            for column, share in row.items()
            if column.startswith("p_")
        ]
        for layer, row in last.items()
    }


def _read_inputs(path: Path) -> dict[str, GateInput]:
    lines = read_lines(path)
    next(lines, None)
    return {
        layer: GateInput([int(size) for size in shape.split()], features)
        for layer, shape, *features in lines
    }


def _read_confusion(path: Path) -> tuple[list[str], Tensor] | None:
    header, *lines = list(read_lines(path)) or [[]]
    if not lines:
        return None
    return header[1:], torch.tensor([[float(count) for count in line[1:]] for line in lines])


def read_tasks(path: Path) -> Tensor | None:
    """Read the accuracies after each task in a sequence; return None if there are none."""
    lines = [[float(value) for value in line] for line in read_lines(path)]
    return torch.tensor(lines[1:]) if len(lines) > 1 else None


# Charts of values that schedules and controllers set: title -> prefixes of logged keys.
_SCHEDULES = {
    "Temperature τ": ("gates/temperature",),
    "Threshold θ and keep target": ("gates/threshold", "gates/keep_target"),
    "Weight λ of the penalty": ("gates/penalty_weight",),
    "Budget: allowed and used": ("gates/budget_",),
}
# The first of these metrics that was logged counts: name, format, what it says of a net.
_RESULTS = {
    "test/accuracy": ("test accuracy", ".2%", "was right on {} of the test samples"),
    "test/r2": ("test R²", ".4f", "reached an R² of {} in the test"),
    "tasks/average_accuracy": ("mean accuracy", ".2%", "was right on {}, on average over tasks,"),
    "val/accuracy": ("validation accuracy", ".2%", "was right on {} of the validation samples"),
    "val/r2": ("validation R²", ".4f", "reached an R² of {} in validation"),
    "test/loss": ("test loss", ".4f", "reached a loss of {} in the test"),
    "val/loss": ("validation loss", ".4f", "reached a loss of {} in validation"),
}
_MAX_FEATURES = 50
_MAX_CLASSES = 50  # in confusion matrices
_MAX_SEEN = 128  # classes or tokens in class maps

_NO_METRICS = (
    "<p>No accuracy or loss was recorded (metrics.csv is missing): train with a logger.</p>"
)


def run_part(run: RunRecord, level: int = 2) -> str:
    """Return one run's report as HTML."""
    parts = [
        _facts(run),
        section("Results", _curves(run) or _NO_METRICS, _final_metrics(run), level=level),
        section("Tasks in sequence", _tasks(run), level=level),
        section("Open rates by layer", _open_rates(run), level=level),
        *(_gate(run, layer, level) for layer in run.units),
        section("Schedules", _schedules(run), level=level),
        section("Collapse log", _collapse(run), level=level),
        section("Compute by layer", _compute(run), level=level),
        section("Confusion matrix", _confusion(run), level=level),
        _setup(run),
    ]
    return "\n".join(part for part in parts if part)


def layer_title(name: str) -> str:
    """Return what people call a layer of our nets, or the name of any other layer.

    >>> layer_title("net.hidden.0.gate"), layer_title("net.input_gate"), layer_title("encoder.fc2")
    ('hidden layer 1', 'inputs', 'encoder.fc2')
    """
    own = re.fullmatch(r"(?:net\.)?(input_gate|output|hidden\.(\d+))(?:\.gate|\.linear)?", name)
    if own is None:
        return name.removesuffix(".dg_gate")
    if own[2] is not None:
        return f"hidden layer {int(own[2]) + 1}"
    return "inputs" if own[1] == "input_gate" else "output layer"


def _last_values(run: RunRecord) -> dict[str, float]:
    """Return the last value of every metric, from the test where it has one."""
    last: dict[str, float] = {}
    for row in run.metrics:
        last |= row
    return last | run.test


def _facts(run: RunRecord) -> str:
    """Return what counts: some figures, and one sentence on what happened."""
    last = _last_values(run)
    figures, result = [], ""
    for key, (name, form, sentence) in _RESULTS.items():
        if key in last:
            figures.append((name, format(last[key], form)))
            result = sentence.format(format(last[key], form))
            break
    if "compute/macs" in last:
        figures.append(("MACs per sample", f"{last['compute/macs']:,.0f}"))
    if "compute/macs_share" in last:
        figures.append(("of the dense net's MACs", f"{last['compute/macs_share']:.1%}"))
        result += f" with {last['compute/macs_share']:.1%} of the dense net's MACs"
    said = [f"The net {result}."] if result else []
    for key, allowed in last.items():
        if key.startswith("gates/budget_allowed"):
            part = key.removeprefix("gates/budget_allowed").removeprefix("/")
            figures.append((f"budget {part}".strip(), f"{allowed:.1%}"))
            used = last.get(key.replace("allowed", "used"))
            if used is not None:
                said.append(f"It was allowed {allowed:.1%} and used {used:.1%} in training.")
    if not figures:
        return ""
    said.append(_health(run))
    cells = "".join(f"<div><dd>{text(v)}</dd><dt>{text(k)}</dt></div>" for k, v in figures)
    return f'<dl class="facts">{cells}</dl>\n<p class="said">{text(" ".join(said))}</p>'


def _final_metrics(run: RunRecord) -> str:
    last = _last_values(run)
    names = {
        "test/accuracy": ("test accuracy", ".2%"),
        "test/macro_f1": ("test macro-F1", ".2%"),
        "test/r2": ("test R²", ".4f"),
        "test/rmse": ("test RMSE", ".4g"),
        "tasks/average_accuracy": ("mean accuracy over tasks", ".2%"),
        "tasks/forgetting": ("forgetting", ".2%"),
        "val/accuracy": ("validation accuracy", ".2%"),
        "val/r2": ("validation R²", ".4f"),
        "compute/macs": ("executed MACs per sample", ",.0f"),
        "compute/macs_share": ("relative to dense", ".2%"),
        "compute/gate_macs": ("of which decisions", ",.0f"),
        "compute/relmac_fuse_g": ("the paper's RelMAC_fuse (hidden layers, no decisions)", ".2%"),
    }
    rows = [[name, format(last[k], form)] for k, (name, form) in names.items() if k in last]
    return table(["metric", "value"], rows, "Final metrics") if rows else ""


def _curves(run: RunRecord) -> str:
    accuracy = {
        name: found
        for name, key in {"validation accuracy": "val/accuracy", "validation R²": "val/r2"}.items()
        if (found := run.curve(key))
    }
    share = {"executed MACs relative to dense": run.curve("compute/macs_share")}
    charts = [
        line_chart("Accuracy and compute", accuracy | share, "step", "share", percent=True),
        line_chart(
            "Loss",
            {"training": run.curve("train/loss"), "validation": run.curve("val/loss")},
            "step",
            "loss",
        ),
    ]
    return _tiles(charts)


def _tasks(run: RunRecord) -> str:
    if run.tasks is None:
        return ""
    learned = [(task, value) for task, value in enumerate(run.tasks.diagonal().tolist())]
    known = [(float(task), value) for task, value in learned if value == value]
    keys = {"average accuracy": "tasks/average_accuracy", "forgetting": "tasks/forgetting"}
    curves = {name: run.curve(key) for name, key in keys.items()}
    title = "Accuracy right after learning a task"
    charts = [
        task_map(run.tasks),
        line_chart(title, {"accuracy": known}, "task", "accuracy", percent=True),
        line_chart("Over the tasks learned so far", curves, "step", "share", percent=True),
    ]
    return _tiles(charts)


def _open_rates(run: RunRecord) -> str:
    charts = []
    for kind, title in (("g", "Open rate: hard gates g"), ("p", "Mean probability p")):
        lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in run.layers:
            name = layer_title(row["layer"])
            lines[name].append((int(row["epoch"]), float(row[f"open_rate_{kind}"])))
        charts.append(line_chart(title, lines, "epoch", "share", percent=True))
    churn: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in run.layers:
        if row["churn"]:
            churn[layer_title(row["layer"])].append((int(row["epoch"]), float(row["churn"])))
    charts.append(
        line_chart(
            "Churn: mean change per unit since the last snapshot",
            churn,
            "epoch",
            "share",
            percent=True,
        )
    )
    if run.positions:
        title = "Open rate by position in a sequence"
        lines = {layer_title(name): points for name, points in run.positions.items()}
        charts.append(line_chart(title, lines, "position", "share", percent=True))
    columns = ["layer", "epoch", "open g", "mean p", "churn", "dead units", "τ", "θ"]
    rows = [
        [layer_title(row["layer"]), row["epoch"], _percent_cell(row["open_rate_g"]),
         _percent_cell(row["open_rate_p"]), _percent_cell(row["churn"]), row["dead_units"],
         f"{float(row['temperature']):.3g}", f"{float(row['threshold']):.3g}"]
        for row in run.layers
    ]  # fmt: skip
    if not rows:
        return ""
    return _tiles(charts) + details("Show as a table", table(columns, rows))


def _gate(run: RunRecord, layer: str, level: int) -> str:
    history = run.units[layer]
    maps = []
    if layer in run.inputs:
        maps += input_maps(layer, history.g[:, -1], run.inputs[layer].shape)
    maps.append(time_map(layer, history.g, history.epochs))
    if layer in run.classes:
        names, shares = run.classes[layer]
        seen = [index for index, row in enumerate(shares) if not bool(row.isnan().all())]
        if len(seen) <= _MAX_SEEN:
            maps.append(class_map(layer, shares[seen], [names[index] for index in seen]))
    if layer in run.histograms:
        bins = run.histograms[layer]
        width = 1 / len(bins)
        bars = [
            Bar(f"{low:.2f} to {low + width:.2f}", share, f"{share:.1%}",
                f"p from {low:.2f} to {low + width:.2f}: {share:.2%}")
            for low, share in bins if share > 0
        ]  # fmt: skip
        maps.append(bar_chart("Histogram of p", bars, "share", percent=True))
    scale = '<p class="scale" aria-hidden="true"><i></i></p>'
    features = _features(run, layer)
    return section(f"Gate of {layer_title(layer)}", scale, _tiles(maps), features, level=level)


def _features(run: RunRecord, layer: str) -> str:
    """Return a table of the named inputs (such as genes), most open first."""
    history = run.units[layer]
    names = run.inputs[layer].features if layer in run.inputs else []
    if len(names) != len(history.p):
        return ""
    rates = history.g[:, -1]
    order = (2 * rates + history.p).argsort(descending=True, stable=True)[:_MAX_FEATURES].tolist()
    rows = [[names[i], f"{rates[i]:.1%}", f"{history.p[i]:.3f}"] for i in order]
    title = f"The {len(order)} most open inputs of {len(names):,}"
    return details(title, table(["input", "open g", "mean p"], rows))


def _schedules(run: RunRecord) -> str:
    charts = []
    for title, prefixes in _SCHEDULES.items():
        lines = {key.removeprefix("gates/"): run.curve(key) for key in run.keys(*prefixes)}
        charts.append(line_chart(title, lines, "step", title))
    return _tiles(charts)


def _collapse(run: RunRecord) -> str:
    if run.verdicts:
        rows = [
            [v["step"], layer_title(v["layer"]), v["mode"].replace("_", " ")] for v in run.verdicts
        ]
        return table(["step", "gate", "failure"], rows)
    health = _health(run)
    return f"<p>{text(health)}</p>" if health else ""


def _health(run: RunRecord) -> str:
    """Return a sentence on whether gates collapsed."""
    if run.verdicts:
        failed = dict.fromkeys(layer_title(verdict["layer"]) for verdict in run.verdicts)
        return f"Gates failed: {', '.join(failed)}."
    if run.watched is None:  # from an earlier version
        return "No failure was recorded." if run.layers else ""
    gates = dict.fromkeys(row["layer"] for row in run.layers)
    if unwatched := [layer_title(name) for name in gates if name not in run.watched]:
        names = "Gates were" if len(unwatched) == len(gates) else f"{', '.join(unwatched)}:"
        return f"{names} not watched for collapse: add CollapseDetector."
    return "No gate failed." if gates else ""


def _compute(run: RunRecord) -> str:
    if not run.compute:
        return ""
    columns = ["layer", "dense MACs", "executed", "decisions", "of dense", "open g", "dead units"]
    rows, bars = [], []
    for layer in run.compute:
        name, dense, macs = (
            layer_title(layer["name"]),
            *map(float, (layer["macs_dense"], layer["macs"])),
        )
        gate_macs = float(layer["gate_macs"])
        share = (macs + gate_macs) / dense if dense else None
        rows.append(
            [name, f"{dense:,.0f}", f"{macs:,.0f}", f"{gate_macs:,.0f}",
             "" if share is None else f"{share:.1%}", _percent_cell(layer["open_rate_g"]),
             layer["dead_units"]]
        )  # fmt: skip
        if dense:
            tip = f"{name}: {macs + gate_macs:,.0f} of {dense:,.0f} MACs, {share:.2%}"
            bars.append(Bar(name, share or 0.0, f"{share:.1%}", tip))
    chart = bar_chart("Executed MACs relative to the dense layer", bars, "share", percent=True)
    return table(columns, rows, "MACs per sample in the test") + _tiles([chart])


def _confusion(run: RunRecord) -> str:
    if run.confusion is None or len(run.confusion[0]) > _MAX_CLASSES:
        return ""
    names, counts = run.confusion
    rows = [
        [name, *(f"{int(count):,}" for count in line)]
        for name, line in zip(names, counts.tolist(), strict=True)
    ]
    as_table = details("Show as a table", table(["true class", *names], rows))
    return confusion_map(names, counts) + as_table


def _setup(run: RunRecord) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    made_with = f"<p>Made with {text(versions)}.</p>" if versions else ""
    config = f'<pre tabindex="0">{text(run.config)}</pre>' if run.config else ""
    return details("Config and versions", made_with, config)


def _tiles(parts: list[str]) -> str:
    inner = "\n".join(part for part in parts if part)
    return f'<div class="tiles">{inner}</div>' if inner else ""


def _percent_cell(value: str) -> str:
    return f"{float(value):.2%}" if value else ""


# With this policy, the browser blocks everything that is not in the file.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def run_page(folder: Path) -> str:
    """Return the page for a run, or for the newest run in a folder of runs."""
    run = folder if is_run(folder) else _newest_run(folder)
    record = read_run(run)
    when = "" if record.finished is None else f"{record.finished:%d %B %Y, %H:%M}, "
    return page(record.title, run_part(record), f"{when.lstrip('0')}{run}")


def write_page(folder: Path, content: str, output: Path | None = None) -> Path:
    """Write a page to `output`, by default `report.html` in the folder, and return its path."""
    path = folder / "report.html" if output is None else output
    if path.suffix != ".html" and path.exists():
        raise ValueError(
            f"{str(path)!r} exists and is not a report: name a file that ends in .html."
        )
    if path.is_dir():
        raise ValueError(f"`output` must be a file, got the folder {str(path)!r}: add report.html.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, content)
    return path


def _newest_run(folder: Path) -> Path:
    """Return the newest training run in a folder of runs."""
    runs = [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    trained = [path for path in runs if (path / "checkpoints").is_dir()] or runs
    if not trained:
        raise ValueError(
            f"{str(folder)!r} contains neither a study (results.csv with a variant column) nor a "
            "run (metrics.csv, gates/ or config.yaml): pass the folder printed by `study` or `fit`."
        )
    # The folder's own time would change with every report.
    return max(trained, key=lambda path: max(p.stat().st_mtime for p in _output_paths(path)))


def _output_paths(run: Path) -> list[Path]:
    names = ("checkpoints", "config.yaml", "metrics.csv", "gates")
    return [path for name in names if (path := run / name).exists()]


def page(title: str, content: str, subtitle: str = "") -> str:
    """Wrap content in a complete page with its style and script."""
    here = files("dg_lightning.monitoring.report")
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    script = here.joinpath("script.js").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{text(title)} - dg-lightning</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to content</a>
<header><h1>{text(title)}</h1>{f"<p>{text(subtitle)}</p>" if subtitle else ""}</header>
<main id="content">
{content}
</main>
<footer><p>Charts: hover, or press Tab and then the arrow keys. By dg-lightning.</p></footer>
<div id="tip" role="status" aria-live="polite" hidden></div>
<script>
{script}</script>
</body>
</html>
"""
