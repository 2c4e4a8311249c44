"""Atomic file writes: a failed write leaves the old file unchanged."""

import csv
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces the target on success.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp(), "a.txt")
    >>> with atomic_write(target) as unfinished:
    ...     _ = unfinished.write_text("new")
    >>> target.read_text()
    'new'
    """
    path = path.resolve()  # replace the target of a link, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())  # without this, a crash may lose the content
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def locked(path: Path, what: str, limit: float, remove: bool = False) -> Iterator[None]:
    """Hold a file lock.

    Args:
        path: The lock file, created if missing.
        what: What a process does while it holds the lock, such as "starts a run". Used in messages.
        limit: Seconds to wait for another process.
        remove: Whether to remove the file afterwards.

    Raises:
        ValueError: If another process holds the lock for longer than `limit`, or the file cannot
            be locked.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=2)
    except OSError as error:
        if not isinstance(error, Timeout):
            raise ValueError(f"{path} cannot be locked ({error}): use another folder.") from error
        rank_zero_info(f"Waiting for another process that {what} and has locked {path}")
        try:
            lock.acquire(timeout=limit)
        except Timeout as error:
            raise ValueError(
                f"Another process {what} and has held the lock on {path} for over {limit:.0f} s: "
                "wait for it to finish, or stop it."
            ) from error
    try:
        yield
    finally:
        if remove:
            path.unlink(missing_ok=True)
        lock.release()


def write_csv(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV table atomically, passing every cell through `csv_cell`."""
    with (
        atomic_write(path) as unfinished,
        unfinished.open("w", newline="", encoding="utf-8") as file,
    ):
        csv.writer(file).writerows(map(csv_cell, row) for row in rows)


_SKIPPED = "' \t\r\n\v\f\ufeff\u00a0\u3000"  # characters that spreadsheets ignore before a formula


def csv_cell(value: Any) -> Any:
    """Return a value that spreadsheets do not read as a formula.

    Text that starts like a formula is prefixed with an apostrophe.

    >>> csv_cell("=1+1"), csv_cell("-0.5"), csv_cell(-0.5), csv_cell(None)
    ("'=1+1", '-0.5', -0.5, '')
    """
    if value is None:
        return ""
    if not isinstance(value, str) or value.lstrip(_SKIPPED)[:1] not in tuple("=+-@＝＋－＠"):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def from_csv_cell(text: str) -> str:
    """Return the original text of a cell written with `csv_cell`.

    >>> from_csv_cell("'=1+1"), from_csv_cell("'quoted'")
    ('=1+1', "'quoted'")
    """
    return text[1:] if text.startswith("'") and csv_cell(text[1:]) == text else text


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically, so that a full disk cannot destroy the previous one.

    Lightning writes to the temporary folder and then copies the file over the previous checkpoint,
    which is truncated if the disk is full.

    Args:
        read: Checkpoints that have already been read and checked, keyed by path. They are not read
            again.

    >>> import lightning.pytorch as pl
    >>> trainer = pl.Trainer(plugins=[AtomicCheckpointIO()], accelerator="cpu", logger=False)
    """

    def __init__(self, read: Mapping[str, dict[str, Any]] | None = None) -> None:
        super().__init__()
        self._read = dict(read or {})

    @override
    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        if str(path) in self._read:
            return self._read.pop(str(path))
        content: dict[str, Any] = super().load_checkpoint(path, *args, **options)
        return content

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        if "://" in str(path):  # not a local file
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_write(Path(path)) as unfinished:
            super().save_checkpoint(checkpoint, unfinished, storage_options)
