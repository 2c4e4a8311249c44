"""The report of one run: gates, compute, test, config."""

from collections import defaultdict

from dg_lightning.monitoring.report.charts import Bar, bar_chart, line_chart
from dg_lightning.monitoring.report.html import details, section, table, text
from dg_lightning.monitoring.report.maps import (
    class_map,
    confusion_map,
    input_maps,
    task_map,
    time_map,
)
from dg_lightning.monitoring.report.run import RunRecord

__all__ = ["run_part"]

# Values set by schedules and controllers, one chart each.
_SCHEDULES = {
    "Temperature τ": ("gates/temperature",),
    "Threshold θ and keep target": ("gates/threshold", "gates/keep_target"),
    "Weight λ of the penalty": ("gates/penalty_weight",),
    "Budget: allowed and used": ("gates/budget_",),
}
_MAX_FEATURES = 50
_MAX_CLASSES = 50  # in confusion matrices
_MAX_SEEN = 128  # classes, or tokens, in class maps

_NO_METRICS = (
    "<p>No accuracy and loss were recorded: train with a logger (metrics.csv is missing).</p>"
)


def run_part(run: RunRecord, level: int = 2) -> str:
    """Return the report of one run as HTML."""
    parts = [
        section("How it went", _final_metrics(run), _curves(run) or _NO_METRICS, level=level),
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


def _final_metrics(run: RunRecord) -> str:
    last: dict[str, float] = {}
    for row in run.metrics:
        last |= {
            key: value
            for key, value in row.items()
            if key.startswith(("val/", "compute/", "tasks/"))
        }
    last |= {key: value for key, value in run.test.items() if key != "step"}
    names = {
        "test/accuracy": ("test accuracy", ".2%"),
        "test/macro_f1": ("test macro-F1", ".2%"),
        "test/r2": ("test R²", ".4f"),
        "test/rmse": ("test error (root mean square)", ".4g"),
        "tasks/average_accuracy": ("mean of the tasks' accuracies", ".2%"),
        "tasks/forgetting": ("forgetting", ".2%"),
        "val/accuracy": ("validation accuracy", ".2%"),
        "val/r2": ("validation R²", ".4f"),
        "compute/macs": ("executed MACs a sample", ",.0f"),
        "compute/macs_share": ("of the dense net's", ".2%"),
        "compute/gate_macs": ("of which gate decisions", ",.0f"),
        "compute/relmac_fuse_g": ("the paper's RelMAC_fuse (hidden maps, no decisions)", ".2%"),
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
    for kind, title in (("g", "Open: hard gates g"), ("p", "Mean probability p")):
        lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in run.layers:
            lines[row["layer"]].append((int(row["epoch"]), float(row[f"open_rate_{kind}"])))
        charts.append(line_chart(title, lines, "epoch", "share", percent=True))
    churn: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in run.layers:
        if row["churn"]:
            churn[row["layer"]].append((int(row["epoch"]), float(row["churn"])))
    charts.append(
        line_chart(
            "Churn: mean change of a unit since the last snapshot",
            churn,
            "epoch",
            "share",
            percent=True,
        )
    )
    if run.positions:
        title = "Open by position in a sequence"
        charts.append(line_chart(title, run.positions, "position", "share", percent=True))
    columns = ["layer", "epoch", "open g", "mean p", "churn", "dead units", "τ", "θ"]
    rows = [
        [row["layer"], row["epoch"], _percent(row["open_rate_g"]), _percent(row["open_rate_p"]),
         _percent(row["churn"]), row["dead_units"], f"{float(row['temperature']):.3g}",
         f"{float(row['threshold']):.3g}"]
        for row in run.layers
    ]  # fmt: skip
    if not rows:
        return ""
    return _tiles(charts) + details("The same as a table", table(columns, rows))


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
        bars = [
            Bar(f"{low:.2f} to {low + 1 / len(bins):.2f}", share, f"{share:.1%}",
                f"p from {low:.2f} to {low + 1 / len(bins):.2f}: {share:.2%}")
            for low, share in bins
        ]  # fmt: skip
        maps.append(bar_chart("Histogram of p", bars, "share", percent=True))
    scale = '<p class="scale" aria-hidden="true"><i></i></p>'
    features = _features(run, layer)
    return section(f"Gate {layer}", scale, _tiles(maps), features, level=level)


def _features(run: RunRecord, layer: str) -> str:
    """Return a table of the named inputs (such as genes), most open first."""
    history = run.units[layer]
    names = run.inputs[layer].features if layer in run.inputs else []
    if len(names) != len(history.p):
        return ""
    rates = history.g[:, -1]
    order = (2 * rates + history.p).argsort(descending=True, stable=True)[:_MAX_FEATURES].tolist()
    rows = [[names[i], f"{rates[i]:.1%}", f"{history.p[i]:.3f}"] for i in order]
    title = f"The {len(order)} inputs that are most open, of {len(names):,}"
    return details(title, table(["input", "open g", "mean p"], rows))


def _schedules(run: RunRecord) -> str:
    charts = []
    for title, prefixes in _SCHEDULES.items():
        lines = {key.removeprefix("gates/"): run.curve(key) for key in run.keys(*prefixes)}
        charts.append(line_chart(title, lines, "step", title))
    return _tiles(charts)


def _collapse(run: RunRecord) -> str:
    if run.verdicts:
        rows = [[v["step"], v["layer"], v["mode"].replace("_", " ")] for v in run.verdicts]
        return table(["step", "gate", "failure"], rows)
    if run.watched is None:  # a run of an earlier version
        return "<p>No failure was recorded.</p>" if run.layers else ""
    gates = dict.fromkeys(row["layer"] for row in run.layers)
    if unwatched := [name for name in gates if name not in run.watched]:
        names = "Gates were" if len(unwatched) == len(gates) else f"{', '.join(unwatched)}:"
        return f"<p>{text(names)} not watched for collapse: add CollapseDetector.</p>"
    return "<p>No gate failed.</p>" if gates else ""


def _compute(run: RunRecord) -> str:
    if not run.compute:
        return ""
    columns = ["layer", "dense MACs", "executed", "decisions", "of dense", "open g", "dead units"]
    rows, bars = [], []
    for layer in run.compute:
        dense, macs = float(layer["macs_dense"]), float(layer["macs"])
        gate_macs = float(layer["gate_macs"])
        share = (macs + gate_macs) / dense if dense else None
        rows.append(
            [layer["name"], f"{dense:,.0f}", f"{macs:,.0f}", f"{gate_macs:,.0f}",
             "" if share is None else f"{share:.1%}", _percent(layer["open_rate_g"]),
             layer["dead_units"]]
        )  # fmt: skip
        if dense:
            tip = f"{layer['name']}: {macs + gate_macs:,.0f} of {dense:,.0f} MACs, {share:.2%}"
            bars.append(Bar(layer["name"], share or 0.0, f"{share:.1%}", tip))
    chart = bar_chart("Executed MACs relative to the dense layer", bars, "share", percent=True)
    return table(columns, rows, "MACs per sample in the test") + chart


def _confusion(run: RunRecord) -> str:
    if run.confusion is None or len(run.confusion[0]) > _MAX_CLASSES:
        return ""
    names, counts = run.confusion
    rows = [
        [name, *(f"{int(count):,}" for count in line)]
        for name, line in zip(names, counts.tolist(), strict=True)
    ]
    as_table = details("The same as a table", table(["true class", *names], rows))
    return confusion_map(names, counts) + as_table


def _setup(run: RunRecord) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    made_with = f"<p>Made with {text(versions)}.</p>" if versions else ""
    config = f'<pre tabindex="0">{text(run.config)}</pre>' if run.config else ""
    return details("Config and versions", made_with, config)


def _tiles(parts: list[str]) -> str:
    inner = "\n".join(part for part in parts if part)
    return f'<div class="tiles">{inner}</div>' if inner else ""


def _percent(value: str) -> str:
    return f"{float(value):.2%}" if value else ""
