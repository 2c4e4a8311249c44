import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import random as random_sparse

from dg_lightning.datamodules._files import (
    ArrayTable,
    Save,
    SparseTable,
    cached_tables,
    tables_in_memory,
)

# Decodes eight chunks, a tenth of a second each; says so in a file when it begins one.
SLOW = """
import sys, time
from pathlib import Path
import numpy as np
from dg_lightning.datamodules._files import cached_tables

folder, log = Path(sys.argv[1]), Path(sys.argv[2])

def chunks():
    for i in range(8):
        with log.open("a") as file:
            file.write(f"{i}\\n")
        time.sleep(0.1)
        yield np.full((1000, 10), i, np.int32)

def decode(save):
    save("numbers", chunks())
    save.metadata(done=True)

tables = cached_tables(folder, "slow", "origin", decode)
print(int(tables["numbers"].array.sum()), tables.metadata["done"])
"""
TOTAL = 28 * 10_000


def numbers(rows: int = 6) -> np.ndarray:
    return np.arange(rows * 2, dtype=np.int16).reshape(rows, 2)


def decode(save: Save) -> None:
    save("numbers", [numbers()[:4], numbers()[4:]])
    save.metadata(names=["a", "b"])


def forbidden(save: Save) -> None:
    raise AssertionError("decoded again")


def start(folder: Path, log: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, str(folder), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_tables_come_back_from_disk(tmp_path: Path) -> None:
    for decoder in (decode, forbidden):
        tables = cached_tables(tmp_path, "x", ["origin"], decoder)
        assert np.array_equal(tables["numbers"].array, numbers())
        assert tables.metadata == {"names": ["a", "b"]}
    rows = np.array([5, 0, 5])
    assert torch.equal(tables["numbers"].take(rows), torch.from_numpy(numbers()[rows]))


@pytest.mark.parametrize("origin", [["other"], ["origin", 1]])
def test_another_origin_is_decoded_anew(tmp_path: Path, origin: Any) -> None:
    cached_tables(tmp_path, "x", ["origin"], decode)
    with pytest.raises(AssertionError, match="decoded again"):
        cached_tables(tmp_path, "x", origin, forbidden)


def test_what_is_taken_is_a_copy(tmp_path: Path) -> None:
    tables = cached_tables(tmp_path, "x", "origin", decode)
    tables["numbers"].take(np.array([0, 1])).zero_()
    assert np.array_equal(tables["numbers"].array, numbers())


def test_a_table_of_a_file_pickles_as_its_path(tmp_path: Path) -> None:
    save_big = lambda save: save("big", [np.zeros((1000, 1000))])  # noqa: E731
    table = cached_tables(tmp_path, "big", "origin", save_big)["big"]
    assert len(table) == 1000
    pickled = pickle.dumps(table)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).array, table.array)


@pytest.mark.parametrize(
    "damage", ["shorter", "missing", b'{"arrays": {', b"{}", b"null", b'{"arrays": []}', b"\xff"]
)
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str | bytes) -> None:
    cached_tables(tmp_path, "x", "origin", decode)
    (entry,) = (path for path in tmp_path.iterdir() if path.is_dir())
    if damage == "shorter":
        os.truncate(entry / "numbers", 7)
    elif damage == "missing":
        (entry / "numbers").unlink()
    elif isinstance(damage, bytes):
        (entry / "contents.json").write_bytes(damage)
    tables = cached_tables(tmp_path, "x", "origin", decode)
    assert np.array_equal(tables["numbers"].array, numbers())


def test_an_error_of_the_source_leaves_nothing_and_is_not_swallowed(tmp_path: Path) -> None:
    def broken(save: Save) -> None:
        def chunks() -> Iterator[np.ndarray]:
            yield numbers()
            raise OSError("the source is damaged")

        save("numbers", chunks())

    with pytest.raises(OSError, match="the source is damaged"):
        cached_tables(tmp_path, "x", "origin", broken)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("chunks", [[], [numbers(0)]])
def test_nothing_decoded_is_refused_and_not_kept(tmp_path: Path, chunks: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="has no rows for 'numbers': it is incomplete"):
            cached_tables(tmp_path, "x", "origin", lambda save: save("numbers", chunks))
    with pytest.raises(ValueError, match="has no rows for 'numbers'"):
        tables_in_memory(lambda save: save("numbers", chunks))


def test_what_cannot_be_mapped_is_kept_on_disk_and_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_tables(tmp_path, "x", "origin", decode)

    def no_device(*args: Any, **kwargs: Any) -> None:
        raise OSError(19, "No such device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "memmap", no_device)
        with pytest.warns(UserWarning, match="No such device"):
            tables = cached_tables(tmp_path, "x", "origin", decode)
    assert np.array_equal(tables["numbers"].array, numbers())
    cached_tables(tmp_path, "x", "origin", forbidden)


def test_a_cache_deleted_during_a_run_can_still_be_read(tmp_path: Path) -> None:
    tables = cached_tables(tmp_path / "cache", "x", "origin", decode)
    shutil.rmtree(tmp_path / "cache")
    assert np.array_equal(tables["numbers"].array, numbers())


def test_where_nothing_can_be_written_the_tables_stay_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(
        UserWarning, match="kept in memory.*Not a directory.*`cache_dir` or DG_CACHE"
    ):
        tables = cached_tables(tmp_path / "file" / "cache", "x", "origin", decode)
    assert np.array_equal(tables["numbers"].array, numbers())
    assert tables.metadata == {"names": ["a", "b"]}


@pytest.mark.slow
@pytest.mark.parametrize("room", [50_000, 3_000])  # what fails is a chunk, or what is buffered
def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path, room: int) -> None:
    chunks = (
        SLOW
        if room == 50_000
        else SLOW.replace(
            "yield np.full((1000, 10), i, np.int32)",
            "yield from np.full((1000, 1, 10), i, np.int32)",
        )
    )
    script = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the kernel then fails the write
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
{chunks}
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "cache"), str(tmp_path / "log")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{TOTAL} True\n", done.stderr
    assert "kept in memory" in done.stderr
    assert "File too large" in done.stderr
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


@pytest.mark.slow
def test_two_processes_at_once_decode_once_and_both_succeed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    both = [start(tmp_path / "cache", log) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert out == f"{TOTAL} True\n", err
    assert log.read_text().split() == list("01234567")


@pytest.mark.slow
def test_nothing_of_a_killed_process_is_trusted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(tmp_path / "cache", log)
    while not (log.exists() and len(log.read_text().split()) >= 4):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert [path.suffix for path in left] == [".unfinished"]  # it was really in the middle
    out, err = start(tmp_path / "cache", log).communicate(timeout=120)
    assert out == f"{TOTAL} True\n", err
    (entry,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert json.loads((entry / "contents.json").read_text())["facts"]["done"]


def test_a_sparse_table_gives_the_rows_of_the_matrix() -> None:
    matrix = random_sparse(20, 13, density=0.2, format="csr", dtype=np.float32, rng=0)
    matrix[3] = 0  # a row without entries
    matrix.eliminate_zeros()
    parts = (matrix.data, matrix.indices, matrix.indptr)
    data, indices, starts = map(ArrayTable, parts)
    table = SparseTable(data, indices, starts, columns=13)
    rows = np.array([3, 7, 7, 0, 19, 3])
    assert len(table) == 20
    assert np.array_equal(table.take(rows).numpy(), matrix[rows].toarray())
    assert table.take(np.array([3])).sum() == 0
