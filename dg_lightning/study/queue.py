"""The queue of a study's trials: each waits, runs, and is complete or has failed."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from dg_lightning.study.settings import PlannedTrial
from dg_lightning.study.shared import SharedStudy

__all__ = ["TrialQueue"]

_FACTS = ("variant", "seed", "fingerprint")  # say which trial it is


class TrialQueue(SharedStudy):
    """Hands out planned trials, each to one worker, and keeps their rows.

    Trials of other plans, as of a worker with other seeds, are left alone.
    """

    def fill(
        self,
        planned: Sequence[PlannedTrial],
        only: Sequence[str] | None = None,
        retry_failed: bool = False,
    ) -> None:
        """Queue what was not queued before, of the variants in `only` if given.

        Raises:
            ValueError: If a trial was queued with other settings.
        """
        known = {_key(trial): trial for trial in self._live()}
        for trial in planned:
            before = known.get((trial.variant, trial.seed))
            if before is not None and before.user_attrs["fingerprint"] != trial.fingerprint:
                raise ValueError(
                    f"This study has a trial of {trial.name}, with other settings: give another "
                    "`output`, or the settings it was begun with."
                )
            is_new = before is None or (retry_failed and before.state is TrialState.FAIL)
            if is_new and (only is None or trial.variant in only):
                self.enqueue({}, {name: getattr(trial, name) for name in _FACTS})

    def claim(
        self, planned: Sequence[PlannedTrial]
    ) -> tuple[optuna.Trial, PlannedTrial] | tuple[None, None]:
        """Return one of these trials that nobody else has, or None where none waits."""
        known = {trial.fingerprint: trial for trial in planned}
        for waiting in self.trials(TrialState.WAITING):
            wanted = known.get(waiting.user_attrs.get("fingerprint", ""))
            if wanted is None:
                continue
            trial = self.take(waiting)
            if trial is None:
                continue
            if not self._is_double(waiting):
                return trial, wanted
            self.study.tell(trial, state=TrialState.PRUNED)
        return None, None

    def _is_double(self, trial: FrozenTrial) -> bool:
        """Tell whether two workers have queued the same trial at once: the first one counts."""
        live = (t for t in self._live() if t.state is not TrialState.FAIL)
        return any(t.number < trial.number and _key(t) == _key(trial) for t in live)

    def finish_with(self, trial: optuna.Trial, row: dict[str, Any]) -> None:
        """Record the row of a trial that is done."""
        values = [row["accuracy"], row["macs"]]
        if all(map(math.isfinite, values)):
            self.finish(trial, values, row=row)
        else:  # Optuna would call it failed, without a reason
            self.fail(trial, f"Its accuracy is {values[0]}, at {values[1]} MACs.")

    def take_up_lost(self) -> None:
        """Queue again what a worker has died in, or was interrupted in."""
        lost = {_key(trial): trial for trial in self.lost() if "variant" in trial.user_attrs}
        for key in lost.keys() - {_key(trial) for trial in self._live()}:
            self.enqueue({}, {name: lost[key].user_attrs[name] for name in _FACTS})

    def unfinished(self, planned: Iterable[PlannedTrial]) -> int:
        """Return how many of these trials wait, or somebody is at."""
        wanted = {trial.fingerprint for trial in planned}
        found = self.trials(TrialState.WAITING, TrialState.RUNNING)
        return sum(trial.user_attrs.get("fingerprint") in wanted for trial in found)

    def rows(self, planned: Iterable[PlannedTrial]) -> list[dict[str, Any]]:
        """Return one row for each of these trials that is complete or has failed."""
        rows = []
        newest = {_key(trial): trial for trial in self._live()}  # a retried one runs again
        for wanted in planned:
            trial = newest.get((wanted.variant, wanted.seed))
            if trial is None:
                continue
            if trial.state is TrialState.COMPLETE:
                rows.append({**trial.user_attrs["row"], "status": "complete"})
            elif trial.state is TrialState.FAIL:
                named = {name: trial.user_attrs[name] for name in ("variant", "seed")}
                reason = trial.user_attrs["reason"]
                rows.append({**named, "status": "failed", "reason": reason})
        return rows

    def _live(self) -> list[FrozenTrial]:
        """Return trials that are done, run, wait, or have failed for a reason; not lost ones."""
        live = self.trials(TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
        live += [t for t in self.trials(TrialState.FAIL) if "reason" in t.user_attrs]
        of_a_plan = [trial for trial in live if "variant" in trial.user_attrs]
        return sorted(of_a_plan, key=lambda trial: trial.number)


def _key(trial: FrozenTrial) -> tuple[str, int]:
    return trial.user_attrs["variant"], trial.user_attrs["seed"]
