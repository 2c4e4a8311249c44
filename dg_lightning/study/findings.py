"""Results of a search: the Pareto front, and the cheapest net within the tolerance."""

import io
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from optuna.trial import FrozenTrial, TrialState

from dg_lightning.files import write_text
from dg_lightning.study.shared import SharedStudy
from dg_lightning.study.tables import write_csv
from dg_lightning.study.training import RunCommand

if TYPE_CHECKING:
    from dg_lightning.study.search import Search

__all__ = ["cheapest_within", "count_dominating", "format_params", "pareto_front", "write_results"]


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


def write_results(
    search: "Search", shared: SharedStudy, run_command: RunCommand | None = None
) -> str:
    """Write results.csv, summary.md, and the configs of the Pareto front and the chosen trial.

    Args:
        search: The search.
        shared: Its trials.
        run_command: Runs `fit`, which also resolves options; None to write no configs.
    """
    trials = shared.trials(*TrialState)
    finished = [t for t in trials if t.state is TrialState.COMPLETE]
    baseline = next((t for t in finished if t.user_attrs.get("kind")), None)
    others = [t for t in finished if not t.user_attrs.get("kind")]
    candidates = [t for t in others if search.values_of(t) is not None]
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
        if run_command is not None:
            config = _resolved_config(search, trial, run_command)
            write_text(_front_path(search, trial), config)
        accuracy, macs = trial.values
        share = f"{macs / baseline.values[1]:.1%}" if baseline is not None else ""
        settings = ", ".join(f"`{value}`" for value in format_params(trial))
        lines.append(f"| {trial.number} | {accuracy:.2%} | {macs:,.0f} | {share} | {settings} |")
    text = f"# Search of {search.base}\n\nPareto front, by validation:\n\n" + "\n".join(lines)
    if unknown := len(others) - len(candidates):
        text += f"\n\n{unknown} trials are left out: their parameters are not those searched."
    path = search.folder / "cheapest.yaml"
    path.unlink(missing_ok=True)  # may be of an earlier choice
    if baseline is None:
        text += "\n\nThe baseline has not finished or has failed: there is nothing to compare with."
    else:
        text += f"\n\nBaseline: {baseline.values[0]:.2%} at {baseline.values[1]:,.0f} MACs."
        chosen = cheapest_within(candidates, baseline.values[0], search.tolerance)
        if chosen is None:
            text += f" No trial is within {100 * search.tolerance:.2f} points of it."
        elif run_command is not None:
            write_text(path, _resolved_config(search, chosen, run_command))
            text += (
                f" The cheapest within {100 * search.tolerance:.2f} points is trial "
                f"{chosen.number}: `dg-lightning fit --config {shlex.quote(str(path))}`."
            )
    write_text(search.folder / "summary.md", text + "\n")
    return text


def _front_path(search: "Search", trial: FrozenTrial) -> Path:
    return search.folder / "pareto" / f"trial_{trial.number}.yaml"


def _resolved_config(search: "Search", trial: FrozenTrial, run_command: RunCommand) -> str:
    """Return the whole config of a trial, made from the base and its parameters alone."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            run_command(["fit", *search.arguments(search.values_of(trial)), "--print_config"], ())
    except SystemExit as end:  # which ends every `--print_config`
        if end.code not in (0, None):
            raise
    return printed.getvalue()
