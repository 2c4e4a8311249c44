"""Decoding of many small files."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["files_in", "in_chunks"]


def files_in(folder: Path, ending: str) -> list[str]:
    """Return the files of a folder with this ending, sorted; none if there is no folder."""
    if not folder.is_dir():
        return []
    names = sorted(name for name in os.listdir(folder) if name.endswith(ending))
    return [f"{folder}/{name}" for name in names if not name.startswith(".")]


def in_chunks(
    paths: Sequence[str], read: Callable[[str], NDArray[Any]], size: int = 64
) -> Iterator[NDArray[Any]]:
    """Read files; return their arrays stacked, some at a time.

    Not in threads: with files as small as these, threads wait for each other longer than they read.
    """
    for start in range(0, len(paths), size):
        yield np.stack([read(path) for path in paths[start : start + size]])
