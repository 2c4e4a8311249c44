"""Tables of decoded samples, cached on disk and memory-mapped."""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from dg_lightning.files import locked

from ._files import LOCK_SECONDS
from ._part import Indices

__all__ = ["ArrayTable", "Save", "SparseTable", "Tables", "cached_tables", "tables_in_memory"]

Array = NDArray[Any]
FORMAT = 3  # increase when the same source and settings give different tables


class Save(Protocol):
    """Receives the results of a decoder."""

    def __call__(self, name: str, chunks: Iterable[Array]) -> None:
        """Save an array, given in chunks along its first axis."""
        ...

    def facts(self, **facts: Any) -> None:
        """Save JSON-compatible metadata, such as class names."""
        ...


Decode = Callable[[Save], None]


class ArrayTable:
    """Rows of an array, in memory or in a memory-mapped file.

    A file-backed table is pickled as its path, not its data.
    """

    def __init__(
        self, array: Array | None = None, file: tuple[Path, str, list[int]] | None = None
    ) -> None:
        self._array = array
        self._file = file

    @property
    def array(self) -> Array:
        """The array; do not modify it."""
        if self._array is None:
            assert self._file is not None
            path, dtype, shape = self._file
            # Copy-on-write, because torch does not support read-only tensors.
            mapped = np.memmap(path, dtype=dtype, mode="c", shape=tuple(shape))
            self._array = np.asarray(mapped)
        return self._array

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: Indices) -> Tensor:
        """Return a copy of the given rows."""
        return torch.from_numpy(self.array.take(rows, axis=0))

    def __getstate__(self) -> dict[str, Any]:
        return {"_array": None if self._file else self._array, "_file": self._file}


class SparseTable:
    """Rows of a CSR matrix, converted to dense on access."""

    def __init__(
        self, data: ArrayTable, indices: ArrayTable, starts: ArrayTable, columns: int
    ) -> None:
        self._parts = (data, indices, starts)
        self.columns = columns

    def __len__(self) -> int:
        return len(self._parts[2]) - 1

    def take(self, rows: Indices) -> Tensor:
        """Return the given rows as a dense tensor."""
        data, indices, starts = (part.array for part in self._parts)
        first, lengths = starts[rows], starts[rows + 1] - starts[rows]
        ends = np.cumsum(lengths)
        # Positions of the entries of these rows, row by row.
        entries = np.arange(ends[-1]) + np.repeat(first - (ends - lengths), lengths)
        dense = np.zeros((len(rows), self.columns), data.dtype)
        dense[np.repeat(np.arange(len(rows)), lengths), indices[entries]] = data[entries]
        return torch.from_numpy(dense)


class Tables(Mapping[str, ArrayTable]):
    """The arrays and metadata saved by a decoder."""

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
        """Return labels as an in-memory tensor."""
        return torch.from_numpy(np.array(self._arrays[name].array, dtype=np.int64))


def cached_tables(folder: Path, name: str, origin: Any, decode: Decode) -> Tables:
    """Return the tables that `decode` saves, from the cache if it has them for the same origin.

    The origin is everything the result depends on: files with their sizes and times, and settings.

    Entries are created atomically by a rename. One process builds an entry while others wait. The
    remains of a killed process are never read, and the next process removes them. If the cache is
    not writable, the tables stay in memory.
    """
    described = json.dumps([FORMAT, origin], sort_keys=True)
    entry = folder / f"{name}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    try:
        if _read_entry(entry) is None:
            with _wrap_cache_errors(entry):
                folder.mkdir(parents=True, exist_ok=True)
            with _lock_entry(entry, name):
                if _read_entry(entry) is None:  # not built by another process meanwhile
                    _build_entry(entry, partial(_note_warnings, decode))
        tables = _open_entry(entry)
    except _CannotCacheError as error:
        rank_zero_warn(
            f"The decoded {name} data is kept in memory, for this process alone: {error}. "
            "Point `cache_dir` or DG_CACHE to a folder with room that you may write to."
        )
        return tables_in_memory(decode)
    for text in tables.facts.pop("warnings"):
        rank_zero_warn(text)
    return tables


def _note_warnings(decode: Decode, save: Save) -> None:
    """Decode, and save our warnings: they hold as well for those who find the tables decoded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode(save)
    here = Path(__file__).parent
    save.facts(warnings=[str(w.message) for w in caught if Path(w.filename).parent == here])
    for other in caught:
        if Path(other.filename).parent != here:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)


def tables_in_memory(decode: Decode) -> Tables:
    """Return the tables that `decode` saves, without writing files."""
    save = _MemorySave()
    decode(save)
    return Tables(save.arrays, save.all_facts)


class _CannotCacheError(Exception):
    """The cache is unusable; errors of the source data raise other exceptions."""


@contextmanager
def _wrap_cache_errors(entry: Path) -> Iterator[None]:
    """Convert file system errors to `_CannotCacheError`."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter if the file system has no locks
        reason = getattr(error, "strerror", None) or error
        raise _CannotCacheError(f"{entry.parent} cannot be used ({reason})") from error


@contextmanager
def _lock_entry(entry: Path, name: str) -> Iterator[None]:
    with ExitStack() as stack:
        with _wrap_cache_errors(entry):
            stack.enter_context(locked(Path(f"{entry}.lock"), f"decodes {name}", LOCK_SECONDS))
        yield


class _DiskSave:
    """Writes arrays to raw files in a folder, chunk by chunk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrays: dict[str, dict[str, Any]] = {}
        self.all_facts: dict[str, Any] = {}

    def __call__(self, name: str, chunks: Iterable[Array]) -> None:
        with _wrap_cache_errors(self.folder):
            file = (self.folder / name).open("xb")
        rows, dtype, shape = 0, "", ()
        try:
            for chunk in chunks:
                assert not rows or (dtype, shape) == (chunk.dtype.str, chunk.shape[1:])
                rows, dtype, shape = rows + len(chunk), chunk.dtype.str, chunk.shape[1:]
                with _wrap_cache_errors(self.folder):
                    file.write(np.ascontiguousarray(chunk).data)
            with _wrap_cache_errors(self.folder):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with _wrap_cache_errors(self.folder):  # flushing the buffer may fail too
                file.close()
        _require_rows(rows, name)
        self.arrays[name] = {"dtype": dtype, "shape": [rows, *shape]}

    def facts(self, **facts: Any) -> None:
        self.all_facts.update(facts)

    def finish(self) -> None:
        with _wrap_cache_errors(self.folder), (self.folder / "contents.json").open("x") as file:
            json.dump({"arrays": self.arrays, "facts": self.all_facts}, file)
            file.flush()
            os.fsync(file.fileno())


class _MemorySave:
    """Keeps arrays in memory."""

    def __init__(self) -> None:
        self.arrays: dict[str, ArrayTable] = {}
        self.all_facts: dict[str, Any] = {}

    def __call__(self, name: str, chunks: Iterable[Array]) -> None:
        arrays = list(chunks)
        _require_rows(sum(map(len, arrays)), name)
        self.arrays[name] = ArrayTable(np.concatenate(arrays))

    def facts(self, **facts: Any) -> None:
        self.all_facts.update(facts)


def _require_rows(rows: int, name: str) -> None:
    if not rows:
        raise ValueError(f"The dataset has nothing for {name!r}: it is not complete.")


def _build_entry(entry: Path, decode: Decode) -> None:
    unfinished = Path(f"{entry}.unfinished")  # not shared: we hold the lock
    with _wrap_cache_errors(entry):
        for leftover in (unfinished, entry):  # left by a killed process; damaged
            if leftover.exists():
                shutil.rmtree(leftover)
        unfinished.mkdir()
    try:
        save = _DiskSave(unfinished)
        decode(save)
        save.finish()
        with _wrap_cache_errors(entry):
            unfinished.rename(entry)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _read_entry(entry: Path) -> Tables | None:
    """Return the entry if it is complete, else None."""
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
        return None  # missing, damaged, or owned by another user


def _open_entry(entry: Path) -> Tables:
    """Return an entry whose arrays stay readable even if it is deleted later."""
    tables = _read_entry(entry)
    with _wrap_cache_errors(entry):
        if tables is None:
            raise OSError(f"{entry.name} is not as it was written")
        for table in tables.values():
            _ = table.array
    return tables
