"""Results of a search: the Pareto front, and the cheapest net within the tolerance."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from optuna.trial import FrozenTrial, TrialState

from dg_lightning.configs import config_path
from dg_lightning.files import write_text
from dg_lightning.study.shared import SharedStudy
from dg_lightning.study.tables import write_csv

if TYPE_CHECKING:
    from dg_lightning.study.search import Search

__all__ = ["cheapest_within", "count_dominating", "format_params", "pareto_front", "write_results"]

# Trainer options that are restored from the base config: output folders and display.
_BASE_OPTIONS = ("default_root_dir", "logger", "enable_progress_bar", "enable_model_summary")


def count_dominating(
    curve: Sequence[Sequence[float]], others: Sequence[Sequence[Sequence[float]]]
) -> int:
    """Count the runs that were more accurate at this one's last epoch, at no more MACs.

    >>> others = [[(0.2, 1.0), (0.6, 0.6)], [(0.3, 1.0), (0.4, 0.1)]]
    >>> count_dominating([(0.1, 1.0), (0.5, 0.6)], others)
    1
    """
    accuracy, macs = curve[-1]
    points = [other[len(curve) - 1] for other in others if len(other) >= len(curve)]
    return sum(a > accuracy and m <= macs for a, m in points)


def format_params(trial: FrozenTrial) -> list[str]:
    """Return the parameters of a trial as short `name=value` strings."""
    return [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in trial.params.items()
    ]


def pareto_front(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that no other dominates, cheapest first."""
    front: list[FrozenTrial] = []
    for trial in sorted(trials, key=lambda t: (t.values[1], -t.values[0])):
        if not front or trial.values[0] > front[-1].values[0]:
            front.append(trial)
    return front


def cheapest_within(
    trials: Sequence[FrozenTrial], accuracy: float, tolerance: float
) -> FrozenTrial | None:
    """Return the cheapest trial whose accuracy is at most `tolerance` below `accuracy`."""
    eligible = [trial for trial in trials if trial.values[0] >= accuracy - tolerance]
    return min(eligible, key=lambda t: (t.values[1], -t.values[0]), default=None)


def write_results(search: "Search", shared: SharedStudy) -> str:
    """Write results.csv, summary.md, and the configs of the Pareto front and the chosen trial."""
    trials = shared.trials(*TrialState)
    finished = [t for t in trials if t.state is TrialState.COMPLETE]
    baseline = next((t for t in finished if t.user_attrs.get("kind")), None)
    candidates = [t for t in finished if not t.user_attrs.get("kind")]
    rows = [
        {
            "trial": trial.number,
            "kind": trial.user_attrs.get("kind", "search"),
            "val_accuracy": trial.values[0] if trial.values else None,
            "macs": trial.values[1] if trial.values else None,
            "train_seconds": trial.user_attrs.get("train_seconds"),
            "status": trial.state.name.lower(),
            "reason": trial.user_attrs.get("reason") or trial.user_attrs.get("given_up"),
            **trial.params,
        }
        for trial in trials
        if trial.state.is_finished()
    ]
    write_csv(search.folder / "results.csv", rows, ["trial", "kind", "val_accuracy", "macs"])
    front = pareto_front(candidates)
    for path in (search.folder / "pareto").glob("trial_*.yaml"):
        if path.stem not in {f"trial_{trial.number}" for trial in front}:
            path.unlink(missing_ok=True)  # no longer on the front
    lines = [
        "| trial | validation accuracy | MACs | of the baseline's | settings |",
        "|---|---:|---:|---:|---|",
    ]
    for trial in front:
        _write_config(search, trial, search.folder / "pareto" / f"trial_{trial.number}.yaml")
        accuracy, macs = trial.values
        share = f"{macs / baseline.values[1]:.1%}" if baseline is not None else ""
        settings = ", ".join(f"`{value}`" for value in format_params(trial))
        lines.append(f"| {trial.number} | {accuracy:.2%} | {macs:,.0f} | {share} | {settings} |")
    text = f"# Search of {search.base}\n\nPareto front, by validation:\n\n" + "\n".join(lines)
    path = search.folder / "cheapest.yaml"
    path.unlink(missing_ok=True)  # may be of an earlier choice
    if baseline is None:
        text += "\n\nThe baseline has not finished or has failed: there is nothing to compare with."
    else:
        text += f"\n\nBaseline: {baseline.values[0]:.2%} at {baseline.values[1]:,.0f} MACs."
        chosen = cheapest_within(candidates, baseline.values[0], search.tolerance)
        if chosen is None:
            text += f" No trial is within {100 * search.tolerance:.2f} points of it."
        else:
            _write_config(search, chosen, path)
            text += (
                f" The cheapest within {100 * search.tolerance:.2f} points is trial "
                f"{chosen.number}: `dg-lightning fit --config {shlex.quote(str(path))}`."
            )
    write_text(search.folder / "summary.md", text + "\n")
    return text


def _write_config(search: "Search", trial: FrozenTrial, path: Path) -> None:
    config = yaml.safe_load(trial.user_attrs["config"])
    base = yaml.safe_load(Path(config_path(search.base)).read_text(encoding="utf-8"))
    for key in _BASE_OPTIONS:
        config["trainer"].pop(key, None)
        if key in base.get("trainer", {}):
            config["trainer"][key] = base["trainer"][key]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, yaml.safe_dump(config, sort_keys=False))
