"""The queue: every trial once, whoever asks, whoever dies."""

import multiprocessing
import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError

from dg_lightning.study import shared
from dg_lightning.study.queue import TrialQueue
from dg_lightning.study.settings import PlannedTrial
from dg_lightning.study.shared import storage_in

PLANNED = [PlannedTrial(v, s, (), "f") for s in range(3) for v in ("a", "b")]
ROW = {"accuracy": 0.5, "macs": 10.0}


def open_queue(folder: Path) -> TrialQueue:
    return TrialQueue(storage_in(folder), "test", folder / "workers")


def keys(queue: TrialQueue) -> list[tuple[str, int]]:
    return [(row["variant"], row["seed"]) for row in queue.rows()]


def work(folder: str, die_at: int | None = None) -> None:
    """Do trials until none is left; keep a note of each. Die in the middle of one, if asked."""
    with open_queue(Path(folder)) as queue:
        queue.fill(PLANNED)
        done = 0
        while True:
            claimed, trial = queue.claim(PLANNED)
            if claimed is None or trial is None:
                return
            if done == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            with Path(folder, "notes").open("a") as notes:
                notes.write(f"{trial.variant}{trial.seed}\n")
            queue.finish(claimed, {**ROW, "variant": trial.variant, "seed": trial.seed})
            done += 1


def test_two_processes_share_a_queue_and_do_nothing_twice(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(str(tmp_path),)) for _ in range(2)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    assert [process.exitcode for process in workers] == [0, 0]
    notes = (tmp_path / "notes").read_text().split()
    assert sorted(notes) == sorted(f"{t.variant}{t.seed}" for t in PLANNED)
    rows = open_queue(tmp_path).rows()
    assert len(rows) == 6
    assert {row["status"] for row in rows} == {"complete"}


def test_to_look_and_to_take_is_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With Python's own transactions, which begin with a write, two workers take the same trial.
    one = open_queue(tmp_path)
    monkeypatch.setattr(shared, "_SQLITE_WAIT", 0.05)
    two = TrialQueue(storage_in(tmp_path), "test", tmp_path / "workers")
    with one.storage.engine.begin(), pytest.raises(OperationalError, match="locked"):
        two.storage.engine.connect().begin()


def test_a_trial_that_was_given_to_somebody_else_is_let_go(tmp_path: Path) -> None:
    with open_queue(tmp_path) as one, open_queue(tmp_path) as two:
        one.fill(PLANNED[:1])
        asleep, _ = one.claim(PLANNED)
        two.study.tell(0, state=TrialState.FAIL)
        two.take_up_lost()
        awake, _ = two.claim(PLANNED)
        assert asleep is not None
        assert awake is not None
        two.finish(awake, {**ROW, "variant": "a", "seed": 0})
        one.finish(asleep, {**ROW, "accuracy": 0.1, "variant": "a", "seed": 0})
        one.fail(asleep, "too late")
        assert [row["accuracy"] for row in two.rows()] == [0.5]


def test_what_two_workers_queue_at_once_counts_once(tmp_path: Path) -> None:
    with open_queue(tmp_path) as one, open_queue(tmp_path) as two:
        # Both have looked before either has written.
        live, two._live = two._live, lambda with_failed=True: []  # type: ignore[method-assign]
        one.fill(PLANNED[:1])
        two.fill(PLANNED[:1])
        two._live = live  # type: ignore[method-assign]
        claimed, trial = one.claim(PLANNED)
        assert trial == PLANNED[0]
        assert two.claim(PLANNED) == (None, None)
        one.finish(claimed, {**ROW, "variant": "a", "seed": 0})  # type: ignore[arg-type]
        assert keys(two) == [("a", 0)]
        assert two.unfinished() == 0


def test_a_worker_that_finds_the_queue_empty_after_looking_makes_no_trial(tmp_path: Path) -> None:
    with open_queue(tmp_path) as one, open_queue(tmp_path) as two:
        one.fill(PLANNED[:1])
        waiting = two.trials(TrialState.WAITING)
        assert one.claim(PLANNED)[1] == PLANNED[0]
        looks = iter([waiting, []])
        trials = two.trials
        two.trials = lambda *s: next(looks) if s == (TrialState.WAITING,) else trials(*s)  # type: ignore[method-assign]
        assert two.claim(PLANNED) == (None, None)
        assert two.rows() == []


def test_a_killed_workers_trial_is_taken_up_at_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=work, args=(str(tmp_path), 2))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with open_queue(tmp_path) as queue:
        assert len(queue.rows()) == 2
        queue.take_up_lost()
        queue.take_up_lost()  # once is enough
        assert len(queue.trials(TrialState.WAITING)) == 4
        assert len(queue.trials(TrialState.RUNNING)) == 0
    work(str(tmp_path))
    assert sorted(keys(open_queue(tmp_path))) == sorted((t.variant, t.seed) for t in PLANNED)


def test_who_is_alive_is_left_alone(tmp_path: Path) -> None:
    with open_queue(tmp_path) as one, open_queue(tmp_path) as two:
        one.fill(PLANNED[:1])
        assert one.claim(PLANNED)[1] is not None
        two.take_up_lost()
        assert two.unfinished() == 1
        assert two.claim(PLANNED) == (None, None)


def test_a_worker_elsewhere_is_lost_when_its_heartbeat_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_HEARTBEAT", 1)
    monkeypatch.setattr(shared, "_GRACE", 1)
    elsewhere = TrialQueue(storage_in(tmp_path), "test", tmp_path / "elsewhere")
    with open_queue(tmp_path) as queue:
        elsewhere.fill(PLANNED[:1])
        assert elsewhere.claim(PLANNED)[1] is not None  # and then is heard of no more
        queue.take_up_lost()
        assert queue.claim(PLANNED) == (None, None)
        with queue.storage.engine.connect() as connection:  # instead of waiting
            import sqlalchemy

            update = "UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')"
            connection.execute(sqlalchemy.text(update))
            connection.commit()
        queue.take_up_lost()
        assert queue.claim(PLANNED)[1] == PLANNED[0]


def test_who_died_before_the_first_sign_of_life_is_lost_after_a_while(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        assert not queue._is_dead(None, datetime.now())
        assert queue._is_dead(None, datetime.now() - timedelta(hours=1))


def test_a_failure_has_a_reason_and_is_retried_only_if_asked(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        queue.fill(PLANNED[:1])
        claimed, _ = queue.claim(PLANNED)
        assert claimed is not None
        queue.fail(claimed, "ValueError: no")
        (row,) = queue.rows()
        assert (row["status"], row["reason"]) == ("failed", "ValueError: no")
        queue.take_up_lost()
        queue.fill(PLANNED[:1])
        assert queue.claim(PLANNED) == (None, None)
        queue.fill(PLANNED[:1], retry_failed=True)
        claimed, _ = queue.claim(PLANNED)
        assert claimed is not None
        queue.finish(claimed, {**ROW, "variant": "a", "seed": 0})
        (row,) = queue.rows()
        assert row["status"] == "complete"


def test_other_settings_are_refused(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    queue.fill(PLANNED)
    with pytest.raises(ValueError, match="a, seed 0, with other settings: give another `output`"):
        queue.fill([PlannedTrial("a", 0, (), "other")])


def test_a_trial_that_the_settings_lost_fails_by_name(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        queue.fill(PLANNED[:2])
        assert queue.claim(PLANNED[:1])[1] == PLANNED[0]
        assert queue.claim(PLANNED[:1]) == (None, None)
        assert "do not have it any more" in queue.rows()[0]["reason"]


def test_a_heart_beats_while_a_trial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_HEARTBEAT", 0.01)
    beats: list[int] = []
    with open_queue(tmp_path) as queue:
        queue.fill(PLANNED[:1])
        claimed, _ = queue.claim(PLANNED)
        monkeypatch.setattr(queue.storage, "record_heartbeat", beats.append)
        assert claimed is not None
        with queue.beating(claimed):
            import time

            deadline = time.monotonic() + 5
            while len(beats) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
    assert len(beats) >= 3
