"""Download, verify and unpack dataset files."""

import bz2
import gzip
import hashlib
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO
from urllib.request import urlopen

from lightning_utilities.core.rank_zero import rank_zero_info

from dg_lightning.files import locked

__all__ = [
    "LOCK_SECONDS",
    "Download",
    "DownloadError",
    "check_digest",
    "check_unpacked_size",
    "fetch",
    "unpack",
    "unpacked",
]

LOCK_SECONDS = 3600.0  # to wait for another process that downloads or decodes
_CHUNK = 1 << 20
_DAMAGED = (
    EOFError,
    NotImplementedError,  # another way of packing
    RuntimeError,  # it needs a password
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)
_MAX_BYTES, _MAX_RATIO = 1 << 30, 100  # a file that unpacks to more than both is refused
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


class DownloadError(Exception):
    """The network or the server failed, not the local files."""


@dataclass(frozen=True)
class Download:
    """A file or archive to download.

    Args:
        url: Its URL.
        digest: Its checksum, as `md5:...` or `sha256:...`.
        target: Destination below the root: a file, or a folder for an archive.
        folder: For an archive, the folder inside it that becomes the target.
    """

    url: str
    digest: str
    target: str
    folder: str | None = None


def check_digest(
    file: BinaryIO, digest: str, name: object, remedy: str = "delete it and get it again"
) -> None:
    """Raise ValueError if the content does not match the published checksum."""
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
    """Download and verify a file, or an archive to unpack, atomically."""
    target = root / download.target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, so that a rename suffices. Not shared, because we hold the lock.
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
    """Unpack an archive into a folder; reject paths outside it."""
    with _damage_named(archive):
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                check_unpacked_size(archive, sum(item.file_size for item in packed.infolist()))
                for name in packed.namelist():
                    if not (folder / name).resolve().is_relative_to(folder.resolve()):
                        raise ValueError(
                            f"{archive.name} is not safe to unpack: it holds {name!r}."
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
    """Yield a file for reading, unpacked if its name says that it is packed."""
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
                    raise ValueError(f"{path} must hold one file, got {len(names)}: unpack it.")
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
    """Raise ValueError if a small file takes very much memory or disk once it is unpacked."""
    if size > max(_MAX_BYTES, _MAX_RATIO * path.stat().st_size):
        raise ValueError(
            f"{path} unpacks to more than {_MAX_RATIO} times its size and {_MAX_BYTES >> 30} GiB: "
            "unpack it yourself if you trust it."
        )


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn errors of a damaged file into one line."""
    try:
        yield
    except gzip.BadGzipFile as error:
        raise ValueError(f"{path} is damaged ({error}): get it again.") from error
    except _DAMAGED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is damaged ({reason}): get it again.") from error
    except OSError as error:
        if error.errno is not None:  # of the file system, not of the content
            raise
        raise ValueError(f"{path} is damaged ({error}): get it again.") from error
