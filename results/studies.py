"""Read the studies in `results/*.csv`, and format their figures as text."""

import csv
import statistics
from pathlib import Path
from typing import Any

import yaml

from dg_lightning.configs import config_path
from dg_lightning.study.tables import (
    TEXTS,
    describe_training,
    markdown_table,
    paired_difference,
    published,
    published_remarks,
)

HERE = Path(__file__).parent
SPARSE = ("rigl_equal", "set_equal")
CURVES = {  # method -> beginning of its variants in the study `curves`
    "static gates": "dynamicgate",
    "gates by input": "dynamicgate_input",
    "gates and RigL": "dynamicgate_rigl",
    "RigL alone": "rigl",
    "pruning": "pruned",
}
CURVE_DATASETS = {
    "MNIST": "mnist",
    "Fashion-MNIST": "fashion_mnist",
    "CIFAR-10": "cifar10",
    "PBMC3k": "pbmc3k",
}


class Study:
    """The runs of one study, and their figures as text.

    Args:
        name: Name of the study, its config and its table.
        dataset: Dataset whose rows are read, of a study of several.
    """

    def __init__(self, name: str, dataset: str | None = None) -> None:
        self.name = name
        self.config = yaml.safe_load(Path(config_path(f"studies/{name}")).read_text())
        with (HERE / f"{name}.csv").open(encoding="utf-8") as file:
            self.rows: list[dict[str, Any]] = [
                {k: v if k in TEXTS else float(v or "nan") for k, v in line.items()}
                for line in csv.DictReader(file)
                if dataset in (None, line["dataset"])
            ]
        order = list(self.config["variants"])
        self.rows.sort(key=lambda row: (order.index(row["variant"]), row["seed"]))
        self.variants = list(dict.fromkeys(row["variant"] for row in self.rows))
        self.paper = published(self.config.get("paper", self.config["dataset"]))

    def rows_of(self, variant: str) -> list[dict[str, Any]]:
        """Return the rows of a variant."""
        return [row for row in self.rows if row["variant"] == variant]

    def values(self, variant: str, key: str) -> list[float]:
        """Return a column of a variant, one value per seed."""
        return [row[key] for row in self.rows_of(variant)]

    def mean(self, variant: str, key: str) -> str:
        """Return the mean over seeds."""
        return f"{statistics.fmean(self.values(variant, key)):.2f}"

    def percent(self, variant: str, key: str = "accuracy") -> str:
        """Return mean and standard deviation over seeds, in percent."""
        return spread([100 * value for value in self.values(variant, key)])

    def lead(self, variant: str, over: str = "baseline") -> str:
        """Return the mean paired difference by seed, with its standard error, in points."""
        if variant == over:
            return ""
        found = paired_difference(self.rows, variant, over)
        if found is None or found[2] != len(self.values(variant, "seed")):
            raise ValueError(f"{self.name}: {variant} and {over} need the same seeds.")
        mean, error, _ = found
        points = round(100 * mean, 2) + 0.0  # not -0.0
        return f"{points:+.2f}" + ("" if error is None else f" ± {100 * error:.2f}")

    def saved(self, variant: str) -> str:
        """Return the saved share of the dense net's MACs, in percent."""
        (dense,) = set(self.values("baseline", "macs_dense"))
        return spread([100 * (1 - macs / dense) for macs in self.values(variant, "macs")])

    def paper_saved(self, variant: str) -> str:
        """Return the saved share reported by the paper, if any, in percent."""
        share = self.paper["rows"].get(variant, {}).get("macs_reduction")
        return "" if share is None else f"{100 * share:.2f}"

    def open_rates(self, variant: str) -> str:
        """Return the open rates by gate in percent; empty if there are no gates or no records."""
        runs = [row.get("open_rates", "").split(" / ") for row in self.rows_of(variant)]
        if not all(run[0] for run in runs):
            return ""
        return " / ".join(
            f"{100 * statistics.fmean(map(float, gate)):.1f}" for gate in zip(*runs, strict=True)
        )

    def used(self, variant: str) -> list[float]:
        """Return executed MACs as a share of the variant's own dense net, by seed."""
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
        """Return each variant's budget, and the relative error of its use."""
        asked = {v: share for v in self.variants if (share := self.budget(v)) is not None}
        means = {v: statistics.fmean(self.used(v)) for v in asked}
        return {v: (share, means[v] / share - 1) for v, share in asked.items()}

    def best_sparse(self) -> str:
        """Return the sparse variant with the fused net's MACs and the best validation accuracy."""
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
        """Return remarks on the paper's rows."""
        return published_remarks(self.paper, self.rows)

    @property
    def training(self) -> str:
        """Description of how the variants were trained."""
        return describe_training(self.rows)

    @property
    def devices(self) -> str:
        """Devices on which they were trained, as text."""
        names = {"cpu": "a CPU", "cuda": "a GPU"}
        return " and ".join(names[device] for device in sorted({r["device"] for r in self.rows}))


def spread(values: list[float]) -> str:
    """Return mean ± standard deviation."""
    mean = statistics.fmean(values)
    return f"{mean:.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")
