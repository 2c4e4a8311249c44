"""The queue of a study's trials: an Optuna study in a database that many workers share.

A trial waits, runs, and is complete or failed. Who dies while running leaves a trial without a
heartbeat, which somebody else takes up again.
"""

import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import optuna
from filelock import FileLock, Timeout
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState

from dg_lightning.study.settings import PlannedTrial

__all__ = ["Claim", "TrialQueue"]

_HEARTBEAT = 10  # seconds from one sign of life to the next
_GRACE = 60  # seconds without one, after which a trial is lost
_SQLITE_WAIT = 60  # seconds that a worker waits for another one's transaction


class Claim:
    """A trial that this worker has and nobody else."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial
        self.variant: str = trial.user_attrs["variant"]
        self.seed: int = trial.user_attrs["seed"]


class TrialQueue:
    """Hands out planned trials, each to one worker, and keeps their rows.

    Args:
        storage: URL of the database.
        name: Name of the study in it.
        folder: Where workers of this machine leave their locks, which tell at once who is dead;
            of workers elsewhere only a missing heartbeat tells.
    """

    def __init__(self, storage: str, name: str, folder: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        waits = {"connect_args": {"timeout": _SQLITE_WAIT}} if storage.startswith("sqlite") else {}
        with FileLock(folder / "create.lock"), _quiet():
            self.storage = RDBStorage(
                storage, engine_kwargs=waits, heartbeat_interval=_HEARTBEAT, grace_period=_GRACE
            )
            # Accuracy up, MACs down.
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=name,
                directions=["maximize", "minimize"],
                load_if_exists=True,
            )
        self.worker = uuid.uuid4().hex
        self._alive = FileLock(self._lock_of(self.worker))

    def __enter__(self) -> Self:
        self._alive.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._alive.release()
        self._lock_of(self.worker).unlink(missing_ok=True)

    def _lock_of(self, worker: str) -> Path:
        return self.folder / f"{worker}.lock"

    def fill(self, planned: Sequence[PlannedTrial], retry_failed: bool = False) -> None:
        """Queue what was not queued before.

        Raises:
            ValueError: If a trial was queued with other settings.
        """
        known = {_key(trial): trial for trial in self._live(with_failed=not retry_failed)}
        for trial in planned:
            before = known.get((trial.variant, trial.seed))
            if before is None:
                self._enqueue(
                    {
                        "variant": trial.variant,
                        "seed": trial.seed,
                        "fingerprint": trial.fingerprint,
                    }
                )
            elif before.user_attrs["fingerprint"] != trial.fingerprint:
                raise ValueError(
                    f"This study has a trial of {trial.name}, with other settings: give another "
                    "`output`, or the settings it was begun with."
                )

    def _enqueue(self, facts: Mapping[str, Any]) -> None:
        self.study.enqueue_trial({}, user_attrs=dict(facts))

    def claim(self, planned: Sequence[PlannedTrial]) -> tuple[Claim, PlannedTrial] | None:
        """Return a trial that nobody else has, or None where none of these waits."""
        wanted = {(trial.variant, trial.seed): trial for trial in planned}
        while any(_key(t) in wanted for t in self._trials(TrialState.WAITING)):
            trial = self.study.ask()  # takes a waiting one; that is one transaction
            if "variant" not in trial.user_attrs:  # another worker was faster, and it is a new one
                self.study.tell(trial, state=TrialState.PRUNED)
                continue
            claim = Claim(trial)
            if self._is_double(claim):
                self.study.tell(trial, state=TrialState.PRUNED)
                continue
            key = (claim.variant, claim.seed)
            if key not in wanted:  # it waits for a worker that has been told to do it
                self.study.tell(trial, state=TrialState.PRUNED)
                self._enqueue(_facts(trial.user_attrs))
                continue
            trial.set_user_attr("worker", self.worker)
            return claim, wanted[key]
        return None

    def _is_double(self, claim: Claim) -> bool:
        """Tell whether two workers have queued the same trial at once: the first one counts."""
        same = (t for t in self._live() if _key(t) == (claim.variant, claim.seed))
        return any(trial.number < claim.trial.number for trial in same)

    @contextmanager
    def beating(self, claim: Claim) -> Iterator[None]:
        """Give signs of life for a trial."""
        study = self.storage.get_study_id_from_name(self.study.study_name)
        number = claim.trial.number
        trial = self.storage.get_trial_id_from_study_id_trial_number(study, number)
        done = threading.Event()

        def beat() -> None:
            self.storage.record_heartbeat(trial)
            while not done.wait(_HEARTBEAT):
                self.storage.record_heartbeat(trial)

        heart = threading.Thread(target=beat, daemon=True)
        heart.start()
        try:
            yield
        finally:
            done.set()
            heart.join()

    def finish(self, claim: Claim, row: Mapping[str, Any]) -> None:
        """Record the row of a trial that is done."""
        claim.trial.set_user_attr("row", dict(row))
        self.study.tell(claim.trial, [row["accuracy"], row["macs"]])

    def fail(self, claim: Claim, reason: str) -> None:
        """Record why a trial could not be done."""
        claim.trial.set_user_attr("reason", reason)
        self.study.tell(claim.trial, state=TrialState.FAIL)

    def take_up_lost(self) -> None:
        """Queue again what a worker has died of, or was killed in."""
        with _quiet():
            fail_stale_trials(self.study)  # those without a heartbeat
        for trial in self._trials(TrialState.RUNNING):
            worker = trial.user_attrs.get("worker")
            if worker is not None and self._is_dead(worker):
                self.study.tell(trial.number, state=TrialState.FAIL)
        live = {_key(trial) for trial in self._live()}
        for trial in self._trials(TrialState.FAIL):
            if "reason" not in trial.user_attrs and _key(trial) not in live:
                live.add(_key(trial))
                self._enqueue(_facts(trial.user_attrs))

    def _is_dead(self, worker: str) -> bool:
        """Tell whether a worker of this machine has let go of its lock."""
        path = self._lock_of(worker)
        if worker == self.worker or not path.exists():
            return False
        try:
            with FileLock(path, timeout=0):
                return True
        except Timeout:
            return False

    def running(self, planned: Sequence[PlannedTrial]) -> int:
        """Return how many of these trials somebody is at."""
        wanted = {(trial.variant, trial.seed) for trial in planned}
        return sum(_key(trial) in wanted for trial in self._trials(TrialState.RUNNING))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each trial that is complete or has failed, in the order planned."""
        rows = {}
        for trial in self._live():
            key, row = _key(trial), trial.user_attrs.get("row")
            if trial.state is TrialState.COMPLETE and row is not None:
                rows[key] = {**row, "status": "complete"}
            elif trial.state is TrialState.FAIL:
                named = {"variant": key[0], "seed": key[1]}
                rows[key] = {**named, "status": "failed", "reason": trial.user_attrs["reason"]}
        return list(rows.values())

    def _live(self, with_failed: bool = True) -> list[FrozenTrial]:
        """Return trials that are done, failed for a reason, run or wait; not what was lost."""
        states = (TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING, TrialState.FAIL)
        return [
            trial
            for trial in self._trials(*states)
            if trial.state is not TrialState.FAIL
            or (with_failed and "reason" in trial.user_attrs)
        ]

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        trials = self.study.get_trials(deepcopy=False, states=states)
        return [trial for trial in trials if "variant" in trial.user_attrs]


def _key(trial: FrozenTrial) -> tuple[str, int]:
    return trial.user_attrs["variant"], trial.user_attrs["seed"]


def _facts(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what says which trial it is."""
    return {name: attributes[name] for name in ("variant", "seed", "fingerprint")}


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out Optuna's remarks that heartbeats may still change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
