"""An Optuna study that workers on one or many machines share, and that survives their deaths."""

import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

import optuna
from filelock import FileLock, Timeout
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Engine, event
from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError

__all__ = ["SharedStudy", "storage_in"]

_HEARTBEAT = 10  # seconds from one sign of life to the next
_GRACE = 60  # seconds without one, after which a trial is lost
_SQLITE_WAIT = 60  # seconds that a worker waits for another one's transaction
_TRIES = 5  # to open a database, and to record what a long training has given


def storage_in(folder: Path) -> str:
    """Return the URL of the database that needs no server: a file."""
    return f"sqlite:///{folder / 'study.db'}"


class SharedStudy:
    """Accuracy up, MACs down, in a database; with signs of life of those who are at a trial.

    Used as a context, it is one worker.

    Args:
        storage: URL of the database.
        name: Name of the study in it.
        folder: Where workers of this machine leave their locks, which tell at once who is alive;
            of workers elsewhere only heartbeats tell.
        sampler: What proposes the settings of new trials.
    """

    def __init__(
        self, storage: str, name: str, folder: Path, sampler: BaseSampler | None = None
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        is_file = storage.startswith("sqlite")
        options: dict[str, Any] = {"pool_pre_ping": True}  # a connection may have been dropped
        if is_file:
            options["connect_args"] = {"timeout": _SQLITE_WAIT}
        with FileLock(folder / "create.lock"), _quiet():
            self.storage = _opened(storage, options)
            if is_file:
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

    def enqueue(self, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        """Let a trial with these settings wait for a worker."""
        with _quiet():
            self.study.enqueue_trial(settings, user_attrs=facts)

    def ask(self) -> optuna.Trial:
        """Return a trial for this worker: the next that waits, or else a new one."""
        with _quiet():
            return self._taken(self.study.ask())

    def take(self, waiting: FrozenTrial) -> optuna.Trial | None:
        """Return a trial that waits for this worker, or None where another was faster."""
        number = self._id(waiting.number)
        try:
            if not self.storage.set_trial_state_values(number, TrialState.RUNNING):
                return None
        except UpdateFinishedTrialError:
            return None
        return self._taken(optuna.Trial(self.study, number))

    def _taken(self, trial: optuna.Trial) -> optuna.Trial:
        self.storage.record_heartbeat(self._id(trial.number))
        trial.set_user_attr("worker", self.worker)
        return trial

    def _id(self, number: int) -> int:
        study = self.storage.get_study_id_from_name(self.study.study_name)
        return self.storage.get_trial_id_from_study_id_trial_number(study, number)

    @contextmanager
    def beating(self, trial: optuna.Trial) -> Iterator[None]:
        """Give signs of life for a trial, and put it back where it is interrupted."""
        number = self._id(trial.number)
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_HEARTBEAT):
                with suppress(SQLAlchemyError, StorageInternalError):  # the next may get through
                    self.storage.record_heartbeat(number)

        heart = threading.Thread(target=beat, daemon=True)
        heart.start()
        try:
            yield
        except BaseException:  # Ctrl-C, or an end from outside: somebody else may take it
            self._record(lambda: self.study.tell(trial, state=TrialState.FAIL))
            raise
        finally:
            done.set()
            heart.join()

    def finish(self, trial: optuna.Trial, values: list[float], **facts: Any) -> None:
        """Record what a trial has given."""

        def record() -> None:
            for name, fact in facts.items():
                trial.set_user_attr(name, fact)
            self.study.tell(trial, values)

        self._record(record)

    def fail(self, trial: optuna.Trial, reason: str) -> None:
        """Record why a trial could not be done."""

        def record() -> None:
            trial.set_user_attr("reason", reason)
            self.study.tell(trial, state=TrialState.FAIL)

        self._record(record)

    def give_up(self, trial: optuna.Trial, reason: str) -> None:
        """Record why a trial is not worth being ended."""

        def record() -> None:
            trial.set_user_attr("given_up", reason)
            self.study.tell(trial, state=TrialState.PRUNED)

        self._record(record)

    def _record(self, record: Callable[[], object]) -> None:
        """Write the end of a trial, unless it was given to somebody else; insist on it."""
        for left in reversed(range(_TRIES)):
            try:
                with suppress(UpdateFinishedTrialError):  # as after a machine has slept
                    record()
                return
            except (SQLAlchemyError, StorageInternalError):
                if not left:
                    raise
                time.sleep(_HEARTBEAT / _TRIES)

    def lost(self) -> list[FrozenTrial]:
        """Return the trials whose workers have died, or were interrupted; they run no more."""
        study = self.storage.get_study_id_from_name(self.study.study_name)
        # What `optuna.storages.fail_stale_trials` asks; that one ends trials of living workers.
        stale = set(self.storage._get_stale_trial_ids(study))
        for trial in self.trials(TrialState.RUNNING):
            if self._is_dead(trial, self._id(trial.number) in stale):
                with suppress(UpdateFinishedTrialError):
                    self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        failed = self.trials(TrialState.FAIL)
        return [trial for trial in failed if "reason" not in trial.user_attrs]

    def _is_dead(self, trial: FrozenTrial, is_stale: bool) -> bool:
        """Tell whether the worker of a trial is dead: by its lock if it is of this machine."""
        worker, start = trial.user_attrs.get("worker"), trial.datetime_start
        if worker is None:  # died before its first sign of life
            return start is not None and datetime.now() - start > timedelta(seconds=_GRACE)
        path = self._lock_of(worker)
        if worker == self.worker:
            return False
        if not path.exists():
            return is_stale
        try:
            with FileLock(path, timeout=0):
                return True
        except Timeout:
            return False

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in these states, in the order of their numbers."""
        return self.study.get_trials(deepcopy=False, states=states)


def _opened(url: str, options: dict[str, Any]) -> RDBStorage:
    """Open a database, and make its tables where there are none.

    Workers on several machines may do so at once. All but one of them find that a table, a type or
    a row has appeared meanwhile, and try again.
    """
    for left in reversed(range(_TRIES)):
        try:
            return RDBStorage(url, options, heartbeat_interval=_HEARTBEAT, grace_period=_GRACE)
        except (SQLAlchemyError, ImportError, StorageInternalError) as error:
            cause = error.__cause__ if isinstance(error, StorageInternalError) else error
            if left and isinstance(cause, (IntegrityError, ProgrammingError)):
                time.sleep(random.uniform(0.1, 1.0))
                continue
            raise ValueError(
                f"`storage` must be the URL of a database that can be reached, whose driver is "
                f"installed, as postgresql+psycopg://user@host/name, got {url!r}: "
                f"{str(error).splitlines()[0]}"
            ) from error
    raise AssertionError("unreachable: the last try returns or raises")


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
