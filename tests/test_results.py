import csv
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "results")  # as if run as a script
    page = SimpleNamespace(**runpy.run_path(str(ROOT / "results" / "page.py")))


def column(name: str, variant: str, key: str) -> np.ndarray:
    with (ROOT / "results" / f"{name}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == variant]
    return np.array([float(row[key]) for row in sorted(rows, key=lambda row: int(row["seed"]))])


def test_results_and_readme_are_as_make_results_writes_them() -> None:
    readme = (ROOT / "README.md").read_text()
    assert (ROOT / "RESULTS.md").read_text() == page.page()
    assert readme == page.with_front_table(readme)


def test_figures_of_a_row_are_those_of_its_runs() -> None:
    study = page.Study("mnist")
    dense, gated = (column("mnist", v, "accuracy") for v in ("baseline", "dynamicgate"))
    saved = 100 - 100 * column("mnist", "dynamicgate", "macs") / 203264
    lead = 100 * (gated - dense)
    assert study.percent("baseline") == f"{100 * dense.mean():.2f} ± {100 * dense.std(ddof=1):.2f}"
    assert study.lead("dynamicgate") == f"{lead.mean():+.2f} ± {lead.std(ddof=1) / 5**0.5:.2f}"
    assert study.saved("dynamicgate") == f"{saved.mean():.2f} ± {saved.std(ddof=1):.2f}"


def test_figures_of_text_and_plasticity_are_those_of_their_runs() -> None:
    narrow, dense, gated = (
        column("text", v, "loss") for v in ("narrow", "baseline", "dynamicgate")
    )
    closed = (narrow.mean() - gated.mean()) / (narrow.mean() - dense.mean())
    row = next(
        line for line in page.of_text(page.Study("text")).splitlines() if "`dynamicgate`" in line
    )
    assert f"| {gated.mean():.4f} ± {gated.std(ddof=1):.4f} | {100 * closed:.0f} |" in row
    lost = 100 * column("plasticity", "naive", "tasks_plasticity")
    table = page.of_plasticity(page.Study("plasticity"))
    assert f"| {lost.mean():.2f} ± {lost.std(ddof=1):.2f} |" in table


def test_the_budget_of_a_variant_is_what_its_study_asks_for() -> None:
    study = page.Study("mnist")
    assert study.budget("dynamicgate") == 0.198  # from its config
    assert study.budget("dynamicgate_equal") == 0.4  # from an option of the study
    assert study.budget("rigl") is None


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/*.csv")), ids=lambda path: path.stem)
def test_every_run_of_a_variant_was_completed(path: Path) -> None:
    config = yaml.safe_load((ROOT / "configs" / "studies" / f"{path.stem}.yaml").read_text())
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows} == {"complete"}
    runs = sorted((row["dataset"], row["variant"], int(row["seed"])) for row in rows)
    variants = {(row["dataset"], row["variant"]) for row in rows}
    assert {variant for _, variant in variants} <= set(config["variants"])
    assert runs == sorted((*v, seed) for v in variants for seed in range(config.get("seeds", 5)))


def test_a_lead_needs_runs_of_both(two_runs: Any) -> None:
    with pytest.raises(ValueError, match=r"mnist: rigl and baseline need the same seeds"):
        two_runs.lead("rigl")


def test_misses_are_shares_of_budgets_and_rounded_up(two_runs: Any) -> None:
    dense = two_runs.rows[0]["macs_dense"]
    for row in two_runs.rows:
        row["macs"] = 0.198 * dense * 1.0123
    two_runs.variants = ["dynamicgate"]
    assert page.worst_miss({"MNIST": two_runs}) == "1.3"


@pytest.fixture
def two_runs() -> Any:
    """The study of MNIST with a run of `baseline` and one of `dynamicgate`."""
    study = page.Study("mnist")
    of = [r for r in study.rows if r["variant"] in ("baseline", "dynamicgate") and r["seed"] == 0]
    study.rows = of
    return study


def test_a_readme_without_a_place_for_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README.md needs one place for its table"):
        page.with_front_table("# dg-lightning\n")
