"""The queue of a study's trials, which wait, run, and complete or fail."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import TypeIs

from dg_lightning.study.settings import PlannedTrial
from dg_lightning.study.shared import SharedStudy

__all__ = ["TrialQueue"]

_IDENTITY = ("variant", "seed", "fingerprint")  # identify a trial


class TrialQueue(SharedStudy):
    """Assigns each planned trial to one worker, and stores their rows.

    Trials of other plans, such as those of a worker with other seeds, are ignored.
    """

    def fill(
        self,
        planned: Sequence[PlannedTrial],
        only: Sequence[str] | None = None,
        retry_failed: bool = False,
    ) -> None:
        """Queue the trials that are not queued yet, of the variants in `only` if given.

        Raises:
            ValueError: If a trial was queued with other settings.
        """
        known = {_key(trial): trial for trial in self._live()}
        for trial in planned:
            before = known.get((trial.variant, trial.seed))
            if before is not None and before.user_attrs["fingerprint"] != trial.fingerprint:
                raise ValueError(
                    f"This study has a trial {trial.name}, with other settings: give another "
                    "`output`, or the settings it was started with."
                )
            is_new = before is None or (retry_failed and before.state is TrialState.FAIL)
            if is_new and (only is None or trial.variant in only):
                self.enqueue({}, {name: getattr(trial, name) for name in _IDENTITY})

    def claim(
        self, planned: Sequence[PlannedTrial]
    ) -> tuple[optuna.Trial, PlannedTrial] | tuple[None, None]:
        """Start one of these trials if any is waiting; return it with its plan."""
        by_fingerprint = {trial.fingerprint: trial for trial in planned}
        for waiting in self.trials(TrialState.WAITING):
            plan = by_fingerprint.get(waiting.user_attrs.get("fingerprint", ""))
            if plan is None:
                continue
            trial = self.start(waiting)
            if trial is None:
                continue
            if not self._is_duplicate(waiting):
                return trial, plan
            self.study.tell(trial, state=TrialState.PRUNED)
        return None, None

    def _is_duplicate(self, trial: FrozenTrial) -> bool:
        """Return True if another worker queued the same trial earlier."""
        live = (t for t in self._live() if t.state is not TrialState.FAIL)
        return any(t.number < trial.number and _key(t) == _key(trial) for t in live)

    def record_result(self, trial: optuna.Trial, row: dict[str, Any]) -> None:
        """Record the row of a finished trial."""
        score = "accuracy" if "accuracy" in row else "r2"
        values = [row[score], row["macs"]]
        if all(map(math.isfinite, values)):
            self.finish(trial, values, row=row)
        else:  # Optuna would mark it as failed without a reason
            self.fail(trial, f"Its {score} is {values[0]} at {values[1]} MACs.")

    def requeue_lost(self) -> None:
        """Requeue trials whose workers died or were interrupted."""
        lost = {_key(trial): trial for trial in self.lost() if "variant" in trial.user_attrs}
        for key in lost.keys() - {_key(trial) for trial in self._live()}:
            self.enqueue({}, {name: lost[key].user_attrs[name] for name in _IDENTITY})

    def count_unfinished(self, planned: Iterable[PlannedTrial]) -> int:
        """Return how many of these trials are waiting or running."""
        fingerprints = {trial.fingerprint for trial in planned}
        unfinished = self.trials(TrialState.WAITING, TrialState.RUNNING)
        return sum(t.user_attrs.get("fingerprint") in fingerprints for t in unfinished)

    def rows(self, planned: Iterable[PlannedTrial]) -> list[dict[str, Any]]:
        """Return one row for each of these trials that completed or failed."""
        rows = []
        newest = {_key(trial): trial for trial in self._live()}  # of a retried trial, the last
        for plan in planned:
            trial = newest.get((plan.variant, plan.seed))
            if trial is None:
                continue
            identity = {"variant": plan.variant, "seed": plan.seed}
            row = trial.user_attrs.get("row")
            if trial.state is TrialState.COMPLETE and _belongs_to(row, plan):
                rows.append({**row, "status": "complete"})
            elif trial.state is TrialState.COMPLETE:
                reason = f"The database holds a row of {plan.name} that no training has written."
                rows.append({**identity, "status": "failed", "reason": reason})
            elif trial.state is TrialState.FAIL:
                reason = str(trial.user_attrs["reason"])
                rows.append({**identity, "status": "failed", "reason": reason})
        return rows

    def _live(self) -> list[FrozenTrial]:
        """Return complete, running, waiting and failed trials, without lost ones."""
        live = self.trials(TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
        live += [t for t in self.trials(TrialState.FAIL) if "reason" in t.user_attrs]
        planned = [trial for trial in live if "variant" in trial.user_attrs]
        return sorted(planned, key=lambda trial: trial.number)


def _belongs_to(row: Any, plan: PlannedTrial) -> TypeIs[dict[str, Any]]:
    """Return whether a row, which others may have changed, is the result of a trial."""
    if not isinstance(row, dict):
        return False
    figures = [row.get("accuracy", row.get("r2")), row.get("macs")]
    numbers = [f for f in figures if isinstance(f, int | float) and math.isfinite(f)]
    return len(numbers) == 2 and (row.get("variant"), row.get("seed")) == (plan.variant, plan.seed)


def _key(trial: FrozenTrial) -> tuple[str, int]:
    return trial.user_attrs["variant"], trial.user_attrs["seed"]
