"""Download, verify and unpack dataset files."""

import hashlib
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.request import urlopen

from filelock import FileLock, Timeout
from lightning_utilities.core.rank_zero import rank_zero_info

__all__ = ["Download", "DownloadError", "check_digest", "fetch", "locked", "unpack"]

_CHUNK = 1 << 20


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
    with locked(root / ".download.lock", "downloads"):
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


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a file lock; log a message if another process blocks it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=2)
    except Timeout:
        rank_zero_info(f"Waiting for another process, which {what}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _stream(url: str) -> Iterator[bytes]:
    try:
        with urlopen(url, timeout=30) as answer:
            while chunk := answer.read(_CHUNK):
                yield chunk
    except (OSError, HTTPException) as error:
        raise DownloadError(getattr(error, "reason", error)) from error


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder; reject paths outside it."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for name in packed.namelist():
                if not (folder / name).resolve().is_relative_to(folder.resolve()):
                    raise ValueError(f"{archive.name} is not safe to unpack: it holds {name!r}.")
            packed.extractall(folder)
        return
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    except tarfile.FilterError as error:
        raise ValueError(f"{archive.name} is not safe to unpack: {error}.") from error
