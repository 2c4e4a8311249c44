"""Which clips of Speech Commands are in which part, under which label, and its silence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from ._audio import RATE
from ._decode import files_in

__all__ = ["LISTS", "WORDS", "clips_of_parts", "silent_clips", "stretch_of"]

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
LISTS = {"val": "validation_list.txt", "test": "testing_list.txt"}  # what is in neither is trained
_PAPER_SILENCE = {"train": 2000, "val": 300, "test": 300}
# Silence of the parts comes from different stretches of every recording, as shares of its length.
_STRETCHES = {"train": (0.0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1.0)}

Wave = NDArray[np.int16]


def clips_of_parts(
    folder: Path, unknown_label: int, unknown: str, seed: int
) -> dict[str, dict[str, int]]:
    """Return the files of every part with their labels, by the official lists."""
    listed = {
        f"{folder}/{line}": part
        for part, name in LISTS.items()
        for line in (folder / name).read_text().split()
    }
    parts: dict[str, dict[str, int]] = {"train": {}, "val": {}, "test": {}}
    for word in sorted(path.name for path in folder.glob("[!_.]*/") if path.is_dir()):
        label = WORDS.index(word) if word in WORDS else unknown_label
        for clip in files_in(folder / word, ".wav"):
            parts[listed.pop(clip, "train")][clip] = label
    if listed:
        rank_zero_warn(
            f"{len(listed)} clips that the lists in {folder} name are not there: this is a subset, "
            "or not completely unpacked."
        )
    if unknown == "subsampled":
        for clips in parts.values():
            _subsample(clips, unknown_label, seed)
    return parts


def _subsample(clips: dict[str, int], unknown_label: int, seed: int) -> None:
    """Leave as many unknown words as a word has clips."""
    unknown = [clip for clip, label in clips.items() if label == unknown_label]
    size = round((len(clips) - len(unknown)) / len(WORDS))
    for index in np.random.default_rng(seed).permutation(len(unknown))[size:]:
        del clips[unknown[index]]


def stretch_of(recording: Wave, part: str) -> Wave:
    """Return the stretch of a recording of noise that belongs to a part."""
    start, end = (int(share * len(recording)) for share in _STRETCHES[part])
    return recording[start:end]


def silent_clips(
    part: str, stretches: Sequence[Wave], amount: float | Literal["paper"], clips: int, seed: int
) -> Wave:
    """Cut clips of silence (clips, samples), each from a random place of a random stretch."""
    count = _PAPER_SILENCE[part] if amount == "paper" else round(amount * clips)
    generator = np.random.default_rng([seed, list(_STRETCHES).index(part)])
    silent = np.zeros((count, RATE), np.int16)
    for clip in silent:
        stretch = stretches[int(generator.integers(len(stretches)))]
        start = generator.integers(max(1, len(stretch) - RATE + 1))
        cut = stretch[start : start + RATE]
        clip[: len(cut)] = cut
    return silent
