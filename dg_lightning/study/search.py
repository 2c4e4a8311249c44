"""The search for settings: validation accuracy against executed MACs, and what is worth having."""

import dataclasses
import hashlib
import itertools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import optuna
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from dg_lightning.study.findings import dominated_by, values_of, write_results
from dg_lightning.study.runner import claim_folder, in_workers, reason_of
from dg_lightning.study.settings import as_option, what_is_trained
from dg_lightning.study.shared import SharedStudy, storage_in
from dg_lightning.study.training import Stopwatch, train

__all__ = ["Parameter", "Search", "run_search"]

_BASELINE = "baseline"


@dataclass
class Parameter:
    """A value to be searched.

    Args:
        name: Its dotted option of `fit`, as `model.gate_lr_factor`.
        low: Smallest value.
        high: Largest value; where both are whole numbers, so are all between.
        log: Whether to search by orders of magnitude.
        step: Distance of the values.
        choices: The values themselves, instead of a range.
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
            least = " above 0," if self.log else ""
            raise ValueError(
                f"Parameter {self.name!r} needs `low`{least} below `high`, got {low} and {high}."
            )
        whole = isinstance(low, int) and isinstance(high, int)
        if self.step is not None and (self.log or (whole and not isinstance(self.step, int))):
            raise ValueError(
                f"`step` of {self.name!r} goes with whole numbers as whole, and not with `log`; "
                f"got {self.step}."
            )

    def suggest(self, trial: optuna.Trial) -> Any:
        """Return the value for a trial."""
        if self.choices is not None:
            # Lists and the like are no values to Optuna; their text is.
            texts = [json.dumps(choice) for choice in self.choices]
            return json.loads(trial.suggest_categorical(self.name, texts))
        assert self.low is not None
        assert self.high is not None
        if isinstance(self.low, int) and isinstance(self.high, int):
            step = self.step if isinstance(self.step, int) else 1
            return trial.suggest_int(self.name, self.low, self.high, log=self.log, step=step)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log, step=self.step)


@dataclass
class Search:
    """A search for the settings of a config.

    Args:
        base: The config whose values are searched: a file, or the short name of one that ships.
        output: Folder for tables, configs and runs; an unfinished search goes on there.
        parameters: What is searched.
        baseline: The config that the accuracy is compared with.
        trials: How many trainings, beside the baseline's.
        tolerance: How far below the baseline's accuracy a cheaper net may be.
        options: Dotted options of `fit` for all trainings, the baseline's too.
        set: The same, after all others; for the command line.
        sampler: What proposes settings: `tpe`, `nsga2`, `random`, or `grid`, which tries all
            combinations of `choices`, however many `trials` say.
        seed: Seed of the proposals and of every training.
        dominated_by: A training is given up when so many others were more accurate and cheaper at
            the same epoch; None lets all run to their end.
        give_up_after: Share of the epochs before which none is given up.
        name: Name of the search in the storage, where there are several.
        storage: URL of a database that workers on many machines share; a file in `output` if None.
        workers: Processes of this machine that train at the same time.
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
    give_up_after: float = 0.5
    name: str = "search"
    storage: str | None = None
    workers: int = 1

    @property
    def fingerprint(self) -> str:
        """Change when results would not be comparable any more."""
        from dg_lightning.cli.configs import config_path

        of_both = [
            what_is_trained([f"--config={config_path(config)}"])
            for config in (self.base, self.baseline)
        ]
        options = what_is_trained([as_option(text) for text in [*self.options, *self.set]])
        searched = [dataclasses.asdict(parameter) for parameter in self.parameters]
        return json.dumps([of_both, options, searched, self.seed])

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        return Path(self.output)

    def study(self, salt: int = 0) -> SharedStudy:
        """Open the search; workers with different salts propose differently."""
        storage = self.storage or storage_in(self.folder)
        return SharedStudy(storage, self.name, self.folder / "workers", self._sampler(salt))

    def _sampler(self, salt: int) -> BaseSampler:
        seed = self.seed + salt
        if self.sampler == "nsga2":
            return NSGAIISampler(seed=seed)
        return TPESampler(seed=seed) if self.sampler == "tpe" else RandomSampler(seed)

    def grid(self) -> list[dict[str, str]]:
        """Return all combinations of the choices, as Optuna has them."""
        for parameter in self.parameters:
            if parameter.choices is None:
                raise ValueError(f"`sampler: grid` needs `choices` of {parameter.name!r}.")
        choices = [[json.dumps(c) for c in p.choices or []] for p in self.parameters]
        names = [parameter.name for parameter in self.parameters]
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]


class GiveUp(pl.Callback):
    """Ends a training that others have beaten in both respects at the same epoch."""

    def __init__(self, search: Search, shared: SharedStudy, trial: optuna.Trial) -> None:
        self.search, self.shared, self.trial = search, shared, trial
        self.curve: list[tuple[float, float]] = []

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.curve.append(_point(trainer.callback_metrics))
        self.trial.set_user_attr("curve", self.curve)
        late = len(self.curve) >= self.search.give_up_after * (trainer.max_epochs or 0)
        if self.search.dominated_by is None or not late:
            return
        curves = [t.user_attrs["curve"] for t in self.shared.trials(TrialState.COMPLETE)]
        if dominated_by(self.curve, curves) >= self.search.dominated_by:
            raise optuna.TrialPruned(f"Others were better at epoch {len(self.curve)}.")


def _point(logged: Any) -> tuple[float, float]:
    """Return accuracy and executed MACs."""
    for key in ("val/accuracy", "compute/macs"):
        if key not in logged:
            raise ValueError(f"A search compares `val/accuracy` and `compute/macs`; no {key} here.")
    return float(logged["val/accuracy"]), float(logged["compute/macs"])


def run_search(search: Search) -> bool:
    """Train what is not done yet; write all results, the Pareto front and its configs.

    Returns:
        Whether the baseline and all trials went well.
    """
    if search.trials < 1 or search.workers < 1:
        raise ValueError("`trials` and `workers` must be at least 1.")
    names = [parameter.name for parameter in search.parameters]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`parameters` must be different dotted options, got {names}.")
    claim_folder(search.folder, "search", "study")
    shared = search.study()
    known = shared.trials(*TrialState)
    asked = hashlib.sha256(search.fingerprint.encode()).hexdigest()
    if shared.study.user_attrs.get("asked", asked) != asked:
        raise ValueError(
            f"{search.folder} holds a search with other settings: give another `output`, or the "
            "settings it was begun with."
        )
    shared.study.set_user_attr("asked", asked)
    good = [trial for trial in known if trial.state is not TrialState.FAIL]
    if not any(trial.user_attrs.get("kind") == _BASELINE for trial in good):
        shared.enqueue({}, {"kind": _BASELINE})
    if search.sampler == "grid":
        tried = [{**t.system_attrs.get("fixed_params", {}), **t.params} for t in known]
        for settings in search.grid():
            if settings not in tried:
                shared.enqueue(settings, {})
        search = dataclasses.replace(search, trials=0)  # but for those that wait
    in_workers(_work, search, search.workers)
    print(write_results(search, shared))
    failed = [t for t in shared.trials(TrialState.FAIL) if "reason" in t.user_attrs]
    if failed:
        print(f"{len(failed)} trials have failed; results.csv says why.")
    return not failed


def _work(search: Search, index: int, parent: int | None) -> None:
    with search.study(salt=1000 * index + len(search.study().trials(*TrialState))) as shared:
        while parent is None or os.getppid() == parent:
            _take_up_lost(shared)
            if len(_counted(shared)) >= search.trials and not shared.trials(TrialState.WAITING):
                return
            trial = shared.ask()
            with shared.beating(trial):
                _try(search, shared, trial)
            write_results(search, shared)


def _take_up_lost(shared: SharedStudy) -> None:
    """Let the settings that a worker has died with be tried again."""
    again = {trial.user_attrs.get("again") for trial in shared.trials(*TrialState)}
    for trial in shared.lost():
        if trial.number not in again:
            facts = {"again": trial.number}
            if "kind" in trial.user_attrs:
                facts["kind"] = trial.user_attrs["kind"]
            shared.enqueue(dict(trial.params), facts)


def _counted(shared: SharedStudy) -> list[FrozenTrial]:
    """Return the trials that count: done, given up, at it, waiting, or failed for a reason."""
    lost = {trial.number for trial in shared.lost()}
    every = shared.trials(*TrialState)
    return [t for t in every if t.number not in lost and t.user_attrs.get("kind") != _BASELINE]


def _try(search: Search, shared: SharedStudy, trial: optuna.Trial) -> None:
    from dg_lightning.cli.configs import config_path
    from dg_lightning.cli.errors import Refusal

    is_baseline = trial.user_attrs.get("kind") == _BASELINE
    try:
        config = config_path(search.baseline if is_baseline else search.base)
        values = {} if is_baseline else {p.name: p.suggest(trial) for p in search.parameters}
        arguments = [
            f"--config={config}",
            *map(as_option, search.options),
            *(f"--{name}={json.dumps(value)}" for name, value in values.items()),
            *map(as_option, search.set),
            f"--seed_everything={search.seed}",
        ]
        rule = dataclasses.replace(search, dominated_by=None) if is_baseline else search
        watch, giving_up = Stopwatch(), GiveUp(rule, shared, trial)
        folder = search.folder / "runs" / "trials" / f"trial_{trial.number}"
        cli, _ = train(arguments, folder, [watch, giving_up], test=False)
    except optuna.TrialPruned as reason:
        shared.give_up(trial, str(reason))
    except (Exception, Refusal) as error:  # one trial must not stop the rest
        shared.fail(trial, reason_of(error))
    else:
        point = list(_point(cli.trainer.callback_metrics))
        config = (folder / "config.yaml").read_text(encoding="utf-8")
        shared.finish(trial, point, train_seconds=watch.seconds, config=config)
    print(_line(search, shared, trial), flush=True)


def _line(search: Search, shared: SharedStudy, trial: optuna.Trial) -> str:
    frozen = shared.study.get_trials(deepcopy=False)[trial.number]
    name = _BASELINE if frozen.user_attrs.get("kind") else ", ".join(values_of(frozen))
    if frozen.state is TrialState.COMPLETE:
        said = f"{frozen.values[0]:.2%} at {frozen.values[1]:,.0f} MACs"
    elif "given_up" in frozen.user_attrs:
        said = frozen.user_attrs["given_up"]
    else:
        said = f"failed, {frozen.user_attrs.get('reason', 'was given to another worker')}"
    done = [t for t in _counted(shared) if t.state.is_finished()]
    total = max(search.trials, len(_counted(shared)))
    return f"[{len(done)}/{total}] {name}: {said}"
