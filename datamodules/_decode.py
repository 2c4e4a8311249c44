"""Read many small files."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["list_files", "read_chunks"]


def list_files(folder: Path, ending: str) -> list[str]:
    """Return the files of a folder with this ending, sorted; empty if it does not exist."""
    if not folder.is_dir():
        return []
    names = sorted(name for name in os.listdir(folder) if name.endswith(ending))
    return [f"{folder}/{name}" for name in names if not name.startswith(".")]


def read_chunks(
    paths: Sequence[str], read: Callable[[str], NDArray[Any]], size: int = 64
) -> Iterator[NDArray[Any]]:
    """Read files and yield their arrays in stacked chunks.

    Single-threaded, because contention between threads outweighs the reading of such small files.
    """
    for start in range(0, len(paths), size):
        yield np.stack([read(path) for path in paths[start : start + size]])
