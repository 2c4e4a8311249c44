"""Download, unpack and read files, and cache decoded arrays as memory-mapped files."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import shutil
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, Protocol
from urllib.request import urlopen

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from dg_lightning.files import locked

LOCK_SECONDS = 3600.0  # maximum wait while another process downloads or decodes
_CHUNK = 1 << 20
_DAMAGED = (
    EOFError,
    NotImplementedError,  # unsupported compression method
    RuntimeError,  # password required
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)
_MAX_BYTES, _MAX_RATIO = 1 << 30, 100  # reject files that unpack beyond both limits
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


class DownloadError(Exception):
    """A download failed because of the network or the server."""


@dataclass(frozen=True)
class Download:
    """A file or archive to download.

    Args:
        url: URL of the file or archive.
        digest: The expected checksum, as `md5:...` or `sha256:...`.
        target: Destination below the root: a file, or a folder for an archive.
        folder: For an archive, the folder inside it that becomes the target.
    """

    url: str
    digest: str
    target: str
    folder: str | None = None


def check_digest(
    file: BinaryIO, digest: str, name: object, remedy: str = "delete it and download it again"
) -> None:
    """Raise ValueError if a file's content does not match its published checksum."""
    algorithm, _, expected = digest.partition(":")
    found = hashlib.new(algorithm)
    while chunk := file.read(_CHUNK):
        found.update(chunk)
    if found.hexdigest() != expected:
        raise ValueError(
            f"{name} is damaged: its {algorithm} should be {expected}, got {found.hexdigest()}; "
            f"{remedy}."
        )


def fetch(download: Download, root: Path) -> None:
    """Download, verify and unpack a file or archive atomically."""
    target = root / download.target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, so that it can be renamed. The lock keeps other processes out.
    scratch = target.with_name(f".{target.name}.download")
    with locked(root / ".download.lock", "downloads", LOCK_SECONDS):
        if target.exists():  # downloaded by another process, or incomplete
            return
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
        scratch.mkdir()
        try:
            got = scratch / PurePosixPath(download.url).name
            rank_zero_info(f"Downloading {download.url}")
            with got.open("wb") as file:
                file.writelines(_stream(download.url))
            with got.open("rb") as file:
                check_digest(file, download.digest, download.url, "try again later")
            if download.folder is not None:
                unpack(got, scratch / "unpacked")
                got = scratch / "unpacked" / download.folder
            got.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _stream(url: str) -> Iterator[bytes]:
    try:
        with urlopen(url, timeout=30) as answer:
            while chunk := answer.read(_CHUNK):
                yield chunk
    except (OSError, HTTPException) as error:
        raise DownloadError(getattr(error, "reason", error)) from error


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder, and reject paths that lead outside the folder."""
    with _damage_named(archive):
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                check_unpacked_size(archive, sum(item.file_size for item in packed.infolist()))
                for name in packed.namelist():
                    if not (folder / name).resolve().is_relative_to(folder.resolve()):
                        raise ValueError(
                            f"{archive.name} is not safe to unpack: it contains {name!r}."
                        )
                packed.extractall(folder)
            return
        try:
            with tarfile.open(archive) as packed:
                check_unpacked_size(archive, sum(item.size for item in packed))
                packed.extractall(folder, filter="data")
        except tarfile.FilterError as error:
            raise ValueError(f"{archive.name} is not safe to unpack: {error}.") from error


@contextmanager
def unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed according to its suffix."""
    kind = path.suffix.lower()
    if kind not in (*_OPENERS, ".zip"):
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as file:
        with _damage_named(path), ExitStack() as stack:
            if kind == ".zip":
                archive = stack.enter_context(zipfile.ZipFile(path))
                names = [name for name in archive.namelist() if not name.endswith("/")]
                if len(names) != 1:
                    raise ValueError(f"{path} must contain one file, got {len(names)}: unpack it.")
                source = archive.open(names[0])
            else:
                source = _OPENERS[kind](path)
            stack.enter_context(source)
            while chunk := source.read(_CHUNK):
                file.write(chunk)
                check_unpacked_size(path, file.tell())
        file.seek(0)
        yield file


def check_unpacked_size(path: Path, size: int) -> None:
    """Raise ValueError if a file is suspiciously large when unpacked."""
    if size > max(_MAX_BYTES, _MAX_RATIO * path.stat().st_size):
        raise ValueError(
            f"{path} unpacks to more than {_MAX_RATIO} times its size and {_MAX_BYTES >> 30} GiB: "
            "unpack it yourself if you trust it."
        )


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Convert errors caused by a damaged file to a one-line ValueError."""
    try:
        yield
    except gzip.BadGzipFile as error:
        raise ValueError(f"{path} is damaged ({error}): replace it.") from error
    except _DAMAGED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is damaged ({reason}): replace it.") from error
    except OSError as error:
        if error.errno is not None:  # a file system error, not damaged content
            raise
        raise ValueError(f"{path} is damaged ({error}): replace it.") from error


def list_files(folder: Path, ending: str) -> list[str]:
    """Return the sorted files with this ending, or nothing if the folder does not exist."""
    if not folder.is_dir():
        return []
    names = sorted(name for name in os.listdir(folder) if name.endswith(ending))
    return [f"{folder}/{name}" for name in names if not name.startswith(".")]


def read_chunks(
    paths: Sequence[str], read: Callable[[str], NDArray[Any]], size: int = 64
) -> Iterator[NDArray[Any]]:
    """Read files and yield their arrays in stacked chunks.

    Files are read in a single thread, because threads cost more than they save for small files.
    """
    for start in range(0, len(paths), size):
        yield np.stack([read(path) for path in paths[start : start + size]])


Indices = NDArray[np.int64]


Array = NDArray[Any]
FORMAT = 3  # increase if the same files and settings are decoded to different tables


class Save(Protocol):
    """Receives the results of a decoder."""

    def __call__(self, name: str, chunks: Iterable[Array]) -> None:
        """Save an array that arrives in chunks along its first axis."""
        ...

    def metadata(self, **metadata: Any) -> None:
        """Save JSON-compatible metadata, such as class names."""
        ...


Decode = Callable[[Save], None]


class ArrayTable:
    """Rows of an array, in memory or in a memory-mapped file.

    Pickling a file-backed table stores the path of the file, not the data.
    """

    def __init__(
        self, array: Array | None = None, file: tuple[Path, str, list[int]] | None = None
    ) -> None:
        self._array = array
        self._file = file

    @property
    def array(self) -> Array:
        """The array, which must not be modified."""
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
        # Positions of the non-zero values, row by row.
        entries = np.arange(ends[-1]) + np.repeat(first - (ends - lengths), lengths)
        dense = np.zeros((len(rows), self.columns), data.dtype)
        dense[np.repeat(np.arange(len(rows)), lengths), indices[entries]] = data[entries]
        return torch.from_numpy(dense)


class Tables(Mapping[str, ArrayTable]):
    """The arrays and metadata saved by a decoder."""

    def __init__(self, arrays: dict[str, ArrayTable], metadata: dict[str, Any]) -> None:
        self._arrays = arrays
        self.metadata = metadata

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
    """Return the tables that `decode` saves, cached by origin.

    The origin is everything the tables depend on: the settings, and the files with their sizes and
    times.

    Entries are created atomically by a rename. One process builds an entry while others wait. What
    a killed process leaves behind is never read, and the next process removes it. If the cache is
    not writable, the tables stay in memory.
    """
    described = json.dumps([FORMAT, origin], sort_keys=True)
    entry = folder / f"{name}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    try:
        if _read_entry(entry) is None:
            with _wrap_cache_errors(entry):
                folder.mkdir(parents=True, exist_ok=True)
            with _lock_entry(entry, name):
                if _read_entry(entry) is None:  # another process may have built it
                    _build_entry(entry, partial(_note_warnings, decode))
        tables = _open_entry(entry)
    except _CannotCacheError as error:
        rank_zero_warn(
            f"The decoded {name} data is kept in memory instead of being cached: {error}. "
            "Set `cache_dir` or DG_CACHE to a writable folder with enough space."
        )
        return tables_in_memory(decode)
    for text in tables.metadata.pop("warnings"):
        rank_zero_warn(text)
    return tables


def _note_warnings(decode: Decode, save: Save) -> None:
    """Decode data, and save this package's warnings so that cached data can repeat them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode(save)
    here = Path(__file__).parent
    save.metadata(warnings=[str(w.message) for w in caught if Path(w.filename).parent == here])
    for other in caught:
        if Path(other.filename).parent != here:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)


def tables_in_memory(decode: Decode) -> Tables:
    """Return the tables that `decode` saves, without writing files."""
    save = _MemorySave()
    decode(save)
    return Tables(save.arrays, save.all_facts)


class _CannotCacheError(Exception):
    """The cache cannot be used. Errors in the source data raise other exceptions."""


@contextmanager
def _wrap_cache_errors(entry: Path) -> Iterator[None]:
    """Convert file system errors to `_CannotCacheError`."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # a file system without locks raises the latter
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
            with _wrap_cache_errors(self.folder):  # closing flushes the buffer, which may fail too
                file.close()
        _require_rows(rows, name)
        self.arrays[name] = {"dtype": dtype, "shape": [rows, *shape]}

    def metadata(self, **metadata: Any) -> None:
        self.all_facts.update(metadata)

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

    def metadata(self, **metadata: Any) -> None:
        self.all_facts.update(metadata)


def _require_rows(rows: int, name: str) -> None:
    if not rows:
        raise ValueError(f"The dataset has no rows for {name!r}: it is incomplete.")


def _build_entry(entry: Path, decode: Decode) -> None:
    unfinished = Path(f"{entry}.unfinished")  # the lock keeps other processes out
    with _wrap_cache_errors(entry):
        for leftover in (unfinished, entry):  # left by a killed process, or damaged
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
    """Return the entry, or None if it is incomplete."""
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
            raise OSError(f"{entry.name} has changed since it was written")
        for table in tables.values():
            _ = table.array
    return tables
