"""Files that appear whole or not at all: a failed write leaves the old one as it was."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

__all__ = ["WholeFileCheckpointIO", "replacing", "write_text"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside the target to write to; it takes the target's place if nothing fails.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp(), "a.txt")
    >>> with replacing(target) as unfinished:
    ...     _ = unfinished.write_text("new")
    >>> target.read_text()
    'new'
    """
    path = path.resolve()  # of a link, what it points to
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())  # else a crash may keep the new name and lose the content
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file as a whole."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


class WholeFileCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target and renames it, so that a full disk loses nothing.

    Lightning's own way writes to the folder of temporary files and copies from there, which
    truncates the last good checkpoint where there is no room.

    >>> import lightning.pytorch as pl
    >>> trainer = pl.Trainer(plugins=[WholeFileCheckpointIO()], accelerator="cpu", logger=False)
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        if "://" in str(path):  # not a file of this machine
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(Path(path)) as unfinished:
            super().save_checkpoint(checkpoint, unfinished, storage_options)
