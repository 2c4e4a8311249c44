"""Speech Commands: splits, labels and silent clips."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from ._audio import RATE
from ._decode import list_files

__all__ = ["LISTS", "WORDS", "cut_silence", "list_clips", "select_segment"]

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
LISTS = {"val": "validation_list.txt", "test": "testing_list.txt"}  # all others are for training
_PAPER_SILENCE = {"train": 2000, "val": 300, "test": 300}
# Each split cuts silence from its own segment of every recording, as fractions of its length.
_SEGMENTS = {"train": (0.0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1.0)}

Wave = NDArray[np.int16]


def list_clips(
    folder: Path, unknown_label: int, unknown: str, seed: int
) -> dict[str, dict[str, int]]:
    """Return the files of every split with their labels, using the official lists."""
    listed = {
        f"{folder}/{line}": part
        for part, name in LISTS.items()
        for line in (folder / name).read_text().split()
    }
    parts: dict[str, dict[str, int]] = {"train": {}, "val": {}, "test": {}}
    for word in sorted(path.name for path in folder.glob("[!_.]*/") if path.is_dir()):
        label = WORDS.index(word) if word in WORDS else unknown_label
        for clip in list_files(folder / word, ".wav"):
            parts[listed.pop(clip, "train")][clip] = label
    if listed:
        rank_zero_warn(
            f"{len(listed)} clips listed in {folder} are missing: this is a subset, or not "
            "completely unpacked."
        )
    if unknown == "subsampled":
        for clips in parts.values():
            _subsample(clips, unknown_label, seed)
    return parts


def _subsample(clips: dict[str, int], unknown_label: int, seed: int) -> None:
    """Reduce unknown words to the average number of clips per word."""
    unknown = [clip for clip, label in clips.items() if label == unknown_label]
    size = round((len(clips) - len(unknown)) / len(WORDS))
    for index in np.random.default_rng(seed).permutation(len(unknown))[size:]:
        del clips[unknown[index]]


def select_segment(recording: Wave, part: str) -> Wave:
    """Return the segment of a noise recording reserved for a split."""
    start, end = (int(share * len(recording)) for share in _SEGMENTS[part])
    return recording[start:end]


def cut_silence(
    part: str, segments: Sequence[Wave], amount: float | Literal["paper"], clips: int, seed: int
) -> Wave:
    """Cut silent clips (clips, samples) from random positions of random segments."""
    count = _PAPER_SILENCE[part] if amount == "paper" else round(amount * clips)
    generator = np.random.default_rng([seed, list(_SEGMENTS).index(part)])
    silent = np.zeros((count, RATE), np.int16)
    for clip in silent:
        segment = segments[int(generator.integers(len(segments)))]
        start = generator.integers(max(1, len(segment) - RATE + 1))
        cut = segment[start : start + RATE]
        clip[: len(cut)] = cut
    return silent
