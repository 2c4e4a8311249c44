"""Make RESULTS.md from the tables of the studies and `page.md.j2`: `make results`.

The table at the top of README.md is made with it.
"""

import csv
import math
import re
import statistics
from pathlib import Path
from typing import Any

import jinja2
import yaml

from dg_lightning.configs import config_path
from dg_lightning.study.published import published
from dg_lightning.study.tables import (
    TEXTS,
    describe_training,
    markdown_table,
    paired_difference,
    published_remarks,
)

HERE = Path(__file__).parent
SPARSE = ("rigl_equal", "set_equal")
_FRONT = {
    "MNIST 784-256-10": "mnist",
    "PBMC3k 2000-1000-500, published labels": "pbmc3k",
    "CIFAR-10 3072-1024-512-10": "cifar10",
}
_FRONT_PLACE = re.compile(r"(<!-- results -->\n).*?(\n<!-- /results -->)", re.DOTALL)


class Study:
    """The runs of one study, and their figures as text.

    Args:
        name: Name of the study, of its config and of its table.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.config = yaml.safe_load(Path(config_path(f"studies/{name}")).read_text())
        with (HERE / f"{name}.csv").open(encoding="utf-8") as file:
            self.rows: list[dict[str, Any]] = [
                {k: v if k in TEXTS else float(v or "nan") for k, v in line.items()}
                for line in csv.DictReader(file)
            ]
        order = list(self.config["variants"])
        self.rows.sort(key=lambda row: (order.index(row["variant"]), row["seed"]))
        self.variants = list(dict.fromkeys(row["variant"] for row in self.rows))
        self.paper = published(self.config.get("paper", self.config["dataset"]))

    def values(self, variant: str, key: str) -> list[float]:
        """Return a column of a variant, by seed."""
        return [row[key] for row in self.rows if row["variant"] == variant]

    def mean(self, variant: str, key: str) -> str:
        """Return the mean over seeds."""
        return f"{statistics.fmean(self.values(variant, key)):.2f}"

    def percent(self, variant: str, key: str = "accuracy") -> str:
        """Return mean and standard deviation over seeds, in percent."""
        return spread([100 * value for value in self.values(variant, key)])

    def lead(self, variant: str, over: str = "baseline") -> str:
        """Return the mean of differences of equal seeds, with its standard error, in points."""
        if variant == over:
            return ""
        found = paired_difference(self.rows, variant, over)
        if found is None or found[2] != len(self.values(variant, "seed")):
            raise ValueError(f"{self.name}: {variant} and {over} need the same seeds.")
        mean, error, _ = found
        points = round(100 * mean, 2) + 0.0  # not -0.0
        return f"{points:+.2f}" + ("" if error is None else f" ± {100 * error:.2f}")

    def saved(self, variant: str) -> str:
        """Return the share of the dense net's MACs that is not executed, in percent."""
        (dense,) = set(self.values("baseline", "macs_dense"))
        return spread([100 * (1 - macs / dense) for macs in self.values(variant, "macs")])

    def paper_saved(self, variant: str) -> str:
        """Return the paper's figure of the same, if there is one."""
        share = self.paper["rows"].get(variant, {}).get("macs_reduction")
        return "" if share is None else f"{100 * share:.2f}"

    def used(self, variant: str) -> list[float]:
        """Return executed MACs as shares of the own dense net, by seed."""
        pairs = zip(self.values(variant, "macs"), self.values(variant, "macs_dense"), strict=True)
        return [macs / dense for macs, dense in pairs]

    def budget(self, variant: str) -> float | None:
        """Return the budget of a variant, from its config and the study's options."""
        settings = self.config["variants"][variant]
        path = Path(config_path(settings.get("config") or f"{self.config['dataset']}/{variant}"))
        for option in settings.get("options", []):
            if option.startswith("trainer.callbacks.") and "budget=" in option:
                return float(option.split("=")[1])
        for callback in yaml.safe_load(path.read_text())["trainer"]["callbacks"]:
            if callback["class_path"].endswith("BudgetController"):
                return float(callback["init_args"]["budget"])
        return None

    def misses(self) -> dict[str, tuple[float, float]]:
        """Return the budget of each variant that has one, and by what share of it use is off."""
        asked = {v: share for v in self.variants if (share := self.budget(v)) is not None}
        means = {v: statistics.fmean(self.used(v)) for v in asked}
        return {v: (share, means[v] / share - 1) for v, share in asked.items()}

    def best_sparse(self) -> str:
        """Return the sparse variant with the MACs of the fused net that validates best."""
        found = [v for v in SPARSE if v in self.variants]
        return max(found, key=lambda v: statistics.fmean(self.values(v, "val_accuracy")))

    def table(self) -> str:
        """Return the table of all variants."""
        columns = ["variant", "runs", "test accuracy, %", "lead, points", "macro-F1, %"]
        columns += ["MACs", "decisions", "saved, %", "paper: accuracy, saved, %"]
        lines = []
        for v in self.variants:
            row = self.paper["rows"].get(v, {})
            said = [row.get("accuracy"), row.get("macs_reduction")]
            paper = ", ".join(f"{100 * x:.2f}" if x is not None else "-" for x in said)
            means = [statistics.fmean(self.values(v, key)) for key in ("macs", "gate_macs")]
            runs = str(len(self.values(v, "accuracy")))
            figures = [self.percent(v), self.lead(v), self.percent(v, "macro_f1")]
            figures += [f"{mean:,.0f}" for mean in means] + [self.saved(v)]
            lines.append(
                [f"`{v}`", runs, *figures, paper if any(x is not None for x in said) else ""]
            )
        return markdown_table(columns, lines)

    def remarks(self) -> str:
        """Return what is to be said of the paper's rows."""
        return published_remarks(self.paper, self.rows)

    @property
    def training(self) -> str:
        """How the variants were trained."""
        return describe_training(self.rows)

    @property
    def devices(self) -> str:
        """Where they were trained."""
        names = {"cpu": "a CPU", "cuda": "a GPU"}
        return " and ".join(names[device] for device in sorted({r["device"] for r in self.rows}))


def spread(values: list[float]) -> str:
    """Return mean ± standard deviation."""
    mean = statistics.fmean(values)
    return f"{mean:.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def summary(studies: dict[str, Study]) -> str:
    """Return the main rows of each dataset."""
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


def budgets(studies: dict[str, Study]) -> str:
    """Return what every budget was, what tests used, and what the landing cost."""
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
    """Return leads of input-dependent gates: over static ones, and of a wide net over dense."""
    lines = []
    for title, study in studies.items():
        static = "dynamicgate_equal" if "dynamicgate_equal" in study.variants else "dynamicgate"
        wide = "dynamicgate_wide" if "dynamicgate_wide" in study.variants else None
        pair = [study.saved(v) for v in ("dynamicgate_input", static)]
        over = "" if wide is None else study.lead(wide)
        lines.append([title, study.lead("dynamicgate_input", static), *pair, over])
    columns = ["dataset", "input over static", "saved, %: input", "static", "wide over dense"]
    return markdown_table(columns, lines)


def of_tasks(study: Study) -> str:
    """Return what is known of tasks after the last one, and what was lost of them."""
    lines = []
    for v in study.variants:
        runs = str(len(study.values(v, "accuracy")))
        keys = ("tasks_average_accuracy", "tasks_forgetting")
        used = f"{100 * statistics.fmean(study.used(v)):.1f}"
        lines.append([f"`{v}`", runs, *(study.percent(v, key) for key in keys), used])
    columns = ["variant", "runs", "average accuracy, %", "forgetting, points", "MACs, %"]
    return markdown_table(columns, lines)


def of_drift(study: Study) -> str:
    """Return what adaptation wins and costs, with standard errors."""
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
    """Return accuracy or R² of dense nets, gated nets and gradient boosting on each table."""
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
    """Return accuracies by how fast gates and how often connections move."""
    lines = [[f"`{v}`", *(study.percent(v) for study in studies)] for v in studies[0].variants]
    return markdown_table(["variant", *(study.config["dataset"] for study in studies)], lines)


def worst_miss(studies: dict[str, Study]) -> str:
    """Return the largest of their misses, in percent, rounded up."""
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
    """Return the README with its current table."""
    made, count = _FRONT_PLACE.subn(lambda found: found[1] + front_table() + found[2], readme)
    if count != 1:
        raise ValueError("README.md needs one place for its table, between <!-- results --> marks.")
    return made


def page() -> str:
    """Return the page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    named: Any = (summary, budgets, input_pays, worst_miss, of_tasks, of_drift, of_time_scales)
    tables: dict[str, Any] = {function.__name__: function for function in (*named, of_tables)}
    made: dict[str, Any] = {path.stem: Study(path.stem) for path in sorted(HERE.glob("*.csv"))}
    return environment.get_template("page.md.j2").render(**tables, **made)


if __name__ == "__main__":
    (HERE.parent / "RESULTS.md").write_text(page(), encoding="utf-8")
    readme = HERE.parent / "README.md"
    readme.write_text(with_front_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
