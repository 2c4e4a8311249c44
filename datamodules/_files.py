"""Files of a dataset: how they are downloaded, checked and unpacked."""

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
    """Something is wrong with the net or the server, not with the files here."""


@dataclass(frozen=True)
class Download:
    """A file or an archive on the net.

    Args:
        url: Where it is.
        digest: Its checksum, as `md5:...` or `sha256:...`.
        target: The file, or the folder that the archive becomes, below the root.
        folder: The folder of the archive that becomes the target, for an archive.
    """

    url: str
    digest: str
    target: str
    folder: str | None = None


def check_digest(
    file: BinaryIO, digest: str, name: object, way_out: str = "delete it and get it again"
) -> None:
    """Refuse a file whose content is not the published one."""
    algorithm, _, expected = digest.partition(":")
    found = hashlib.new(algorithm)
    while chunk := file.read(_CHUNK):
        found.update(chunk)
    if found.hexdigest() != expected:
        raise ValueError(
            f"{name} is damaged: its {algorithm} should be {expected}, got {found.hexdigest()}; "
            f"{way_out}."
        )


def fetch(download: Download, root: Path) -> None:
    """Put a file or an unpacked archive under the root: all of it, checked, or nothing."""
    target = root / download.target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that a rename is enough. Ours alone, because we hold the lock.
    scratch = target.with_name(f".{target.name}.download")
    with locked(root / ".download.lock", "downloads"):
        if target.exists():  # another process was faster, or it is incomplete
            return
        shutil.rmtree(scratch, ignore_errors=True)  # of a killed process
        scratch.mkdir()
        try:
            got = scratch / PurePosixPath(download.url).name
            rank_zero_info(f"Downloading {download.url}")
            with got.open("wb") as file:
                file.writelines(_chunks_of(download.url))
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
    """Hold a lock; say so if another process holds it for long."""
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


def _chunks_of(url: str) -> Iterator[bytes]:
    try:
        with urlopen(url, timeout=30) as answer:
            while chunk := answer.read(_CHUNK):
                yield chunk
    except (OSError, HTTPException) as error:
        raise DownloadError(getattr(error, "reason", error)) from error


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder; refuse one that would write outside it."""
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
