"""Tables of decoded samples, kept on disk and memory-mapped, so that decoding happens once."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from ._files import locked
from ._part import Indices

__all__ = ["ArrayTable", "Save", "SparseTable", "Tables", "cached_tables", "tables_in_memory"]

Array = NDArray[Any]
FORMAT = 2  # raise it when the same source and settings give other tables


class Save(Protocol):
    """What a decoder hands its results to."""

    def __call__(self, name: str, chunks: Iterable[Array]) -> None:
        """Keep an array that comes in chunks along its first axis."""
        ...

    def facts(self, **facts: Any) -> None:
        """Keep what JSON can hold: class names and the like."""
        ...


Decode = Callable[[Save], None]


class ArrayTable:
    """Rows of an array, in memory or in a file that is mapped.

    Pickled for a worker process, a file's table is its path, not its data.
    """

    def __init__(
        self, array: Array | None = None, file: tuple[Path, str, list[int]] | None = None
    ) -> None:
        self._array = array
        self._file = file

    @property
    def array(self) -> Array:
        """The array; not to be written to."""
        if self._array is None:
            assert self._file is not None
            path, dtype, shape = self._file
            # Copy on write, because torch has no read-only tensors; nothing writes.
            mapped = np.memmap(path, dtype=dtype, mode="c", shape=tuple(shape))
            self._array = np.asarray(mapped)
        return self._array

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: Indices) -> Tensor:
        """Return a copy of some rows."""
        return torch.from_numpy(self.array.take(rows, axis=0))

    def __getstate__(self) -> dict[str, Any]:
        return {"_array": None if self._file else self._array, "_file": self._file}


class SparseTable:
    """Rows of a CSR matrix, which become dense only when they are taken."""

    def __init__(
        self, data: ArrayTable, indices: ArrayTable, starts: ArrayTable, columns: int
    ) -> None:
        self._parts = (data, indices, starts)
        self.columns = columns

    def __len__(self) -> int:
        return len(self._parts[2]) - 1

    def take(self, rows: Indices) -> Tensor:
        """Return some rows, dense."""
        data, indices, starts = (part.array for part in self._parts)
        first, lengths = starts[rows], starts[rows + 1] - starts[rows]
        ends = np.cumsum(lengths)
        # Positions of all entries of these rows, one row after the other.
        entries = np.arange(ends[-1]) + np.repeat(first - (ends - lengths), lengths)
        dense = np.zeros((len(rows), self.columns), data.dtype)
        dense[np.repeat(np.arange(len(rows)), lengths), indices[entries]] = data[entries]
        return torch.from_numpy(dense)


class Tables(Mapping[str, ArrayTable]):
    """The arrays that a decoder saved, and its facts."""

    def __init__(self, arrays: dict[str, ArrayTable], facts: dict[str, Any]) -> None:
        self._arrays = arrays
        self.facts = facts

    def __getitem__(self, name: str) -> ArrayTable:
        return self._arrays[name]

    def __iter__(self) -> Any:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def labels(self, name: str = "labels") -> Tensor:
        """Return labels as a tensor in memory."""
        return torch.from_numpy(np.array(self._arrays[name].array, dtype=np.int64))


def cached_tables(folder: Path, name: str, origin: Any, decode: Decode) -> Tables:
    """Return what `decode` saves, from disk if it was saved for the same origin.

    The origin is what the result depends on: files with their sizes and times, and settings.

    An entry appears under its name by a single rename, when it is complete. One process at a time
    makes it; others wait for it. What a killed one leaves is never read, and removed by the next.
    Where nothing can be written, the tables stay in memory.
    """
    described = json.dumps([FORMAT, origin], sort_keys=True)
    entry = folder / f"{name}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    try:
        if _read(entry) is None:
            with _caching(entry):
                folder.mkdir(parents=True, exist_ok=True)
            with _lock(entry, name):
                if _read(entry) is None:  # another process may have made it meanwhile
                    _make(entry, decode)
        return _map(entry)
    except _CannotCacheError as error:
        rank_zero_warn(
            f"The decoded {name} data is kept in memory, for this process alone: {error}. "
            "Point `cache_dir` or DG_CACHE to a folder with room that you may write to."
        )
        return tables_in_memory(decode)


def tables_in_memory(decode: Decode) -> Tables:
    """Return what `decode` saves, without a file."""
    save = _MemorySave()
    decode(save)
    return Tables(save.arrays, save.all_facts)


class _CannotCacheError(Exception):
    """The cache cannot be used; errors of the source are other exceptions."""


@contextmanager
def _caching(entry: Path) -> Iterator[None]:
    """Say of errors of the file system that they are the cache's."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        reason = getattr(error, "strerror", None) or error
        raise _CannotCacheError(f"{entry.parent} cannot be used ({reason})") from error


@contextmanager
def _lock(entry: Path, name: str) -> Iterator[None]:
    with ExitStack() as stack:
        with _caching(entry):
            stack.enter_context(locked(Path(f"{entry}.lock"), f"decodes {name}"))
        yield


class _DiskSave:
    """Writes arrays as raw files into a folder, chunk by chunk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrays: dict[str, dict[str, Any]] = {}
        self.all_facts: dict[str, Any] = {}

    def __call__(self, name: str, chunks: Iterable[Array]) -> None:
        with _caching(self.folder):
            file = (self.folder / name).open("xb")
        rows, dtype, shape = 0, "", ()
        try:
            for chunk in chunks:
                assert not rows or (dtype, shape) == (chunk.dtype.str, chunk.shape[1:])
                rows, dtype, shape = rows + len(chunk), chunk.dtype.str, chunk.shape[1:]
                with _caching(self.folder):
                    file.write(np.ascontiguousarray(chunk).data)
            with _caching(self.folder):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with _caching(self.folder):  # what is still buffered may not fit either
                file.close()
        _require_rows(rows, name)
        self.arrays[name] = {"dtype": dtype, "shape": [rows, *shape]}

    def facts(self, **facts: Any) -> None:
        self.all_facts.update(facts)

    def finish(self) -> None:
        with _caching(self.folder), (self.folder / "contents.json").open("x") as file:
            json.dump({"arrays": self.arrays, "facts": self.all_facts}, file)
            file.flush()
            os.fsync(file.fileno())


class _MemorySave:
    """Keeps arrays in memory."""

    def __init__(self) -> None:
        self.arrays: dict[str, ArrayTable] = {}
        self.all_facts: dict[str, Any] = {}

    def __call__(self, name: str, chunks: Iterable[Array]) -> None:
        kept = list(chunks)
        _require_rows(sum(map(len, kept)), name)
        self.arrays[name] = ArrayTable(np.concatenate(kept))

    def facts(self, **facts: Any) -> None:
        self.all_facts.update(facts)


def _require_rows(rows: int, name: str) -> None:
    if not rows:
        raise ValueError(f"The dataset has nothing for {name!r}: it is not complete.")


def _make(entry: Path, decode: Decode) -> None:
    unfinished = Path(f"{entry}.unfinished")  # ours alone: we hold the lock
    with _caching(entry):
        for leftover in (unfinished, entry):  # of a killed process; damaged
            if leftover.exists():
                shutil.rmtree(leftover)
        unfinished.mkdir()
    try:
        save = _DiskSave(unfinished)
        decode(save)
        save.finish()
        with _caching(entry):
            unfinished.rename(entry)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _read(entry: Path) -> Tables | None:
    """Return a complete entry, or None."""
    try:
        contents = json.loads((entry / "contents.json").read_text())
        arrays = {}
        for name, array in contents["arrays"].items():
            path = entry / name
            size = np.dtype(array["dtype"]).itemsize * int(np.prod(array["shape"]))
            if path.stat().st_size != size:
                return None
            arrays[name] = ArrayTable(file=(path, array["dtype"], array["shape"]))
        return Tables(arrays, contents["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there, damaged, or another user's


def _map(entry: Path) -> Tables:
    """Return an entry whose arrays can be read even if it is deleted later."""
    tables = _read(entry)
    with _caching(entry):
        if tables is None:
            raise OSError(f"{entry.name} is not as it was written")
        for table in tables.values():
            _ = table.array
    return tables
