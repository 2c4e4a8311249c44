"""Study tables, with the paper's published results for comparison."""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dg_lightning import files
from dg_lightning.compute.metric import ComputeReport
from dg_lightning.versions import versions

# Rule -> (rate that the table uses, whether closed outputs save MACs in addition to inputs).
_RULES = {"fan_in": ("g", False), "both": ("g", True), "fan_in_p": ("p", False)}


def published(dataset: str) -> dict[str, Any]:
    """Return the published table for a dataset: `table`, `rule`, and `rows` for each variant.

    >>> published("mnist")["rows"]["dynamicgate"]["accuracy"]
    0.9807
    """
    text = (
        resources.files("dg_lightning.study").joinpath("published.yaml").read_text(encoding="utf-8")
    )
    unknown: dict[str, Any] = {"table": "not in the paper", "rule": None, "rows": {}}
    entry: dict[str, Any] = yaml.safe_load(text).get(dataset, unknown)
    return entry


def relative_macs_by_rule(report: ComputeReport, rule: str) -> float:
    """Return the MACs of a net relative to dense, as counted by a published table.

    As in all published tables, mean rates are multiplied and gate decisions cost nothing.
    """
    kind, outputs_count = _RULES[rule]
    used, rate_in = 0.0, 1.0
    for layer in report.layers:
        rate = layer.open_rate(kind)
        if not layer.is_map:  # an input gate
            rate_in = rate
            continue
        used += layer.macs_dense * layer.density * rate_in * (rate if outputs_count else 1.0)
        rate_in = rate
    return used / report.macs_dense if report.macs_dense else 1.0


COLUMNS = (
    "dataset",
    "variant",
    "seed",
    "accuracy",
    "loss",
    "macro_f1",
    "micro_f1",
    "macs",
    "macs_dense",
    "macs_reduction",
    "gate_macs",
    "relmac_paper",
    "relmac_table_rule",
    "open_rates",
    "compute_proxy",
    "flops",
    "params",
    "params_needed",
    "val_accuracy",
    "best_val_accuracy",
    "landing_loss",
    "hardness_correlation",
    "train_seconds",
    "epochs",
    "training",
    "device",
    "status",
    "reason",
)
TASK_KEYS = (  # logged by callbacks for continual learning
    "tasks/average_accuracy",
    "tasks/forgetting",
    "tasks/accuracy_when_learned",
    "tasks/forward_transfer",
    "tasks/plasticity",
    "tasks/overlap",
    "tasks/units_used",
    "tasks/passes",
    "adapt/drift_cost",
    "adapt/recovery",
    "adapt/clean_loss",
    "adapt/gate_flips",
    "adapt/weights_free",
)
TEXTS = ("dataset", "variant", "open_rates", "training", "device", "status", "reason")
_NAMES = (*TEXTS, "seed")

Row = Mapping[str, Any]


def write_rows(path: Path, rows: Sequence[Row], columns: Sequence[str] = COLUMNS) -> None:
    """Write rows as CSV: the given columns first, then any others."""
    extra = dict.fromkeys(key for row in rows for key in row if key not in columns)
    names = [*columns, *extra]
    files.write_csv(path, [names, *([row.get(name) for name in names] for row in rows)])


def summarised(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the mean and standard deviation of every metric, one row per variant.

    >>> rows = [{"variant": "a", "status": "complete", "accuracy": x} for x in (0.5, 0.7)]
    >>> [(r["variant"], r["runs"], round(r["accuracy_mean"], 3)) for r in summarised(rows)]
    [('a', 2, 0.6)]
    """
    summaries = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        done = [r for r in rows if r["variant"] == name and r["status"] == "complete"]
        failed = [r for r in rows if r["variant"] == name and r["status"] != "complete"]
        summary: dict[str, Any] = {"variant": name, "runs": len(done), "failed": len(failed)}
        for key in dict.fromkeys(k for row in done for k in row if k not in _NAMES):
            values = [row[key] for row in done if isinstance(row.get(key), int | float)]
            if values:
                summary[f"{key}_mean"] = statistics.fmean(values)
                summary[f"{key}_std"] = statistics.stdev(values) if len(values) > 1 else None
        summaries.append(summary)
    return summaries


def paired_difference(
    rows: Sequence[Row], variant: str, reference: str = "baseline", key: str = "accuracy"
) -> tuple[float, float | None, int] | None:
    """Return a variant's mean lead over a reference, the standard error and the seed count.

    Runs are paired by seed, which removes the variance of the split and the batch order.

    >>> rows = [{"variant": v, "seed": s, "status": "complete", "accuracy": a + 0.1 * s}
    ...         for v, a in (("baseline", 0.5), ("rigl", 0.52)) for s in (0, 1)]
    >>> mean, error, seeds = paired_difference(rows, "rigl")
    >>> round(mean, 6), round(error, 6), seeds
    (0.02, 0.0, 2)
    """
    done = [row for row in rows if row["status"] == "complete" and key in row]
    references = {row["seed"]: row[key] for row in done if row["variant"] == reference}
    values = {row["seed"]: row[key] for row in done if row["variant"] == variant}
    differences = [values[s] - references[s] for s in values.keys() & references.keys()]
    if not differences or variant == reference:
        return None
    count = len(differences)
    error = statistics.stdev(differences) / math.sqrt(count) if count > 1 else None
    return statistics.fmean(differences), error, count


def summary_markdown(dataset: str, rows: Sequence[Row], notes: str | None = None) -> str:
    """Return the tables of a study as Markdown: accuracy, compute, and notes."""
    source = published(dataset)
    summaries = summarised(rows)
    parts = [
        f"# {dataset}",
        *([notes.strip()] if notes else []),
        *([trained] if (trained := describe_training(rows)) else []),
        "Test accuracy with hard gates, mean ± standard deviation over seeds. The lead over the "
        "baseline is the mean difference between runs with the same seed, ± its standard error. "
        "The test split is used once per run, for the checkpoint that the config keeps.",
        markdown_table(
            ["variant", "runs", "test accuracy", "lead over baseline", "test loss", "paper",
             "macro-F1", "micro-F1", "best validation", "training, s"],
            [_accuracy_cells(s, rows, source["rows"].get(s["variant"], {})) for s in summaries],
        ),
        "MACs are the multiply-accumulates executed per sample. They are measured with the same "
        "hard gates as the accuracy and include gate decisions (GateNets, routers). FLOPs are "
        "twice the MACs. RelMAC is the paper's formula, which counts hidden layers by their own "
        "open rates and leaves out decisions"
        + (f". The table's rule, `{source['rule']}`, is how the paper's own table counts MACs"
           if source["rule"] else "")
        + ". All reductions are relative to the dense net.",
        markdown_table(
            ["variant", "MACs", "of which decisions", "reduction", "by RelMAC",
             "by the table's rule", "paper", "its script", "parameters", "needed"],
            [_compute_cells(s, source["rows"].get(s["variant"], {})) for s in summaries],
        ),
    ]  # fmt: skip
    if any("tasks_average_accuracy_mean" in summary for summary in summaries):
        parts += [
            "Tasks learned in sequence. Average accuracy is the mean test accuracy on all tasks "
            "after the last one. Forgetting and transfer are measured on validation data.",
            markdown_table(
                ["variant", "average accuracy", "forgetting", "when learned", "forward transfer",
                 "plasticity", "overlap", "passes"],
                [_task_cells(summary) for summary in summaries],
            ),
        ]  # fmt: skip
    if any("adapt_recovery_mean" in summary for summary in summaries):
        keys = ("drift_cost", "recovery", "clean_loss", "gate_flips", "weights_free")
        parts += [
            "Adaptation to drift, measured on validation data: accuracy lost to the drift, share "
            "of that loss recovered, accuracy lost on clean samples, share of gate decisions that "
            "changed on the same samples, and share of weights that may adapt.",
            markdown_table(
                ["variant", *(key.replace("_", " ") for key in keys)],
                [
                    [f"`{s['variant']}`", *(_mean_in_percent(s, f"adapt_{key}") for key in keys)]
                    for s in summaries
                ],
            ),
        ]
    if remarks := published_remarks(source, rows):
        parts += [f"Notes on the paper's table ({source['table']}):", remarks]
    else:
        parts.append(f"The paper's table: {source['table']}.")
    if failed := [row for row in rows if row["status"] != "complete"]:
        reasons = [" ".join(str(row["reason"]).split()) for row in failed]
        lines = [
            f"- {row['variant']}, seed {row['seed']}: {reason}"
            for row, reason in zip(failed, reasons, strict=True)
        ]
        parts += ["Failed:", "\n".join(lines)]
    devices = sorted({str(row["device"]) for row in rows if row.get("device")})
    parts.append(f"Made with {library_versions()}, on {' and '.join(devices) or 'nothing yet'}.")
    return "\n\n".join(parts) + "\n"


def describe_training(rows: Sequence[Row]) -> str:
    """Describe how the variants were trained, from their rows.

    >>> rows = [{"variant": v, "training": "3 epochs, SGD 0.1"} for v in ("baseline", "rigl")]
    >>> describe_training(rows)
    'All variants were trained the same way: 3 epochs, SGD 0.1.'
    """
    variants: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.get("training"):
            variants.setdefault(row["training"], {})[f"`{row['variant']}`"] = None
    if len(variants) == 1:
        return f"All variants were trained the same way: {next(iter(variants))}."
    return " ".join(f"{', '.join(names)}: {training}." for training, names in variants.items())


def published_remarks(source: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the notes on published rows whose variants the study trains too."""
    trained = {row["variant"] for row in rows}
    return "\n".join(
        f"- `{name}`: {' '.join(row['note'].split())}"
        for name, row in source["rows"].items()
        if "note" in row and name in trained
    )


def library_versions() -> str:
    """Return the versions of the libraries that affect results."""
    return ", ".join(f"{name} {version}" for name, version in versions(["optuna"]).items())


def _accuracy_cells(summary: Row, rows: Sequence[Row], paper: Row) -> list[str]:
    lead = paired_difference(rows, summary["variant"])
    return [
        f"`{summary['variant']}`",
        str(summary["runs"]) + (f" ({summary['failed']} failed)" if summary["failed"] else ""),
        _mean_in_percent(summary, "accuracy")
        or (f"R² {r2}" if (r2 := _mean_as_number(summary, "r2")) else ""),
        "" if lead is None else _format_points(lead[0], lead[1]),
        _mean_as_number(summary, "loss"),
        _format_percent(paper.get("accuracy")),
        _mean_in_percent(summary, "macro_f1"),
        _mean_in_percent(summary, "micro_f1"),
        _mean_in_percent(summary, "best_val_accuracy"),
        _number(summary, "train_seconds", ".1f"),
    ]


def _compute_cells(summary: Row, paper: Row) -> list[str]:
    by_relmac, by_rule = (
        _format_percent(None if summary.get(key) is None else 1 - summary[key])
        for key in ("relmac_paper_mean", "relmac_table_rule_mean")
    )
    return [
        f"`{summary['variant']}`",
        _number(summary, "macs", ",.0f"),
        _number(summary, "gate_macs", ",.0f"),
        _mean_in_percent(summary, "macs_reduction"),
        by_relmac,
        by_rule,
        _format_percent(paper.get("macs_reduction")),
        _format_percent(paper.get("script_macs_reduction")),
        _number(summary, "params", ",.0f"),
        _number(summary, "params_needed", ",.0f"),
    ]


def _task_cells(summary: Row) -> list[str]:
    shares = (
        "average_accuracy",
        "forgetting",
        "accuracy_when_learned",
        "forward_transfer",
        "plasticity",
        "overlap",
    )
    cells = [_mean_in_percent(summary, f"tasks_{name}") for name in shares]
    return [f"`{summary['variant']}`", *cells, _number(summary, "tasks_passes", ".0f")]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table, with numbers in all columns after the first `words`."""
    lines = [columns, ["---"] * words + ["---:"] * (len(columns) - words), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mean_in_percent(summary: Row, key: str) -> str:
    mean, spread = summary.get(f"{key}_mean"), summary.get(f"{key}_std")
    if mean is None:
        return ""
    return f"{mean:.2%}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def _format_points(mean: float, error: float | None) -> str:
    return f"{100 * mean:+.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def _format_percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _mean_as_number(summary: Row, key: str) -> str:
    mean, spread = summary.get(f"{key}_mean"), summary.get(f"{key}_std")
    if mean is None:
        return ""
    return f"{mean:.4f}" + ("" if spread is None else f" ± {spread:.4f}")


def _number(summary: Row, key: str, form: str) -> str:
    mean = summary.get(f"{key}_mean")
    return "" if mean is None else format(mean, form)


# Column -> logged key, for the paper's comparison with a mixture of experts (section 5.5).
_TABLE = {
    "acc": "val/accuracy",
    "loss": "train/loss",
    "main": "train/task_loss",
    "aux": "train/aux_loss",
    "dropped": "routing/dropped",
    "active": "gates/active_ratio",
    "corr(h, a)": "gates/hardness_correlation",
    "entropy": "routing/entropy",
    "cv": "routing/cv",
    "MI": "routing/mutual_information",
    "cap": "routing/capacity",
}


def epoch_rows(metrics: Path) -> list[dict[str, Any]]:
    """Return a run's logged metrics, one row per epoch.

    Values logged at each step are averaged. Test metrics are omitted.
    """
    epochs: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with metrics.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line.get("test/accuracy"):
                continue
            for key, value in line.items():
                if value and key not in ("epoch", "step"):
                    epochs[int(line["epoch"])][key].append(float(value))
    return [
        {"epoch": epoch, **{key: statistics.fmean(values) for key, values in keys.items()}}
        for epoch, keys in sorted(epochs.items())
    ]


def epochs_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the paper's table for variants that logged their gate activity.

    Accuracy is validation accuracy. Values are averaged over routers and seeds.
    """
    parts = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        variant_rows = [row for row in rows if row["variant"] == variant]
        if not any("gates/active_ratio" in row for row in variant_rows):
            continue
        columns = {
            name: prefix
            for name, prefix in _TABLE.items()
            if any(key.startswith(prefix) for row in variant_rows for key in row)
        }
        lines = [["epoch", *columns], ["---:"] * (len(columns) + 1)]
        for epoch in sorted({row["epoch"] for row in variant_rows}):
            same_epoch = [row for row in variant_rows if row["epoch"] == epoch]
            cells = [_mean(same_epoch, prefix) for prefix in columns.values()]
            lines.append([str(epoch), *cells])
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        seeds = len({row["seed"] for row in variant_rows})
        parts.append(f"## `{variant}`, mean over {seeds} seeds\n\n{table}\n")
    return "\n".join(parts)


def _mean(rows: Sequence[dict[str, Any]], prefix: str) -> str:
    values = [v for row in rows for key, v in row.items() if key.startswith(prefix)]
    return f"{statistics.fmean(values):.4g}" if values else ""
