"""The queue runs every trial once, however many workers there are or die."""

import json
import multiprocessing
import os
import signal
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError

from dg_lightning.study import shared
from dg_lightning.study.settings import PlannedTrial
from dg_lightning.study.shared import TrialQueue, sqlite_url

PLANNED = [PlannedTrial(v, s, (), f"{v}{s}") for s in range(3) for v in ("a", "b")]
FIRST = PLANNED[:1]
ROW: dict[str, Any] = {"accuracy": 0.5, "macs": 10.0}


@dataclass
class Clock:
    now: float = 0.0


def open_queue(folder: Path, workers: str = "workers") -> TrialQueue:
    return TrialQueue(sqlite_url(folder), "test", folder / workers)


def claimed(queue: TrialQueue) -> optuna.Trial:
    trial, _ = queue.claim(PLANNED)
    assert trial is not None
    return trial


def keys(queue: TrialQueue) -> list[tuple[str, int]]:
    return [(row["variant"], row["seed"]) for row in queue.rows(PLANNED)]


def work(folder: str, die_at: int | None = None) -> None:
    """Do trials until none is left; keep a note of each. Die in the middle of one, if asked."""
    with open_queue(Path(folder)) as queue:
        queue.fill(PLANNED)
        done = 0
        while True:
            trial, planned = queue.claim(PLANNED)
            if trial is None or planned is None:
                return
            if done == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            with Path(folder, "notes").open("a") as notes:
                notes.write(f"{planned.fingerprint}\n")
            queue.record_result(trial, {**ROW, "variant": planned.variant, "seed": planned.seed})
            done += 1


@pytest.mark.slow
def test_two_processes_share_a_queue_and_do_nothing_twice(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(str(tmp_path),)) for _ in range(2)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    assert [process.exitcode for process in workers] == [0, 0]
    notes = (tmp_path / "notes").read_text().split()
    assert sorted(notes) == sorted(t.fingerprint for t in PLANNED)
    rows = open_queue(tmp_path).rows(PLANNED)
    assert len(rows) == 6
    assert {row["status"] for row in rows} == {"complete"}


def test_to_look_and_to_take_is_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With Python's own transactions, which begin with a write, two workers take the same trial.
    one = open_queue(tmp_path)
    monkeypatch.setattr(shared, "_SQLITE_WAIT", 0.05)
    two = open_queue(tmp_path)
    with one.storage.engine.begin(), pytest.raises(OperationalError, match="locked"):
        two.storage.engine.connect().begin()


def test_a_trial_that_was_given_to_somebody_else_is_let_go(tmp_path: Path) -> None:
    with open_queue(tmp_path) as one, open_queue(tmp_path) as two:
        one.fill(FIRST)
        asleep = claimed(one)
        two.study.tell(0, state=TrialState.FAIL)
        two.requeue_lost()
        two.record_result(claimed(two), {**ROW, "variant": "a", "seed": 0})
        one.record_result(asleep, {**ROW, "accuracy": 0.1, "variant": "a", "seed": 0})
        one.fail(asleep, "too late")
        one.prune(asleep, "too late")
        assert [row["accuracy"] for row in two.rows(PLANNED)] == [0.5]


def test_what_two_workers_queue_at_once_counts_once(tmp_path: Path) -> None:
    with open_queue(tmp_path) as one, open_queue(tmp_path) as two:
        # Both have looked before either has written.
        live, two._live = two._live, list  # type: ignore[method-assign]
        one.fill(FIRST)
        two.fill(FIRST)
        two._live = live  # type: ignore[method-assign]
        trial = claimed(one)
        assert two.claim(PLANNED) == (None, None)
        one.record_result(trial, {**ROW, "variant": "a", "seed": 0})
        assert keys(two) == [("a", 0)]
        assert two.count_unfinished(PLANNED) == 0


def test_who_is_faster_gets_the_trial(tmp_path: Path) -> None:
    with open_queue(tmp_path) as one, open_queue(tmp_path) as two:
        one.fill(FIRST)
        (waiting,) = two.trials(TrialState.WAITING)
        trial = claimed(one)
        assert two.start(waiting) is None
        one.record_result(trial, {**ROW, "variant": "a", "seed": 0})
        assert two.start(waiting) is None


def test_a_killed_workers_trial_is_taken_up_at_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=work, args=(str(tmp_path), 2))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with open_queue(tmp_path) as queue:
        assert len(queue.rows(PLANNED)) == 2
        queue.requeue_lost()
        queue.requeue_lost()  # once is enough
        assert len(queue.trials(TrialState.WAITING)) == 4
        assert len(queue.trials(TrialState.RUNNING)) == 0
    work(str(tmp_path))
    assert sorted(keys(open_queue(tmp_path))) == sorted((t.variant, t.seed) for t in PLANNED)


def test_who_is_interrupted_puts_its_trial_back(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        queue.fill(FIRST)
        trial = claimed(queue)
        with pytest.raises(SystemExit), queue.heartbeat(trial):
            raise SystemExit(1)
        assert queue.rows(PLANNED) == []
        queue.requeue_lost()
        claimed(queue)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only the test moves."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def test_who_is_alive_is_left_alone_whatever_its_heartbeat(tmp_path: Path, clock: Clock) -> None:
    with open_queue(tmp_path) as one, open_queue(tmp_path) as two:
        one.fill(FIRST)
        claimed(one)
        two.requeue_lost()
        clock.now += 3600  # as of a process that was stopped
        two.requeue_lost()
        assert two.count_unfinished(PLANNED) == 1
        assert two.claim(PLANNED) == (None, None)


@pytest.mark.parametrize("beats", [True, False])
def test_a_worker_elsewhere_is_lost_when_its_heartbeat_stops(
    beats: bool, tmp_path: Path, clock: Clock
) -> None:
    with open_queue(tmp_path, "elsewhere") as elsewhere, open_queue(tmp_path) as queue:
        elsewhere.fill(FIRST)
        trial = claimed(elsewhere)
        for count in range(3):
            queue.requeue_lost()
            assert queue.claim(PLANNED) == (None, None)
            trial.set_user_attr("heartbeats", count if beats else 0)
            clock.now += 40
        queue.requeue_lost()
        assert queue.claim(PLANNED)[1] == (None if beats else PLANNED[0])


def test_who_died_before_it_said_its_name_is_lost_after_a_while(
    tmp_path: Path, clock: Clock
) -> None:
    with open_queue(tmp_path) as queue:
        queue.fill(FIRST)
        queue.study.ask()
        queue.requeue_lost()
        assert queue.claim(PLANNED) == (None, None)
        clock.now += 3600
        queue.requeue_lost()
        assert queue.claim(PLANNED)[1] == PLANNED[0]


def test_a_failure_has_a_reason_and_is_retried_only_if_asked(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        queue.fill(FIRST)
        queue.fail(claimed(queue), "ValueError: no")
        (row,) = queue.rows(PLANNED)
        assert (row["status"], row["reason"]) == ("failed", "ValueError: no")
        queue.requeue_lost()
        queue.fill(FIRST)
        assert queue.claim(PLANNED) == (None, None)
        queue.fill(FIRST, retry_failed=True)
        queue.record_result(claimed(queue), {**ROW, "variant": "a", "seed": 0})
        (row,) = queue.rows(PLANNED)
        assert row["status"] == "complete"


def test_an_accuracy_that_is_no_number_is_a_failure_not_a_loss(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        queue.fill(FIRST)
        queue.record_result(claimed(queue), {**ROW, "accuracy": float("nan")})
        queue.requeue_lost()
        assert queue.claim(PLANNED) == (None, None)
        assert "accuracy" in queue.rows(PLANNED)[0]["reason"]


def test_other_settings_are_refused_also_of_variants_that_are_not_asked_for(
    tmp_path: Path,
) -> None:
    queue = open_queue(tmp_path)
    queue.fill(PLANNED)
    other = [*FIRST, PlannedTrial("b", 0, (), "other")]
    with pytest.raises(ValueError, match=r"b, seed 0.*`output`"):
        queue.fill(other, only=["a"])


def test_trials_of_other_plans_wait_for_those_who_want_them(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        queue.fill(PLANNED)
        assert queue.claim(PLANNED[1:2])[1] == PLANNED[1]
        assert queue.claim(PLANNED[1:2]) == (None, None)
        assert queue.count_unfinished(PLANNED[1:2]) == 1
        assert queue.count_unfinished(PLANNED) == 6
        assert queue.claim([PlannedTrial("a", 0, (), "other")]) == (None, None)
        assert queue.rows(PLANNED) == []
        queue.fill([PlannedTrial("c", 0, (), "c0")], only=["a"])
        assert queue.count_unfinished([PlannedTrial("c", 0, (), "c0")]) == 0


def test_a_heart_beats_on_when_the_database_stumbles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_HEARTBEAT", 0.01)
    beats: list[int] = []

    with open_queue(tmp_path) as queue:
        queue.fill(FIRST)
        trial = claimed(queue)

        def beat(name: str, count: int) -> None:
            beats.append(count)
            if len(beats) == 1:
                raise StorageInternalError("database is locked")

        monkeypatch.setattr(trial, "set_user_attr", beat)
        with queue.heartbeat(trial):
            deadline = time.monotonic() + 5
            while len(beats) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
    assert beats[:3] == [0, 1, 2]


def test_a_row_is_written_when_the_database_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_HEARTBEAT", 0.01)
    with open_queue(tmp_path) as queue:
        queue.fill(FIRST)
        trial = claimed(queue)
        tell, failures = queue.study.tell, iter([True, True])

        def stumble(*args: Any, **kwargs: Any) -> Any:
            if next(failures, False):
                raise StorageInternalError("gone")
            return tell(*args, **kwargs)

        monkeypatch.setattr(queue.study, "tell", stumble)
        queue.record_result(trial, {**ROW, "variant": "a", "seed": 0})
        assert keys(queue) == [("a", 0)]


@pytest.mark.parametrize("storage", ["foo", "no_such_database://host/name"])
def test_a_storage_that_is_none_is_one_line(storage: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`storage` must be the URL") as error:
        TrialQueue(storage, "test", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "row",
    [
        {**ROW, "variant": "c", "seed": 0},  # a variant that is not planned
        {**ROW, "variant": "b", "seed": 0},  # another trial's
        {**ROW, "variant": "a", "seed": 7},
        {**ROW, "variant": ["a"], "seed": 0},
        {"variant": "a", "seed": 0},  # no result
        {**ROW, "variant": "a", "seed": 0, "accuracy": "=cmd"},
        {**ROW, "variant": "a", "seed": 0, "macs": None},
        "a",
        None,
    ],
)
def test_a_row_that_is_not_its_trials_is_named(row: Any, tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        queue.fill(FIRST)
        trial = claimed(queue)
        queue.finish(trial, [0.5, 10.0], row={"variant": "a", "seed": 0, **ROW})
        assert keys(queue) == [("a", 0)]
        queue.storage.engine.dispose()
    with sqlite3.connect(tmp_path / "study.db") as database:  # as anybody who may write it
        database.execute(
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'row'", (json.dumps(row),)
        )
    with open_queue(tmp_path) as queue:
        try:
            rows = queue.rows(PLANNED)
        except ValueError as error:
            assert "a, seed 0" in str(error)  # noqa: PT017  # the name of the trial
        else:
            (found,) = rows
            assert (found["variant"], found["seed"], found["status"]) == ("a", 0, "failed")
            assert "row" in found["reason"]


def test_a_failed_trial_without_a_reason_of_text_is_named(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        queue.fill(FIRST)
        queue.fail(claimed(queue), ["no", "text"])  # type: ignore[arg-type]
        try:
            (found,) = queue.rows(PLANNED)
        except ValueError as error:
            assert "a, seed 0" in str(error)  # noqa: PT017
        else:
            assert isinstance(found["reason"], str)
