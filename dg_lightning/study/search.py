"""Hyperparameter search and its results."""

import dataclasses
import hashlib
import io
import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import optuna
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from dg_lightning.cli_error import CLIError
from dg_lightning.configs import config_path, resolve_config_paths
from dg_lightning.files import write_text
from dg_lightning.study.runner import RunRecorder, TrialLoggers, error_summary, train
from dg_lightning.study.settings import as_option, training_inputs
from dg_lightning.study.shared import (
    RunCommand,
    SharedStudy,
    claim_folder,
    given_params,
    run_workers,
    sqlite_url,
)
from dg_lightning.study.tables import write_rows


def count_dominating(
    curve: Sequence[Sequence[float]], others: Sequence[Sequence[Sequence[float]]]
) -> int:
    """Count runs with better accuracy and no more MACs at the last epoch of a curve.

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
    """Return the trials that no other trial dominates, cheapest first."""
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
        shared: The trials of the search.
        run_command: Runs `fit` to resolve options. If None, no configs are written.
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
    write_rows(search.folder / "results.csv", rows, ["trial", "kind", "val_accuracy", "macs"])
    front = pareto_front(candidates)
    for path in (search.folder / "pareto").glob("trial_*.yaml"):
        if path.stem not in {f"trial_{trial.number}" for trial in front}:
            path.unlink(missing_ok=True)  # no longer on the front
    lines = [
        "| trial | validation accuracy | MACs | share of baseline | settings |",
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
    text = f"# Search based on {search.base}\n\nPareto front on validation data:\n\n" + "\n".join(
        lines
    )
    if unknown := len(others) - len(candidates):
        text += f"\n\n{unknown} trials are omitted: their parameters are outside the search space."
    path = search.folder / "cheapest.yaml"
    path.unlink(missing_ok=True)  # may be left from an earlier choice
    if baseline is None:
        text += "\n\nThe baseline has failed or not finished, so there is nothing to compare with."
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
    """Return a trial's full config, resolved from the base config and the trial's parameters."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            run_command(
                ["fit", *search.arguments(search.values_of(trial)), "--print_config"], (), None
            )
    except SystemExit as end:  # raised by every `--print_config`
        if end.code not in (0, None):
            raise
    return printed.getvalue()


_BASELINE = "baseline"


@dataclass
class Parameter:
    """An option to search over.

    Args:
        name: Dotted option of `fit`, such as `model.gate_lr_factor`.
        low: Smallest value.
        high: Largest value; if both are integers, only integers are tried.
        log: Whether to sample on a log scale.
        step: Step between values.
        choices: List of values, instead of a range.
    """

    name: str
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    step: int | float | None = None
    choices: list[Any] | None = None

    def __post_init__(self) -> None:
        low, high = self.low, self.high
        if (low is None or high is None) != bool(self.choices):
            raise ValueError(f"Parameter {self.name!r} needs `low` and `high`, or `choices`.")
        if low is None or high is None:
            return
        if not low < high or (self.log and not low > 0):
            positive = " above 0 and" if self.log else ""
            raise ValueError(
                f"`low` of {self.name!r} must be{positive} below `high`, got {low} and {high}."
            )
        is_integer = isinstance(low, int) and isinstance(high, int)
        if self.step is not None and (self.log or (is_integer and not isinstance(self.step, int))):
            raise ValueError(
                f"`step` of {self.name!r} must be an integer if `low` and `high` are, and None if "
                f"`log` is true, got {self.step}."
            )

    def accepts(self, value: Any) -> bool:
        """Return True if a value stored by Optuna is in the search space."""
        if self.choices is not None:
            return value in [json.dumps(choice) for choice in self.choices]
        assert self.low is not None
        assert self.high is not None
        return isinstance(value, int | float) and self.low <= value <= self.high

    def value_of(self, stored: Any) -> Any:
        """Convert a value stored by Optuna to a value for `fit`."""
        if not self.accepts(stored):
            raise ValueError(f"{stored!r} is outside the search space of {self.name!r}.")
        return stored if self.choices is None else json.loads(stored)

    def suggest(self, trial: optuna.Trial) -> Any:
        """Suggest a value for a trial."""
        if self.choices is not None:
            # Optuna does not accept lists and dicts as values, so use their JSON.
            texts = [json.dumps(choice) for choice in self.choices]
            return self.value_of(trial.suggest_categorical(self.name, texts))
        assert self.low is not None
        assert self.high is not None
        if isinstance(self.low, int) and isinstance(self.high, int):
            step = self.step if isinstance(self.step, int) else 1
            options: dict[str, Any] = {"log": self.log, "step": step}
            return self.value_of(trial.suggest_int(self.name, self.low, self.high, **options))
        options = {"log": self.log, "step": self.step}
        return self.value_of(trial.suggest_float(self.name, self.low, self.high, **options))


@dataclass
class Search:
    """A search for good settings of a config.

    Args:
        base: The config whose options are searched: a file, or the short name of a shipped one.
        output: Folder for tables, configs and runs; an unfinished search is resumed.
        parameters: The options to search over.
        baseline: The config whose accuracy is the reference.
        trials: Number of training runs, not counting the baseline.
        tolerance: Largest accuracy loss, relative to the baseline, allowed for the cheaper net.
        options: Dotted options of `fit` for all runs, the baseline included.
        set: More options for use on the command line, applied after all others.
        sampler: `tpe`, `nsga2`, `random`, or `grid`, which tries all combinations of `choices`
            and ignores `trials`.
        seed: Seed of the sampler and of every run.
        dominated_by: Prune a run once this many others were more accurate and not more expensive
            at the same epoch; None disables pruning.
        min_prune_fraction: No run is pruned before it completes this share of its epochs.
        name: Name of the search in the storage, which may contain several searches.
        storage: URL of a database shared by workers on many machines; a file in `output` if None.
        workers: Number of training processes on this machine.
    """

    base: str
    output: str
    parameters: list[Parameter]
    baseline: str
    trials: int = 50
    tolerance: float = 0.005
    options: list[str] = field(default_factory=list)
    set: list[str] = field(default_factory=list)
    sampler: Literal["tpe", "nsga2", "random", "grid"] = "tpe"
    seed: int = 0
    dominated_by: int | None = 3
    min_prune_fraction: float = 0.5
    name: str = "search"
    storage: str | None = None
    workers: int = 1

    @property
    def fingerprint(self) -> str:
        """Settings that must be equal for results to be comparable, as JSON."""
        configs = [
            training_inputs([f"--config={config_path(config)}"])
            for config in (self.base, self.baseline)
        ]
        options = training_inputs(self._given([*self.options, *self.set]))
        parameters = [dataclasses.asdict(parameter) for parameter in self.parameters]
        return json.dumps([configs, options, parameters, self.seed])

    @staticmethod
    def _given(options: Sequence[str]) -> list[str]:
        return resolve_config_paths([as_option(text) for text in options])

    @property
    def folder(self) -> Path:
        """Output folder."""
        return Path(self.output)

    def open(self, worker: int = 0) -> SharedStudy:
        """Open the search, with a different sampler seed for each worker and run."""
        storage = self.storage or sqlite_url(self.folder)
        shared = SharedStudy(storage, self.name, self.folder / "workers")
        shared.study.sampler = self._sampler(1000 * worker + len(shared.trials(*TrialState)))
        return shared

    def _sampler(self, salt: int) -> BaseSampler:
        seed = self.seed + salt
        if self.sampler == "nsga2":
            return NSGAIISampler(seed=seed)
        return TPESampler(seed=seed) if self.sampler == "tpe" else RandomSampler(seed)

    def claim(self, shared: SharedStudy) -> optuna.Trial | None:
        """Start a waiting trial, or a new one if there are fewer than `trials`."""
        trials = 0 if self.sampler == "grid" else self.trials  # a grid is queued in advance
        is_left = shared.trials(TrialState.WAITING) or len(_counted(shared)) < trials
        return shared.ask() if is_left else None

    def count_unfinished(self, shared: SharedStudy) -> int:
        """Return how many trials are waiting or running."""
        return len(shared.trials(TrialState.WAITING, TrialState.RUNNING))

    def run(self, run_command: RunCommand, shared: SharedStudy, trial: optuna.Trial) -> str:
        """Train a trial and update the results. A failure does not stop the search."""
        is_baseline = trial.user_attrs.get("kind") == _BASELINE
        try:
            values = None if is_baseline else {p.name: p.suggest(trial) for p in self.parameters}
            pruning = DominancePruning(self, shared, trial)
            name = _BASELINE if is_baseline else f"trial_{trial.number}"
            folder = self.folder / "runs" / "trials" / f"trial_{trial.number}"
            stopwatch = RunRecorder()
            callbacks = [stopwatch, pruning]
            loggers = TrialLoggers(folder, f"{self.name}/{name}", "search")
            arguments = self.arguments(values)
            cli, _ = train(run_command, arguments, loggers, callbacks, test=False)
        except optuna.TrialPruned as reason:
            shared.prune(trial, str(reason))
        except (Exception, CLIError) as error:
            shared.fail(trial, error_summary(error))
        else:
            objectives = list(_objectives(cli.trainer.callback_metrics))
            shared.finish(trial, objectives, train_seconds=stopwatch.seconds)
        write_results(self, shared)
        return _progress_line(self, shared, trial)

    def arguments(self, values: Mapping[str, Any] | None) -> list[str]:
        """Return the `fit` arguments for parameter values, or for the baseline if None."""
        return [
            f"--config={config_path(self.baseline if values is None else self.base)}",
            *self._given(self.options),
            *(f"--{name}={json.dumps(value)}" for name, value in (values or {}).items()),
            *self._given(self.set),
            f"--seed_everything={self.seed}",
        ]

    def values_of(self, trial: FrozenTrial) -> dict[str, Any] | None:
        """Return a trial's parameters, or None if they are outside the search space.

        This can happen if another process has changed the shared database.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        if trial.params.keys() != known.keys():
            return None
        if not all(known[name].accepts(value) for name, value in trial.params.items()):
            return None
        return {name: known[name].value_of(value) for name, value in trial.params.items()}

    def grid(self) -> list[dict[str, str]]:
        """Return all combinations of the choices, as stored by Optuna."""
        for parameter in self.parameters:
            if parameter.choices is None:
                raise ValueError(f"`sampler: grid` needs `choices` for {parameter.name!r}.")
        choices = [[json.dumps(c) for c in p.choices or []] for p in self.parameters]
        names = [parameter.name for parameter in self.parameters]
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]


class DominancePruning(pl.Callback):
    """Prunes a run if enough other runs dominate it at the same epoch."""

    def __init__(self, search: Search, shared: SharedStudy, trial: optuna.Trial) -> None:
        self.search, self.shared, self.trial = search, shared, trial
        self.curve: list[tuple[float, float]] = []

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.curve.append(_objectives(trainer.callback_metrics))
        self.trial.set_user_attr("curve", self.curve)
        may_prune = len(self.curve) >= self.search.min_prune_fraction * (trainer.max_epochs or 0)
        is_baseline = self.trial.user_attrs.get("kind") == _BASELINE
        if self.search.dominated_by is None or is_baseline or not may_prune:
            return
        curves = [t.user_attrs["curve"] for t in self.shared.trials(TrialState.COMPLETE)]
        if count_dominating(self.curve, curves) >= self.search.dominated_by:
            raise optuna.TrialPruned(f"Others were better at epoch {len(self.curve)}.")


def _objectives(logged: Any) -> tuple[float, float]:
    for key in ("val/accuracy", "compute/macs"):
        if key not in logged:
            raise ValueError(
                f"A search needs `val/accuracy` and `compute/macs`, but {key} is not logged."
            )
    return float(logged["val/accuracy"]), float(logged["compute/macs"])


def run_search(search: Search, run_command: RunCommand) -> bool:
    """Run the unfinished trials, and write results, Pareto front and configs.

    Args:
        search: The search.
        run_command: Runs `fit`; provided by the command line.

    Returns:
        True if the baseline and all trials succeeded.
    """
    if search.trials < 1 or search.workers < 1:
        raise ValueError("`trials` and `workers` must be at least 1.")
    names = [parameter.name for parameter in search.parameters]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`parameters` must name one or more distinct options, got {names}.")
    claim_folder(search.folder, "search", "study")
    shared = search.open()
    trials = shared.trials(*TrialState)
    fingerprint = hashlib.sha256(search.fingerprint.encode()).hexdigest()
    if shared.study.user_attrs.get("fingerprint", fingerprint) != fingerprint:
        raise ValueError(
            f"{search.folder} contains a search with other settings: pass another `output`, or use "
            "the settings of that search."
        )
    shared.study.set_user_attr("fingerprint", fingerprint)
    not_failed = [trial for trial in trials if trial.state is not TrialState.FAIL]
    if not any(trial.user_attrs.get("kind") == _BASELINE for trial in not_failed):
        shared.enqueue({}, {"kind": _BASELINE})
    if search.sampler == "grid":
        tried = [given_params(trial) for trial in trials]
        for settings in search.grid():
            if settings not in tried:
                shared.enqueue(settings, {})
    run_workers(search, run_command)
    print(write_results(search, shared, run_command))
    failed = [t for t in shared.trials(TrialState.FAIL) if "reason" in t.user_attrs]
    if failed:
        print(f"{len(failed)} trials failed; results.csv gives the reasons.")
    return not failed


def _counted(shared: SharedStudy) -> list[FrozenTrial]:
    """Return all trials except the baseline and lost ones."""
    lost = {trial.number for trial in shared.lost()}
    trials = shared.trials(*TrialState)
    return [t for t in trials if t.number not in lost and t.user_attrs.get("kind") != _BASELINE]


def _progress_line(search: Search, shared: SharedStudy, trial: optuna.Trial) -> str:
    frozen = shared.study.get_trials(deepcopy=False)[trial.number]
    name = _BASELINE if frozen.user_attrs.get("kind") else ", ".join(format_params(frozen))
    if frozen.state is TrialState.COMPLETE:
        result = f"{frozen.values[0]:.2%} at {frozen.values[1]:,.0f} MACs"
    elif "given_up" in frozen.user_attrs:
        result = frozen.user_attrs["given_up"]
    else:
        result = f"failed, {frozen.user_attrs.get('reason', 'reassigned to another worker')}"
    done = [t for t in _counted(shared) if t.state.is_finished()]
    total = max(0 if search.sampler == "grid" else search.trials, len(_counted(shared)))
    return f"[{len(done)}/{total}] {name}: {result}"
