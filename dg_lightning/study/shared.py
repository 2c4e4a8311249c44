"""An Optuna study that workers on one or many machines share, and that survives their deaths."""

import threading
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

import optuna
from filelock import FileLock, Timeout
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Engine, event

__all__ = ["SharedStudy", "storage_in"]

_HEARTBEAT = 10  # seconds from one sign of life to the next
_GRACE = 60  # seconds without one, after which a trial is lost
_SQLITE_WAIT = 60  # seconds that a worker waits for another one's transaction


def storage_in(folder: Path) -> str:
    """Return the URL of the database that needs no server: a file."""
    return f"sqlite:///{folder / 'study.db'}"


class SharedStudy:
    """Accuracy up, MACs down, in a database; with signs of life of those who are at a trial.

    Used as a context, it is one worker.

    Args:
        storage: URL of the database.
        name: Name of the study in it.
        folder: Where workers of this machine leave their locks, which tell at once who is dead;
            of workers elsewhere only a missing heartbeat tells.
        sampler: What proposes the settings of new trials.
    """

    def __init__(
        self, storage: str, name: str, folder: Path, sampler: BaseSampler | None = None
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        waits = {"connect_args": {"timeout": _SQLITE_WAIT}} if storage.startswith("sqlite") else {}
        with FileLock(folder / "create.lock"), _quiet():
            self.storage = RDBStorage(
                storage, engine_kwargs=waits, heartbeat_interval=_HEARTBEAT, grace_period=_GRACE
            )
            if waits:
                _one_writer_at_a_time(self.storage.engine)
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=name,
                directions=["maximize", "minimize"],
                sampler=sampler,
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

    def ask(self) -> optuna.Trial:
        """Return a trial for this worker: the next that waits, or else a new one."""
        with _quiet():
            trial = self.study.ask()
        self.storage.record_heartbeat(self._id(trial))
        trial.set_user_attr("worker", self.worker)
        return trial

    def _id(self, trial: optuna.Trial) -> int:
        study = self.storage.get_study_id_from_name(self.study.study_name)
        return self.storage.get_trial_id_from_study_id_trial_number(study, trial.number)

    @contextmanager
    def beating(self, trial: optuna.Trial) -> Iterator[None]:
        """Give signs of life for a trial."""
        number = self._id(trial)
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_HEARTBEAT):
                self.storage.record_heartbeat(number)

        heart = threading.Thread(target=beat, daemon=True)
        heart.start()
        try:
            yield
        finally:
            done.set()
            heart.join()

    def fail(self, trial: optuna.Trial, reason: str) -> None:
        """Record why a trial could not be done."""
        with self.if_still_ours():
            trial.set_user_attr("reason", reason)
            self.study.tell(trial, state=TrialState.FAIL)

    @contextmanager
    def if_still_ours(self) -> Iterator[None]:
        """Let go of a trial that was given to somebody else, as after a machine has slept."""
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            yield

    def lost(self) -> list[FrozenTrial]:
        """Return the trials whose workers have died; they run no more."""
        with _quiet():
            fail_stale_trials(self.study)  # those without a heartbeat
        for trial in self.trials(TrialState.RUNNING):
            if self._is_dead(trial.user_attrs.get("worker"), trial.datetime_start):
                self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        failed = self.trials(TrialState.FAIL)
        return [trial for trial in failed if "reason" not in trial.user_attrs]

    def _is_dead(self, worker: str | None, start: datetime | None) -> bool:
        """Tell whether a worker of this machine has let go of its lock."""
        if worker is None:  # died before its first sign of life
            return start is not None and datetime.now() - start > timedelta(seconds=_GRACE)
        path = self._lock_of(worker)
        if worker == self.worker or not path.exists():
            return False
        try:
            with FileLock(path, timeout=0):
                return True
        except Timeout:
            return False

    def enqueue(self, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        """Let a trial with these settings wait for a worker."""
        with _quiet():
            self.study.enqueue_trial(settings, user_attrs=facts)

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in these states."""
        return self.study.get_trials(deepcopy=False, states=states)


def _one_writer_at_a_time(engine: Engine) -> None:
    """Let what SQLite reads and then writes be one transaction.

    Python's driver begins a transaction with the first write. Two workers that look for a waiting
    trial would both find the same one, and both take it.
    """

    @event.listens_for(engine, "connect")
    def _leave_transactions_to_us(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections that were made before


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out Optuna's remarks on heartbeats: that they may change, and are for `optimize`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage")
        yield
