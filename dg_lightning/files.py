"""Atomic file writes: a failed write leaves the old file unchanged."""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

__all__ = ["WholeFileCheckpointIO", "replacing", "write_text"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to the target, which replaces the target on success.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp(), "a.txt")
    >>> with replacing(target) as unfinished:
    ...     _ = unfinished.write_text("new")
    >>> target.read_text()
    'new'
    """
    path = path.resolve()  # follow links
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())  # otherwise a crash may lose the content
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


class WholeFileCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint next to its target and renames it, so that a full disk loses nothing.

    Lightning writes to the temporary folder and copies from there, which truncates the last good
    checkpoint if the disk is full.

    Args:
        read: Checkpoints that have been read and checked, by path: they are not read again.

    >>> import lightning.pytorch as pl
    >>> trainer = pl.Trainer(plugins=[WholeFileCheckpointIO()], accelerator="cpu", logger=False)
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
        with replacing(Path(path)) as unfinished:
            super().save_checkpoint(checkpoint, unfinished, storage_options)
