"""Write RESULTS.md from the study tables and `page.md.j2`: `make results`.

The table at the top of README.md is updated too.
"""

import csv
import math
import re
import statistics
from typing import Any

import jinja2
from studies import CURVE_DATASETS, CURVES, HERE, Study, spread

from dg_lightning.study.tables import markdown_table

_FRONT = {
    "MNIST 784-256-10": "mnist",
    "PBMC3k 2000-1000-500, published labels": "pbmc3k",
    "CIFAR-10 3072-1024-512-10": "cifar10",
}
CURVE_SHARES = (50, 20, 5)  # percent of the MACs
_FRONT_PLACE = re.compile(r"(<!-- results -->\n).*?(\n<!-- /results -->)", re.DOTALL)


def summary(studies: dict[str, Study]) -> str:
    """Return a table of the main variants of each dataset."""
    lines = []
    for title, study in studies.items():
        names = {
            "dense": "baseline",
            "static gates": "dynamicgate",
            "input-dependent gates": "dynamicgate_input",
            "gates and RigL": "dynamicgate_rigl",
        }
        names[f"sparse alone, the same MACs (`{study.best_sparse()}`)"] = study.best_sparse()
        for index, (net, v) in enumerate(names.items()):
            figures = [study.percent(v), study.lead(v), study.saved(v)]
            lines.append([title if index == 0 else "", net, *figures])
    columns = ["dataset", "net", "test accuracy, %", "lead over dense, points", "MACs saved, %"]
    return markdown_table(columns, lines, words=2)


def recipes(study: Study) -> str:
    """Return the paper's figures, its recipe's, and those of a budget of the recipe's MACs."""
    lines = []
    for v in study.variants:
        if v.endswith("_budget"):
            continue
        paper, budget = study.paper["rows"].get(v, {}), f"{v}_budget"
        said = paper.get("accuracy")
        figures = ["" if said is None else f"{100 * said:.2f}", study.percent(v)]
        figures.append(study.percent(budget) if budget in study.variants else "")
        rule = [100 * (1 - share) for share in study.values(v, "relmac_table_rule")]
        relmac = [100 * share for share in study.values(v, "relmac_paper")]
        figures += [study.paper_saved(v), spread(rule), study.saved(v), spread(relmac)]
        figures += [study.open_rates(v)]
        figures += [study.percent(v, key) for key in ("macro_f1", "best_val_accuracy")]
        lines.append([f"`{v}`", *figures, f"{study.values(v, 'params')[0]:,.0f}"])
    columns = ["variant", "accuracy, %: paper", "recipe", "budget, same MACs"]
    columns += ["saved, %: paper", "recipe, counted as in the paper", "recipe, all MACs"]
    columns += ["RelMAC, %", "open by gate, %", "macro-F1, %", "best validation, %", "parameters"]
    return markdown_table(columns, lines)


def ramps_and_budgets(studies: dict[str, Study]) -> str:
    """Return the leads of the recipe's ramps over a budget of the same MACs."""
    lines = []
    for title, study in studies.items():
        for v in study.variants:
            if (budget := f"{v}_budget") in study.variants:
                shares = [f"{100 * statistics.fmean(study.used(x)):.1f}" for x in (v, budget)]
                spreads = [f"{100 * statistics.stdev(study.used(x)):.2f}" for x in (v, budget)]
                lines.append([title, f"`{v}`", study.lead(v, budget), *shares, *spreads])
    columns = ["dataset", "gates", "ramps over budget, points", "MACs, %: ramps", "budget"]
    return markdown_table([*columns, "spread over seeds: ramps", "budget"], lines, words=2)


def budgets(studies: dict[str, Study]) -> str:
    """Return a table of budgets, of their use in the test, and of the cost of landing."""
    lines = []
    for title, study in studies.items():
        for v, (asked, miss) in study.misses().items():
            used = spread([100 * x for x in study.used(v)])
            losses = [x for x in study.values(v, "landing_loss") if not math.isnan(x)]
            figures = [f"{100 * asked:g}", used, f"{100 * miss:+.2f}"]
            figures += [f"{100 * statistics.fmean(losses):+.2f}", f"{100 * max(losses):+.2f}"]
            lines.append([title, f"`{v}`", *figures])
    columns = ["dataset", "variant", "budget, %", "used in the test, %", "off by, % of it"]
    return markdown_table([*columns, "lost in the landing, points", "at worst"], lines, words=2)


def input_pays(studies: dict[str, Study]) -> str:
    """Return the leads of input-dependent gates over static ones, and of wide nets over dense."""
    lines = []
    for title, study in studies.items():
        static = "dynamicgate_equal" if "dynamicgate_equal" in study.variants else "dynamicgate"
        wide = "dynamicgate_wide" if "dynamicgate_wide" in study.variants else None
        pair = [study.saved(v) for v in ("dynamicgate_input", static)]
        over = "" if wide is None else study.lead(wide)
        lines.append([title, study.lead("dynamicgate_input", static), *pair, over])
    columns = ["dataset", "input over static", "saved, %: input", "static", "wide over dense"]
    return markdown_table(columns, lines)


def of_trials(study: Study) -> str:
    """Return validation accuracies, the cost of the landing, and open rates."""
    lines = []
    for v in study.variants:
        losses = [100 * x for x in study.values(v, "landing_loss") if not math.isnan(x)]
        used = f"{100 * statistics.fmean(study.used(v)):.1f}"
        figures = [
            study.percent(v, "val_accuracy"),
            study.percent(v),
            f"{statistics.fmean(losses):+.2f}" if losses else "",
        ]
        lines.append(
            [f"`{v}`", str(len(study.values(v, "seed"))), *figures, used, study.open_rates(v)]
        )
    columns = ["variant", "runs", "validation accuracy, %", "test accuracy, %"]
    columns += ["lost in the landing, points", "MACs, %", "open by gate, %"]
    return markdown_table(columns, lines)


def winners(studies: dict[str, Study]) -> str:
    """Return the most accurate method at each share of the MACs, and the best with gates."""
    lines = []
    for title, study in studies.items():
        line = [title, study.percent("baseline")]
        for share in CURVE_SHARES:
            means = {
                m: statistics.fmean(study.values(f"{v}_{share}", "accuracy"))
                for m, v in CURVES.items()
            }
            order = sorted(means, key=means.__getitem__, reverse=True)
            gates = next(method for method in order if "gates" in method)
            line.append(
                ", ".join(f"{m} {100 * means[m]:.2f}" for m in dict.fromkeys([order[0], gates]))
            )
        lines.append(line)
    shares = [f"at {share} %" for share in CURVE_SHARES]
    return markdown_table(["dataset", "dense", *shares], lines, words=5)


def of_tasks(study: Study) -> str:
    """Return the average accuracy and the forgetting after the last task."""
    lines = []
    for v in study.variants:
        runs = str(len(study.values(v, "accuracy")))
        keys = ("tasks_average_accuracy", "tasks_forgetting")
        used = f"{100 * statistics.fmean(study.used(v)):.1f}"
        lines.append([f"`{v}`", runs, *(study.percent(v, key) for key in keys), used])
    columns = ["variant", "runs", "average accuracy, %", "forgetting, points", "MACs, %"]
    return markdown_table(columns, lines)


def of_plasticity(study: Study) -> str:
    """Return the accuracy right after each task, and the plasticity."""
    keys = ("tasks_accuracy_when_learned", "tasks_plasticity")
    lines = [[f"`{v}`", *(study.percent(v, key) for key in keys)] for v in study.variants]
    columns = ["variant", "accuracy right after learning a task, %", "plasticity, points"]
    return markdown_table(columns, lines)


def of_text(study: Study) -> str:
    """Return the losses of language models, and how much of the narrow-dense gap they close."""
    dense, narrow = (statistics.fmean(study.values(v, "loss")) for v in ("baseline", "narrow"))
    lines = []
    for v in study.variants:
        losses = study.values(v, "loss")
        mean = statistics.fmean(losses)
        loss = f"{mean:.4f} ± {statistics.stdev(losses):.4f}"
        closed = f"{100 * (narrow - mean) / (narrow - dense):.0f}"
        macs = f"{statistics.fmean(study.values(v, 'macs')):,.0f}"
        parameters = f"{study.values(v, 'params')[0]:,.0f}"
        lines.append([f"`{v}`", loss, closed, study.percent(v), macs, parameters])
    columns = ["variant", "test loss, nats a byte", "of the gap, %", "next byte right, %"]
    return markdown_table([*columns, "MACs a byte", "parameters"], lines)


def gap_by_seed(study: Study) -> str:
    """Return the share of the narrow-dense gap that gates close, by seed."""
    losses = [study.values(v, "loss") for v in ("narrow", "baseline", "dynamicgate")]
    shares = [
        (narrow - gated) / (narrow - dense) for narrow, dense, gated in zip(*losses, strict=True)
    ]
    return ", ".join(f"{100 * share:.0f}" for share in shares)


def of_drift(study: Study) -> str:
    """Return the gains and costs of adaptation, with standard errors."""
    lines = []
    for v in study.variants:
        drift, _, what = v.partition("_")
        figures = []
        for key in ("adapt_recovery", "adapt_clean_loss", "adapt_gate_flips"):
            values = [100 * value for value in study.values(v, key)]
            error = statistics.stdev(values) / math.sqrt(len(values))
            mean = round(statistics.fmean(values), 1) + 0.0  # not -0.0
            figures.append(f"{mean:.1f} ± {error:.1f}")
        used = f"{100 * statistics.fmean(study.used(v)):.1f}"
        lines.append([drift, what, *figures, used])
    columns = ["drift", "adapts", "won back, %", "lost on clean images, points"]
    columns += ["decisions changed, %", "MACs, %"]
    return markdown_table(columns, lines, words=2)


def of_tables(study: Study) -> str:
    """Return the accuracy or R² of dense nets, gated nets and gradient boosting, by table."""
    with (HERE / "boosting" / f"{study.name}.csv").open(encoding="utf-8") as file:
        boosting = list(csv.DictReader(file))
    lines = []
    for name in dict.fromkeys(v.rsplit("_", 1)[0] for v in study.variants):
        rows = [row for row in boosting if row["table"] == name]
        dense, gates = f"{name}_dense", f"{name}_gates"
        key = "r2" if math.isnan(study.values(dense, "accuracy")[0]) else "accuracy"
        kept = statistics.fmean(float(row["columns_kept"]) for row in rows)
        boosted = spread([100 * float(row["boosting"]) for row in rows])
        used = f"{100 * statistics.fmean(study.used(gates)):.1f}"
        scores = [study.percent(dense, key), study.percent(gates, key), boosted]
        about = [name, key.replace("r2", "R²"), rows[0]["rows"], rows[0]["columns"]]
        lines.append([*about, *scores, used, f"{kept:.1f}"])
    columns = ["table", "measure, %", "rows", "columns", "dense MLP", "gated MLP"]
    columns += ["gradient boosting", "MACs, %", "columns used"]
    return markdown_table(columns, lines, words=2)


def of_time_scales(*studies: Study) -> str:
    """Return accuracies by learning speed of gates and rewiring interval."""
    lines = [[f"`{v}`", *(study.percent(v) for study in studies)] for v in studies[0].variants]
    return markdown_table(["variant", *(study.config["dataset"] for study in studies)], lines)


def worst_miss(studies: dict[str, Study]) -> str:
    """Return the largest budget miss in percent, rounded up."""
    misses = [abs(miss) for study in studies.values() for _, miss in study.misses().values()]
    return f"{math.ceil(1000 * max(misses)) / 10:.1f}"


def front_table() -> str:
    """Return the table at the top of the README."""
    lines = []
    for title, name in _FRONT.items():
        study = Study(name)
        command = f"`dg-lightning study --config studies/{name} --output DIR`"
        figures = [study.percent("dynamicgate"), study.lead("dynamicgate")]
        lines.append([title, command, *figures, study.saved("dynamicgate")])
    columns = ["dataset, static gates", "made by", "test accuracy, %", "lead over dense, points"]
    return markdown_table([*columns, "MACs saved, %"], lines, words=2)


def with_front_table(readme: str) -> str:
    """Return the README with an updated table."""
    made, count = _FRONT_PLACE.subn(lambda found: found[1] + front_table() + found[2], readme)
    if count != 1:
        raise ValueError(
            "README.md needs one place for its table: add <!-- results --> and <!-- /results -->."
        )
    return made


def page() -> str:
    """Return RESULTS.md as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    named: Any = (summary, recipes, ramps_and_budgets, budgets, input_pays, worst_miss, of_tasks)
    named = (
        *named,
        of_trials,
        winners,
        of_drift,
        of_time_scales,
        of_tables,
        of_text,
        gap_by_seed,
        of_plasticity,
    )
    tables: dict[str, Any] = {function.__name__: function for function in named}
    made: dict[str, Any] = {path.stem: Study(path.stem) for path in sorted(HERE.glob("*.csv"))}
    made["curves"] = {title: Study("curves", name) for title, name in CURVE_DATASETS.items()}
    return environment.get_template("page.md.j2").render(**tables, **made)


if __name__ == "__main__":
    (HERE.parent / "RESULTS.md").write_text(page(), encoding="utf-8")
    readme = HERE.parent / "README.md"
    readme.write_text(with_front_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
