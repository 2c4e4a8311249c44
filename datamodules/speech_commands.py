"""Speech Commands: spoken words in twelve classes."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from ._audio import (
    FRONT_ENDS,
    LISTS,
    RATE,
    WORDS,
    LogMel,
    ShiftAndNoise,
    cut_silence,
    list_clips,
    read_wave,
    select_segment,
)
from ._files import Download, Save, Tables, list_files, read_chunks
from ._splits import Split
from .base import BaseDataModule, check_choice


class SpeechCommandsDataModule(BaseDataModule):
    """One-second clips: ten words, silence, and all other words as `_unknown_`.

    The official split is used, in which no speaker appears in two splits. Silent clips are cut from
    background noise, and each split uses different segments of it. Unless `unknown` is
    `subsampled`, `_unknown_` is by far the most frequent class. `majority_rate()` returns the
    accuracy of always predicting that class.

        root/SpeechCommands/speech_commands_v0.02/{<word>/*.wav,validation_list.txt,testing_list.txt}

    Licence: CC BY 4.0. Reference: P. Warden, "Speech Commands: A Dataset for Limited-Vocabulary
    Speech Recognition", arXiv:1804.03209, 2018. 2.4 GB packed.

    Args:
        batch_size: Training batch size.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        front_end: Mel bands x frames. `40x41` covers the first 0.8 s with windows of 25 ms every
            20 ms, as the MACs in the paper imply. `40x98` covers 1 s with windows of 30 ms every
            10 ms, as the text of the paper says.
        silence: Number of silent clips, as a share of the other clips in a split. `paper` uses the
            paper's counts of 2,000, 300 and 300. With 0, there is no class for silence.
        unknown: Whether `_unknown_` contains `all` other words, or is `subsampled` to the average
            number of clips per known word.
        time_shift_ms: Maximum shift of training clips in either direction, in milliseconds.
        noise_volume: Maximum volume of the background noise added to training clips, including
            silent ones.
        on_mismatch: Whether to `convert` or `refuse` clips that are not mono at 16 kHz.
        **options: Further arguments of `BaseDataModule`, such as `root` and `split_seed`.
    """

    needs: ClassVar = {"torchaudio": "torchaudio"}
    downloads = (
        Download(
            "https://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
            "sha256:af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
            "SpeechCommands/speech_commands_v0.02",
            folder=".",
        ),
    )

    def __init__(
        self,
        batch_size: int = 256,
        eval_batch_size: int | None = None,
        front_end: Literal["40x41", "40x98"] = "40x41",
        silence: float | Literal["paper"] = 0.1,
        unknown: Literal["all", "subsampled"] = "all",
        time_shift_ms: int = 0,
        noise_volume: float = 0.0,
        on_mismatch: Literal["convert", "refuse"] = "convert",
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)
        if silence != "paper" and (isinstance(silence, str) or not 0 <= silence < 1):
            raise ValueError(f"`silence` must be a share in [0, 1) or 'paper', got {silence}.")
        if not 0 <= time_shift_ms < 1000 or noise_volume < 0:
            raise ValueError(
                "`time_shift_ms` must be in [0, 1000) and `noise_volume` at least 0, got "
                f"{time_shift_ms} and {noise_volume}."
            )
        self.front_end = check_choice("front_end", front_end, *FRONT_ENDS)
        self.silence = silence
        self.unknown = check_choice("unknown", unknown, "all", "subsampled")
        self.time_shift_ms = time_shift_ms
        self.noise_volume = noise_volume
        self.on_mismatch = check_choice("on_mismatch", on_mismatch, "convert", "refuse")
        self.folder = self.root / "SpeechCommands" / "speech_commands_v0.02"

    @property
    @override
    def class_names(self) -> tuple[str, ...]:
        return (*WORDS, *(("_silence_",) if self.silence else ()), "_unknown_")

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        shape = FRONT_ENDS[self.front_end]
        return (shape.mels, shape.frames)

    @property
    def _augmented(self) -> bool:
        return self.time_shift_ms > 0 or self.noise_volume > 0

    @override
    def sources(self) -> Sequence[Path | str]:
        lists = [self.folder / name for name in LISTS.values()]
        words = sorted(path for path in self.folder.glob("*/") if path.is_dir())
        return [*lists, *(clip for word in words for clip in list_files(word, ".wav"))]

    @override
    def settings(self) -> Mapping[str, Any]:
        names = ("front_end", "silence", "unknown", "on_mismatch", "split_seed", "_augmented")
        return {**{name: getattr(self, name) for name in names}, "noisy": self.noise_volume > 0}

    @override
    def decode(self, save: Save) -> None:
        wanted = bool(self.silence or self.noise_volume)
        recordings = list_files(self.folder / "_background_noise_", ".wav") if wanted else []
        noise = [self._read(path) for path in recordings]
        if wanted and sum(map(len, noise)) < 2 * RATE:
            raise FileNotFoundError(
                f"{self.folder}/_background_noise_ must contain WAV files of at least 2 s: get "
                "the whole dataset, or set `silence` and `noise_volume` to 0."
            )
        features = LogMel(FRONT_ENDS[self.front_end])
        unknown = len(self.class_names) - 1
        parts = list_clips(self.folder, unknown, self.unknown, self.split_seed)
        for part, clips in parts.items():
            segments = [select_segment(recording, part) for recording in noise]
            silent = cut_silence(part, segments, self.silence, len(clips), self.split_seed)
            waves = chain(
                read_chunks(list(clips), self._read_one_second), [silent] if len(silent) else []
            )
            if part == "train" and self._augmented:
                save("train_waves", waves)
                if self.noise_volume:
                    save("train_noise", segments)
            else:
                chunks = (features(torch.from_numpy(chunk)).numpy() for chunk in waves)
                save(f"{part}_features", chunks)
            labels = [*clips.values(), *[len(WORDS)] * len(silent)]  # silence follows the words
            save(f"{part}_labels", [np.array(labels)])

    def _read(self, path: str) -> NDArray[np.int16]:
        return read_wave(path, self.on_mismatch)

    def _read_one_second(self, path: str) -> NDArray[np.int16]:
        second = np.zeros(RATE, np.int16)
        wave = self._read(path)[:RATE]
        second[: len(wave)] = wave
        return second

    @override
    def split(self, tables: Tables) -> dict[str, Split]:
        parts: dict[str, Split] = {}
        for name in ("train", "val", "test"):
            labels = tables.labels(f"{name}_labels")
            rows = np.arange(len(labels))
            if name == "train" and self._augmented:
                shift = self.time_shift_ms * RATE // 1000
                augmentation = ShiftAndNoise(shift, self.noise_volume, tables.get("train_noise"))
                features = LogMel(FRONT_ENDS[self.front_end])
                parts[name] = Split(tables["train_waves"], rows, labels, features, augmentation)
            else:
                parts[name] = Split(tables[f"{name}_features"], rows, labels)
        return parts
