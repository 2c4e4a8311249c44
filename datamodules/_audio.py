"""Read sound files, cut clips, and compute log-mel spectrograms."""

import os
import struct
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ._files import ArrayTable, list_files
from ._splits import Draws

RATE = 16_000  # samples per second
_FULL_SCALE = 32_768  # 16-bit audio
_MIN_RATE, _MAX_RATE = 1_000, 768_000
_MAX_TAPS = 10**7  # maximum length of the resampling filters


@dataclass(frozen=True)
class FrontEnd:
    """Settings of the log-mel features, with times in samples at 16 kHz."""

    length: int  # samples used, from the start of the clip
    n_fft: int
    window: int
    hop: int
    centered: bool  # whether to pad clips so that frames are centred on their time
    frames: int
    mels: int = 40


FRONT_ENDS = {
    "40x41": FrontEnd(12_800, n_fft=512, window=400, hop=320, centered=True, frames=41),
    "40x98": FrontEnd(16_000, n_fft=480, window=480, hop=160, centered=False, frames=98),
}


class LogMel:
    """Computes log-mel features in decibels from 16-bit audio and standardises them per clip."""

    def __init__(self, front_end: FrontEnd) -> None:
        from torchaudio.transforms import AmplitudeToDB, MelSpectrogram

        self.length = front_end.length
        self._mel = MelSpectrogram(
            RATE,
            n_fft=front_end.n_fft,
            win_length=front_end.window,
            hop_length=front_end.hop,
            n_mels=front_end.mels,
            center=front_end.centered,
        )
        self._decibel = AmplitudeToDB("power")

    def __call__(self, waves: Tensor) -> Tensor:
        features: Tensor = self._decibel(self._mel(waves[..., : self.length] / _FULL_SCALE))
        centred = features - features.mean((-2, -1), keepdim=True)
        return centred / (features.std((-2, -1), keepdim=True) + 1e-5)


class ShiftAndNoise:
    """Shifts clips in time and adds background noise, for a whole batch at once.

    Args:
        shift: Maximum shift in either direction, in samples. Gaps are filled with silence.
        volume: Maximum volume of the noise.
        noise: Background noise, as 16-bit samples.
    """

    def __init__(self, shift: int, volume: float, noise: ArrayTable | None) -> None:
        self.shift = shift
        self.volume = volume
        self.noise = noise

    def draw(self, generator: np.random.Generator, samples: int) -> Draws:
        """Sample a shift, a noise position and a noise volume for every clip."""
        starts = 1 if self.noise is None else len(self.noise) - RATE + 1
        return {
            "shift": generator.integers(-self.shift, self.shift + 1, samples),
            "start": generator.integers(0, starts, samples),
            "volume": generator.uniform(0, self.volume, samples).astype(np.float32),
        }

    def apply(self, inputs: Tensor, draws: Draws) -> Tensor:
        """Augment a batch of 16-bit waveforms of shape (clips, samples)."""
        padded = F.pad(inputs, (self.shift, self.shift)).numpy()
        shifted = np.lib.stride_tricks.sliding_window_view(padded, inputs.shape[1], axis=1)
        waves = shifted[np.arange(len(inputs)), self.shift - draws["shift"]].astype(np.float32)
        if self.noise is not None and self.volume:
            windows = np.lib.stride_tricks.sliding_window_view(self.noise.array, inputs.shape[1])
            waves += draws["volume"][:, None] * windows[draws["start"]]
        return torch.from_numpy(waves.clip(-_FULL_SCALE, _FULL_SCALE - 1))


def read_wave(path: str, on_mismatch: str) -> NDArray[np.int16]:
    """Read a 16-bit WAV file as mono audio at 16 kHz."""
    try:
        with wave.open(path) as file:
            parameters = file.getparams()
            content = file.readframes(parameters.nframes)
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"{path} is damaged, or not an integer WAV file ({os.path.getsize(path)} bytes: "
            f"{error}): replace it."
        ) from error
    rate, channels = parameters.framerate, parameters.nchannels
    if (bits := _bits_per_sample(path)) != 16:
        raise ValueError(f"{path} must have 16-bit samples, got {bits} bits: convert the file.")
    expected = parameters.nframes * channels * parameters.sampwidth
    if len(content) < expected or not content:
        raise ValueError(
            f"{path} is damaged: its header promises {expected} bytes of audio, got "
            f"{len(content)}; replace it."
        )
    samples = np.frombuffer(content, "<i2").reshape(-1, channels)
    if (rate, channels) == (RATE, 1):
        return samples[:, 0]
    if on_mismatch == "refuse":
        raise ValueError(
            f"{path} must have one channel at {RATE} Hz, got {channels} at {rate} Hz: set "
            "on_mismatch='convert', or convert the file."
        )
    taps = rate // gcd(rate, RATE) * (RATE // gcd(rate, RATE)) if rate else 0
    if not _MIN_RATE <= rate <= _MAX_RATE or taps > _MAX_TAPS:
        raise ValueError(
            f"{path} has an unusual sample rate, {rate} Hz: resample it, for example to 16000 Hz."
        )
    return _resample(samples, rate)


def _bits_per_sample(path: str) -> int:
    """Read the sample size from the header, because Python rounds it up to whole bytes."""
    with open(path, "rb") as file:
        file.read(12)
        while len(head := file.read(8)) == 8:
            kind, size = struct.unpack("<4sI", head)
            if kind == b"fmt ":
                return int.from_bytes(file.read(16)[14:], "little")
            file.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError(f"{path} is damaged: it has no `fmt` chunk; replace it.")


def _resample(samples: NDArray[Any], rate: int) -> NDArray[np.int16]:
    from torchaudio.functional import resample

    mixed = torch.from_numpy(samples.astype(np.float32).mean(1))
    sound = resample(mixed, rate, RATE).round().clamp(-_FULL_SCALE, _FULL_SCALE - 1)
    converted: NDArray[np.int16] = sound.numpy().astype(np.int16)
    return converted


WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
# All other clips are for training.
LISTS = {"val": "validation_list.txt", "test": "testing_list.txt"}
_PAPER_SILENCE = {"train": 2000, "val": 300, "test": 300}
# Segment of every recording from which a split cuts silence, as fractions of its length.
_SEGMENTS = {"train": (0.0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1.0)}

Wave = NDArray[np.int16]


def list_clips(
    folder: Path, unknown_label: int, unknown: str, seed: int
) -> dict[str, dict[str, int]]:
    """Return the files in every split with their labels, according to the official lists."""
    listed = {
        f"{folder}/{line}": part
        for part, name in LISTS.items()
        for line in (folder / name).read_text().split()
    }
    parts: dict[str, dict[str, int]] = {"train": {}, "val": {}, "test": {}}
    words = [p.name for p in folder.glob("[!_.]*/") if p.is_dir() and not p.is_symlink()]
    for word in sorted(words):
        label = WORDS.index(word) if word in WORDS else unknown_label
        for clip in list_files(folder / word, ".wav"):
            parts[listed.pop(clip, "train")][clip] = label
    if listed:
        rank_zero_warn(
            f"{len(listed)} clips listed in {folder} are missing: the dataset is a subset, or was "
            "not unpacked completely."
        )
    if unknown == "subsampled":
        for clips in parts.values():
            _subsample(clips, unknown_label, seed)
    return parts


def _subsample(clips: dict[str, int], unknown_label: int, seed: int) -> None:
    """Reduce the clips of unknown words to the average number of clips per known word."""
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
    """Cut silent clips (clips, samples) from random positions in random segments."""
    count = _PAPER_SILENCE[part] if amount == "paper" else round(amount * clips)
    generator = np.random.default_rng([seed, list(_SEGMENTS).index(part)])
    silent = np.zeros((count, RATE), np.int16)
    for clip in silent:
        segment = segments[int(generator.integers(len(segments)))]
        start = generator.integers(max(1, len(segment) - RATE + 1))
        cut = segment[start : start + RATE]
        clip[: len(cut)] = cut
    return silent
