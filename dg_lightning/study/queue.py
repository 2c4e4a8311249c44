"""The queue of a study's trials: each waits, runs, and is complete or has failed."""

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from dg_lightning.study.settings import PlannedTrial
from dg_lightning.study.shared import SharedStudy

__all__ = ["TrialQueue"]

_FACTS = ("variant", "seed", "fingerprint")  # say which trial it is


class TrialQueue(SharedStudy):
    """Hands out planned trials, each to one worker, and keeps their rows."""

    def fill(self, planned: Sequence[PlannedTrial], retry_failed: bool = False) -> None:
        """Queue what was not queued before.

        Raises:
            ValueError: If a trial was queued with other settings.
        """
        known = {_key(trial): trial for trial in self._live(with_failed=not retry_failed)}
        for trial in planned:
            before = known.get((trial.variant, trial.seed))
            if before is None:
                self.enqueue({}, {name: getattr(trial, name) for name in _FACTS})
            elif before.user_attrs["fingerprint"] != trial.fingerprint:
                raise ValueError(
                    f"This study has a trial of {trial.name}, with other settings: give another "
                    "`output`, or the settings it was begun with."
                )

    def claim(
        self, planned: Sequence[PlannedTrial]
    ) -> tuple[optuna.Trial, PlannedTrial] | tuple[None, None]:
        """Return a trial that nobody else has, or None where none waits."""
        known = {(trial.variant, trial.seed): trial for trial in planned}
        while self.trials(TrialState.WAITING):
            trial = self.ask()
            # Another worker was faster, and this is a new one; or two have queued the same.
            if "variant" not in trial.user_attrs or self._is_double(trial):
                self.study.tell(trial, state=TrialState.PRUNED)
                continue
            wanted = known.get((trial.user_attrs["variant"], trial.user_attrs["seed"]))
            if wanted is not None:
                return trial, wanted
            self.fail(trial, "The settings of the study do not have it any more.")
        return None, None

    def _is_double(self, trial: optuna.Trial) -> bool:
        """Tell whether two workers have queued the same trial at once: the first one counts."""
        key = (trial.user_attrs["variant"], trial.user_attrs["seed"])
        same = (other for other in self._live(with_failed=False) if _key(other) == key)
        return any(other.number < trial.number for other in same)

    def finish(self, trial: optuna.Trial, row: Mapping[str, Any]) -> None:
        """Record the row of a trial that is done."""
        with self.if_still_ours():
            trial.set_user_attr("row", dict(row))
            self.study.tell(trial, [row["accuracy"], row["macs"]])

    def take_up_lost(self) -> None:
        """Queue again what a worker has died in."""
        lost = {_key(trial): trial for trial in self.lost() if "variant" in trial.user_attrs}
        for key in lost.keys() - {_key(trial) for trial in self._live()}:
            self.enqueue({}, {name: lost[key].user_attrs[name] for name in _FACTS})

    def unfinished(self) -> int:
        """Return how many trials wait, or somebody is at."""
        return len(self.trials(TrialState.WAITING, TrialState.RUNNING))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each trial that is complete or has failed."""
        rows = {}
        newest = {_key(trial): trial for trial in self._live()}  # a retried one runs again
        for key, trial in newest.items():
            if trial.state is TrialState.COMPLETE:
                rows[key] = {**trial.user_attrs["row"], "status": "complete"}
            elif trial.state is TrialState.FAIL:
                named = {name: trial.user_attrs[name] for name in ("variant", "seed")}
                reason = trial.user_attrs["reason"]
                rows[key] = {**named, "status": "failed", "reason": reason}
        return list(rows.values())

    def _live(self, with_failed: bool = True) -> list[FrozenTrial]:
        """Return trials that are done, run, wait, or have failed for a reason; not lost ones."""
        live = self.trials(TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
        if with_failed:
            live += [t for t in self.trials(TrialState.FAIL) if "reason" in t.user_attrs]
        of_the_plan = [trial for trial in live if "variant" in trial.user_attrs]
        return sorted(of_the_plan, key=lambda trial: trial.number)


def _key(trial: FrozenTrial) -> tuple[str, int]:
    return trial.user_attrs["variant"], trial.user_attrs["seed"]
