"""Optuna studies in a database, and workers that share their trials."""

import itertools
import math
import multiprocessing
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import lightning.pytorch as pl
import optuna
from filelock import FileLock, Timeout
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Engine, event
from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError
from typing_extensions import TypeIs

from dg_lightning.files import locked, write_text
from dg_lightning.quiet import is_quiet, quietly
from dg_lightning.study.settings import PlannedTrial

# Runs `fit` with arguments and extra callbacks, and returns an object with the trainer, model and
# datamodule. The command line provides this function.
# Arguments, additional callbacks, and a function that chooses the loggers.
RunCommand: TypeAlias = Callable[
    [Sequence[str], Sequence[pl.Callback], Callable[[Mapping[str, Any]], list[Any]] | None], Any
]

_HEARTBEAT = 10  # seconds between heartbeats
_GRACE = 60  # seconds without a heartbeat after which a trial counts as lost
_SQLITE_WAIT = 60  # seconds to wait for the transaction of another worker
# Attributes that identify a trial. `kind` marks the baseline of a search.
_PLANNED = ("variant", "seed", "fingerprint")
IDENTITY = (*_PLANNED, "kind")
_POLL_SECONDS = 2.0  # seconds between checks while other workers finish
_MAX_ATTEMPTS = 5  # attempts to open the database or to record a result


def sqlite_url(folder: Path) -> str:
    """Return the URL of an SQLite database in the folder."""
    return f"sqlite:///{folder / 'study.db'}"


def claim_folder(folder: Path, own: str, other: str) -> None:
    """Create the folder for a study or search; raise if it contains the other kind."""
    if (folder / f"{other}.json").exists():
        raise ValueError(f"{folder} contains a {other}: pass another `output`.")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{own}.json").exists():
        write_text(folder / f"{own}.json", "{}\n")


class SharedStudy:
    """A study that maximises accuracy and minimises MACs, stored in a database.

    As a context manager, it represents one worker.

    Args:
        storage: URL of the database.
        name: Name of the study in the database.
        folder: Folder for lock files, which show immediately whether workers on this machine are
            alive. Workers on other machines only send heartbeats.
    """

    def __init__(self, storage: str, name: str, folder: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        is_file = storage.startswith("sqlite")
        options: dict[str, Any] = {"pool_pre_ping": True}  # connections may have been dropped
        if is_file:
            options["connect_args"] = {"timeout": _SQLITE_WAIT}
        with locked(folder / "create.lock", "opens the study", _SQLITE_WAIT):
            self.storage = _open_storage(storage, options)
            if is_file:
                _serialize_transactions(self.storage.engine)
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=name,
                directions=["maximize", "minimize"],
                load_if_exists=True,
            )
        self.worker = uuid.uuid4().hex
        self._alive = FileLock(self._lock_path(self.worker))
        # Number of a running trial -> (heartbeat count, time when the count last changed).
        self._heartbeats: dict[int, tuple[int | None, float]] = {}

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
        self.study.enqueue_trial(settings, user_attrs=attributes)

    def ask(self) -> optuna.Trial:
        """Start the next waiting trial, or a new one if none is waiting."""
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
        trial.set_user_attr("worker", self.worker)
        return trial

    def _id(self, number: int) -> int:
        study = self.storage.get_study_id_from_name(self.study.study_name)
        return self.storage.get_trial_id_from_study_id_trial_number(study, number)

    @contextmanager
    def heartbeat(self, trial: optuna.Trial) -> Iterator[None]:
        """Send heartbeats for a trial in the background; release the trial if interrupted."""
        done = threading.Event()

        def beat() -> None:
            for count in itertools.count():
                # The next heartbeat may succeed. A finished trial has gone to another worker.
                with suppress(SQLAlchemyError, StorageInternalError, UpdateFinishedTrialError):
                    trial.set_user_attr("heartbeats", count)
                if done.wait(_HEARTBEAT):
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:  # such as Ctrl-C: let another worker take the trial
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
                with suppress(UpdateFinishedTrialError):  # if the machine was suspended
                    record()
                return
            except (SQLAlchemyError, StorageInternalError):
                if not left:
                    raise
                time.sleep(_HEARTBEAT / _MAX_ATTEMPTS)

    def requeue_lost(self) -> None:
        """Requeue the trials whose workers died or were interrupted."""
        requeued = {trial.user_attrs.get("again") for trial in self.trials(*TrialState)}
        for trial in self.lost():
            if trial.number not in requeued:
                identity = {k: v for k, v in trial.user_attrs.items() if k in IDENTITY}
                self.enqueue(given_params(trial), {**identity, "again": trial.number})

    def lost(self) -> list[FrozenTrial]:
        """Return the trials whose workers died or were interrupted, and mark them as failed."""
        for trial in self.trials(TrialState.RUNNING):
            if self._is_dead(trial):
                with suppress(UpdateFinishedTrialError):
                    self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        failed = self.trials(TrialState.FAIL)
        return [trial for trial in failed if "reason" not in trial.user_attrs]

    def _is_dead(self, trial: FrozenTrial) -> bool:
        """Return True if the worker of a trial is dead, judged by lock file or heartbeats."""
        worker = trial.user_attrs.get("worker", "")
        if worker == self.worker:
            return False
        path = self._lock_path(worker)
        if path.exists():  # a worker on this machine
            try:
                with FileLock(path, timeout=0):
                    return True
            except Timeout:
                return False
        # Measured with this process's clock, because clocks differ between machines.
        beats, now = trial.user_attrs.get("heartbeats"), time.monotonic()
        before, since = self._heartbeats.setdefault(trial.number, (beats, now))
        if beats != before:
            self._heartbeats[trial.number] = (beats, now)
            return False
        return now - since > _GRACE

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in these states, ordered by number."""
        return self.study.get_trials(deepcopy=False, states=states)


def given_params(trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial's parameters, including those it was queued with."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def _open_storage(url: str, options: dict[str, Any]) -> RDBStorage:
    """Open a database, and create its tables if needed.

    If workers on several machines do this at the same time, only one succeeds. The others retry,
    because a table, type or row already exists.
    """
    for left in reversed(range(_MAX_ATTEMPTS)):
        try:
            return RDBStorage(url, options)
        except (SQLAlchemyError, ImportError, StorageInternalError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, StorageInternalError) else error
            if left and isinstance(cause, (IntegrityError, ProgrammingError)):
                time.sleep(random.uniform(0.1, 1.0))
                continue
            shown = hide_secrets(url)
            # A driver's message may contain the password, or part of it.
            reason = str(error).splitlines()[0] if shown == url else type(error).__name__
            reason = str(error) if isinstance(error, ModuleNotFoundError) else reason
            raise ValueError(
                "`storage` must be the URL of a reachable database whose driver is installed, such "
                f"as postgresql+psycopg://user@host/name, got {shown}: {reason}"
            ) from None  # the cause may contain the password
    raise AssertionError("unreachable: the last attempt returns or raises")


def hide_secrets(url: str) -> str:
    """Hide the password and the option values in a URL.

    >>> hide_secrets("postgresql://me:secret@host/x?password=secret")
    'postgresql://me:***@host/x?password=***'
    >>> hide_secrets("postgresql://token@host/x")
    'postgresql://***@host/x'
    """
    scheme, slashes, rest = url.partition("//") if "//" in url else ("", "", url)
    login, at, rest = rest.rpartition("@")  # a password may contain any character
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


Q = TypeVar("Q", bound=SharedStudy)


class Job(Protocol[Q]):
    """A study or search for workers to run. It is picklable, because workers are processes."""

    workers: int

    def open(self, worker: int) -> Q:
        """Open the shared study for the worker with this index."""

    def claim(self, shared: Q) -> optuna.Trial | None:
        """Start a trial; return None if none is left to start."""

    def count_unfinished(self, shared: Q) -> int:
        """Return how many trials are waiting or running."""

    def run(self, run_command: RunCommand, shared: Q, trial: optuna.Trial) -> str:
        """Run a trial, record its result, and return a progress line."""


def run_workers(job: Job[Any], run_command: RunCommand) -> None:
    """Run a job's trials in worker processes and in this process."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    others = [
        spawn.Process(target=_run_worker, args=(job, run_command, index, os.getpid()))
        for index in range(1, job.workers)
    ]
    for process in others:
        process.start()
    try:
        _run_trials(job, run_command, 0, None)
    except (KeyboardInterrupt, SystemExit):
        print("Interrupted; run the same command to continue.", flush=True)
        for process in others:
            process.terminate()
        raise
    for process in others:
        process.join()


def _run_worker(job: Job[Any], run_command: RunCommand, index: int, parent: int) -> None:
    """Run trials in a child process, quiet if the parent is."""
    with quietly() if is_quiet() else nullcontext():
        _run_trials(job, run_command, index, parent)


def _run_trials(job: Job[Q], run_command: RunCommand, index: int, parent: int | None) -> None:
    """Run trials until none is left or the parent process is gone."""
    with job.open(index) as shared:
        while parent is None or os.getppid() == parent:
            shared.requeue_lost()
            trial = job.claim(shared)
            if trial is not None:
                with shared.heartbeat(trial):
                    line = job.run(run_command, shared, trial)
                print(line, flush=True)
            elif job.count_unfinished(shared):
                time.sleep(_POLL_SECONDS)  # a worker may die and leave its trial
            else:
                return


class TrialQueue(SharedStudy):
    """Assigns each planned trial to one worker, and stores its results.

    Trials that are not planned here, such as those for other seeds, are ignored.
    """

    def fill(
        self,
        planned: Sequence[PlannedTrial],
        only: Sequence[str] | None = None,
        retry_failed: bool = False,
    ) -> None:
        """Queue the trials that are not queued yet, limited to the variants in `only` if given.

        Raises:
            ValueError: If a trial was queued with other settings.
        """
        known = {_key(trial): trial for trial in self._live()}
        for trial in planned:
            before = known.get((trial.variant, trial.seed))
            if before is not None and before.user_attrs["fingerprint"] != trial.fingerprint:
                raise ValueError(
                    f"The study has a trial {trial.name} with other settings: pass another "
                    "`output`, or use the settings of that trial."
                )
            is_new = before is None or (retry_failed and before.state is TrialState.FAIL)
            if is_new and (only is None or trial.variant in only):
                self.enqueue({}, {name: getattr(trial, name) for name in _PLANNED})

    def claim(
        self, planned: Sequence[PlannedTrial]
    ) -> tuple[optuna.Trial, PlannedTrial] | tuple[None, None]:
        """Start one of these trials if any is waiting, and return the trial and its plan."""
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
        else:  # Optuna would mark the trial as failed without a reason
            self.fail(
                trial, f"The {score} and MACs must be finite, got {values[0]} and {values[1]}."
            )

    def count_unfinished(self, planned: Iterable[PlannedTrial]) -> int:
        """Return how many of these trials are waiting or running."""
        fingerprints = {trial.fingerprint for trial in planned}
        unfinished = self.trials(TrialState.WAITING, TrialState.RUNNING)
        return sum(t.user_attrs.get("fingerprint") in fingerprints for t in unfinished)

    def rows(self, planned: Iterable[PlannedTrial]) -> list[dict[str, Any]]:
        """Return one row for each of these trials that completed or failed."""
        rows = []
        newest = {
            _key(trial): trial for trial in self._live()
        }  # the last attempt at a retried trial
        for plan in planned:
            trial = newest.get((plan.variant, plan.seed))
            if trial is None:
                continue
            identity = {"variant": plan.variant, "seed": plan.seed}
            row = trial.user_attrs.get("row")
            if trial.state is TrialState.COMPLETE and _belongs_to(row, plan):
                rows.append({**row, "status": "complete"})
            elif trial.state is TrialState.COMPLETE:
                reason = f"The database row for {plan.name} is not the result of a training run."
                rows.append({**identity, "status": "failed", "reason": reason})
            elif trial.state is TrialState.FAIL:
                reason = str(trial.user_attrs["reason"])
                rows.append({**identity, "status": "failed", "reason": reason})
        return rows

    def _live(self) -> list[FrozenTrial]:
        """Return the complete, running, waiting and failed trials, except lost ones."""
        live = self.trials(TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
        live += [t for t in self.trials(TrialState.FAIL) if "reason" in t.user_attrs]
        planned = [trial for trial in live if "variant" in trial.user_attrs]
        return sorted(planned, key=lambda trial: trial.number)


def _belongs_to(row: Any, plan: PlannedTrial) -> TypeIs[dict[str, Any]]:
    """Return True if a row from the shared database is a valid result for this trial."""
    if not isinstance(row, dict):
        return False
    figures = [row.get("accuracy", row.get("r2")), row.get("macs")]
    numbers = [f for f in figures if isinstance(f, int | float) and math.isfinite(f)]
    return len(numbers) == 2 and (row.get("variant"), row.get("seed")) == (plan.variant, plan.seed)


def _key(trial: FrozenTrial) -> tuple[str, int]:
    return trial.user_attrs["variant"], trial.user_attrs["seed"]
