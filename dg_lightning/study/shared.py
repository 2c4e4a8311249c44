"""An Optuna study in a database, shared by workers that take its trials."""

import math
import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from typing_extensions import TypeIs

from dg_lightning.files import locked
from dg_lightning.study.settings import PlannedTrial

_HEARTBEAT = 10  # seconds between heartbeats
_GRACE = 60  # seconds without a heartbeat until a trial is lost
_SQLITE_WAIT = 60  # seconds to wait for the transaction of another worker
_MAX_ATTEMPTS = 5  # to open the database, and to record a result


def sqlite_url(folder: Path) -> str:
    """Return the URL of an SQLite database in the folder."""
    return f"sqlite:///{folder / 'study.db'}"


class SharedStudy:
    """A study in a database that maximizes accuracy and minimizes MACs.

    As a context manager, it represents one worker.

    Args:
        storage: URL of the database.
        name: Name of the study in it.
        folder: Folder for the lock files of workers on this machine, which show at once whether
            they are alive; workers on other machines only have heartbeats.
        sampler: Sampler of the settings of new trials.
    """

    def __init__(
        self, storage: str, name: str, folder: Path, sampler: BaseSampler | None = None
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        is_file = storage.startswith("sqlite")
        options: dict[str, Any] = {"pool_pre_ping": True}  # connections may have been dropped
        if is_file:
            options["connect_args"] = {"timeout": _SQLITE_WAIT}
        with locked(folder / "create.lock", "opens the study", _SQLITE_WAIT), _suppress_warnings():
            self.storage = _open_storage(storage, options)
            if is_file:
                _serialize_transactions(self.storage.engine)
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=name,
                directions=["maximize", "minimize"],
                sampler=sampler,
                load_if_exists=True,
            )
        self.worker = uuid.uuid4().hex
        self._alive = FileLock(self._lock_path(self.worker))

    def __enter__(self) -> Self:
        self._alive.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._alive.release()
        self._lock_path(self.worker).unlink(missing_ok=True)

    def _lock_path(self, worker: str) -> Path:
        return self.folder / f"{worker}.lock"

    def enqueue(self, settings: dict[str, Any], attributes: dict[str, Any]) -> None:
        """Queue a trial with these settings."""
        with _suppress_warnings():
            self.study.enqueue_trial(settings, user_attrs=attributes)

    def ask(self) -> optuna.Trial:
        """Start the next waiting trial, or a new one if none is waiting."""
        with _suppress_warnings():
            return self._mark_started(self.study.ask())

    def start(self, waiting: FrozenTrial) -> optuna.Trial | None:
        """Start a waiting trial; return None if another worker was faster."""
        trial_id = self._id(waiting.number)
        try:
            if not self.storage.set_trial_state_values(trial_id, TrialState.RUNNING):
                return None
        except UpdateFinishedTrialError:
            return None
        return self._mark_started(optuna.Trial(self.study, trial_id))

    def _mark_started(self, trial: optuna.Trial) -> optuna.Trial:
        self.storage.record_heartbeat(self._id(trial.number))
        trial.set_user_attr("worker", self.worker)
        return trial

    def _id(self, number: int) -> int:
        study = self.storage.get_study_id_from_name(self.study.study_name)
        return self.storage.get_trial_id_from_study_id_trial_number(study, number)

    @contextmanager
    def heartbeat(self, trial: optuna.Trial) -> Iterator[None]:
        """Record heartbeats of a trial in the background; release it if interrupted."""
        trial_id = self._id(trial.number)
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_HEARTBEAT):
                with suppress(SQLAlchemyError, StorageInternalError):  # the next one may succeed
                    self.storage.record_heartbeat(trial_id)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:  # such as Ctrl-C: let another worker take it
            self._record(lambda: self.study.tell(trial, state=TrialState.FAIL))
            raise
        finally:
            done.set()
            thread.join()

    def finish(self, trial: optuna.Trial, values: list[float], **attributes: Any) -> None:
        """Record the result of a trial."""

        def record() -> None:
            for name, value in attributes.items():
                trial.set_user_attr(name, value)
            self.study.tell(trial, values)

        self._record(record)

    def fail(self, trial: optuna.Trial, reason: str) -> None:
        """Record why a trial failed."""

        def record() -> None:
            trial.set_user_attr("reason", reason)
            self.study.tell(trial, state=TrialState.FAIL)

        self._record(record)

    def prune(self, trial: optuna.Trial, reason: str) -> None:
        """Record why a trial was pruned."""

        def record() -> None:
            trial.set_user_attr("given_up", reason)
            self.study.tell(trial, state=TrialState.PRUNED)

        self._record(record)

    def _record(self, record: Callable[[], object]) -> None:
        """Record the end of a trial, with retries, unless another worker has taken it over."""
        for left in reversed(range(_MAX_ATTEMPTS)):
            try:
                with suppress(UpdateFinishedTrialError):  # such as after the machine was suspended
                    record()
                return
            except (SQLAlchemyError, StorageInternalError):
                if not left:
                    raise
                time.sleep(_HEARTBEAT / _MAX_ATTEMPTS)

    def lost(self) -> list[FrozenTrial]:
        """Return the trials whose workers died or were interrupted, and mark them as failed."""
        study = self.storage.get_study_id_from_name(self.study.study_name)
        # Not `optuna.storages.fail_stale_trials`, which also fails trials of live workers.
        stale = set(self.storage._get_stale_trial_ids(study))
        for trial in self.trials(TrialState.RUNNING):
            if self._is_dead(trial, self._id(trial.number) in stale):
                with suppress(UpdateFinishedTrialError):
                    self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        failed = self.trials(TrialState.FAIL)
        return [trial for trial in failed if "reason" not in trial.user_attrs]

    def _is_dead(self, trial: FrozenTrial, is_stale: bool) -> bool:
        """Return True if the worker of a trial is dead, by its lock file if on this machine."""
        worker, start = trial.user_attrs.get("worker"), trial.datetime_start
        if worker is None:  # died before its first heartbeat
            return start is not None and datetime.now() - start > timedelta(seconds=_GRACE)
        path = self._lock_path(worker)
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
        """Return the trials in these states, ordered by number."""
        return self.study.get_trials(deepcopy=False, states=states)


def _open_storage(url: str, options: dict[str, Any]) -> RDBStorage:
    """Open a database, and create its tables if needed.

    If workers on several machines do so at once, all but one fail because a table, type or row
    already exists, and try again.
    """
    for left in reversed(range(_MAX_ATTEMPTS)):
        try:
            return RDBStorage(url, options, heartbeat_interval=_HEARTBEAT, grace_period=_GRACE)
        except (SQLAlchemyError, ImportError, StorageInternalError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, StorageInternalError) else error
            if left and isinstance(cause, (IntegrityError, ProgrammingError)):
                time.sleep(random.uniform(0.1, 1.0))
                continue
            shown = hide_secrets(url)
            # Drivers may repeat a password, or a part of it.
            reason = str(error).splitlines()[0] if shown == url else type(error).__name__
            reason = str(error) if isinstance(error, ModuleNotFoundError) else reason
            raise ValueError(
                f"`storage` must be the URL of a database that can be reached, whose driver is "
                f"installed, such as postgresql+psycopg://user@host/name, got {shown}: "
                f"{reason}"
            ) from None  # the cause repeats the password
    raise AssertionError("unreachable: the last try returns or raises")


def hide_secrets(url: str) -> str:
    """Return a URL without its password and the values of its options.

    >>> hide_secrets("postgresql://me:secret@host/x?password=secret")
    'postgresql://me:***@host/x?password=***'
    >>> hide_secrets("postgresql://token@host/x")
    'postgresql://***@host/x'
    """
    scheme, slashes, rest = url.partition("//") if "//" in url else ("", "", url)
    login, at, rest = rest.rpartition("@")  # a password may hold any character
    address, mark, query = rest.partition("?")
    user, colon, _ = login.partition(":")
    address = f"{scheme}{slashes}{f'{user}:' if colon else ''}{'***@' if at else ''}{address}"
    names = [option.partition("=")[0] for option in query.split("&")]
    return address + mark + "&".join(f"{name}=***" for name in names if mark)


def _serialize_transactions(engine: Engine) -> None:
    """Make SQLite read and write in a single transaction.

    Python's driver begins a transaction at the first write, so two workers could read the same
    waiting trial and both start it.
    """

    @event.listens_for(engine, "connect")
    def _disable_implicit_transactions(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # drop earlier connections


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress Optuna's warnings that heartbeats are experimental and meant for `optimize`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage")
        yield


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
