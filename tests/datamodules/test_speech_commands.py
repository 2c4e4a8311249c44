import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import torchaudio
from hostile import memory_limit, time_limit
from small_roots import WORDS, speech_commands, write_wave

from dg_lightning.datamodules import SpeechCommandsDataModule
from dg_lightning.datamodules._audio import ShiftAndNoise, read_wave
from dg_lightning.datamodules._files import ArrayTable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    speech_commands(folder_of(tmp_path))
    return tmp_path


def folder_of(root: Path) -> Path:
    return root / "SpeechCommands" / "speech_commands_v0.02"


def made(root: Path, **settings: Any) -> SpeechCommandsDataModule:
    data = SpeechCommandsDataModule(root=str(root), **settings)
    data.setup("fit")
    return data


def by_hand(path: Path, seconds: float, **options: Any) -> torch.Tensor:
    """Return the features of one clip, by torchaudio."""
    samples, _ = soundfile.read(path, dtype="float32")
    wave = torch.zeros(int(16_000 * seconds))
    wave[: len(samples)] = torch.from_numpy(samples)[: len(wave)]
    mel = torchaudio.transforms.MelSpectrogram(16_000, n_mels=40, **options)(wave)
    features: torch.Tensor = torchaudio.transforms.AmplitudeToDB("power")(mel)
    return (features - features.mean()) / (features.std() + 1e-5)


@pytest.mark.parametrize(
    ("front_end", "frames", "seconds", "options"),
    [
        ("40x41", 41, 0.8, {"n_fft": 512, "win_length": 400, "hop_length": 320}),
        ("40x98", 98, 1.0, {"n_fft": 480, "hop_length": 160, "center": False}),
    ],
)
def test_features_are_those_of_torchaudio_one_by_one(
    root: Path, front_end: Any, frames: int, seconds: float, options: dict[str, Any]
) -> None:
    data = made(root, front_end=front_end, silence=0)
    assert data.input_shape == (40, frames)
    names = (folder_of(root) / "validation_list.txt").read_text().split()
    order = sorted(names)  # words, and the clips of a word, by name
    expected = torch.stack([by_hand(folder_of(root) / name, seconds, **options) for name in order])
    inputs, labels = data._parts["val"].__getitems__(range(len(order)))
    # Bitwise equal where tried; a batched product of matrices may round otherwise elsewhere.
    torch.testing.assert_close(inputs, expected, rtol=1e-6, atol=1e-5)
    expected_labels = [name.split("/")[0] for name in order]
    found = [data.class_names[label] for label in labels]
    assert found == [w if w in WORDS[:10] else "_unknown_" for w in expected_labels]


def test_the_twelve_classes_and_the_official_split(root: Path) -> None:
    data = made(root)
    counts = data.class_counts()
    assert data.class_names == (*WORDS[:10], "_silence_", "_unknown_")
    for part, clips in {"train": 7, "val": 2, "test": 3}.items():
        words = {counts[part][word] for word in WORDS[:10]}
        assert words == {clips}
        assert counts[part]["_unknown_"] == 2 * clips
        assert counts[part]["_silence_"] == round(0.1 * 12 * clips)
    assert data.majority_rate() == pytest.approx(6 / 40)


def test_amounts_of_silence_and_of_unknown_words(root: Path) -> None:
    paper = made(root, silence="paper", unknown="subsampled").class_counts()
    assert [paper[part]["_silence_"] for part in paper] == [2000, 300, 300]
    assert [paper[part]["_unknown_"] for part in paper] == [7, 2, 3]
    without = made(root, silence=0)
    assert without.class_names == (*WORDS[:10], "_unknown_")
    assert without.num_classes == 11


def test_silence_of_the_parts_shares_no_noise(root: Path) -> None:
    for path in (folder_of(root) / "_background_noise_").glob("*.wav"):
        write_wave(path, np.arange(60_000) // 2)  # a sample's value tells its place
    data = made(root, silence=0.5, time_shift_ms=1)
    waves = data._parts["train"].table.take(data._parts["train"].rows)
    silent = waves[data._parts["train"].labels == data.class_names.index("_silence_")]
    assert len(silent) == 42
    assert int(silent.max()) < 0.8 * 30_000
    assert len({int(clip[0]) for clip in silent}) > 30
    again = made(root, silence=0.5, time_shift_ms=1, cache_dir=str(root / "other"))
    assert torch.equal(again._parts["train"].table.take(np.arange(126)), waves)
    other = made(root, silence=0.5, time_shift_ms=1, split_seed=1)
    assert not torch.equal(other._parts["train"].table.take(np.arange(126)), waves)


def test_clips_are_shifted_and_noise_is_added_as_drawn() -> None:
    clips = torch.arange(1, 13, dtype=torch.int16).view(2, 6) * 100
    noise = np.arange(20_000, dtype=np.int16)
    change = ShiftAndNoise(shift=3, volume=0.5, noise=ArrayTable(noise))
    draws = {
        "shift": np.array([2, -3]),
        "start": np.array([10, 0]),
        "volume": np.array([0.5, 0.0], np.float32),
    }
    changed = change.apply(clips, draws)
    first = torch.tensor([0, 0, 100, 200, 300, 400]) + 0.5 * torch.arange(10, 16)
    assert torch.equal(changed[0], first)
    assert changed[1].tolist() == [1000, 1100, 1200, 0, 0, 0]
    drawn = change.draw(np.random.default_rng(0), 1000)
    assert set(drawn["shift"].tolist()) == set(range(-3, 4))
    assert 0 <= drawn["volume"].min() < drawn["volume"].max() < 0.5
    assert drawn["start"].max() <= 4000


def test_augmentation_changes_training_clips_alone(root: Path) -> None:
    plain, changed = made(root), made(root, time_shift_ms=100, noise_volume=0.3)
    for part in ("train", "val", "test"):
        every = range(len(plain._parts[part]))
        pair = [data._parts[part].__getitems__(every)[0] for data in (plain, changed)]
        assert pair[0].shape == pair[1].shape
        assert torch.equal(*pair) == (part != "train")


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (16_000, 2), (44_100, 2)])
def test_another_rate_or_two_channels_are_converted_or_refused(
    root: Path, rate: int, channels: int
) -> None:
    path = folder_of(root) / "yes" / "00000009_nohash_0.wav"
    tone = 8000 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    stereo = np.stack([tone * 1.5, tone * 0.5], 1) if channels == 2 else tone
    write_wave(path, stereo, rate)
    converted = read_wave(str(path), "convert")
    assert len(converted) == 16_000
    expected = 8000 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert np.abs(converted - expected)[200:-200].max() < 80  # 1 %
    made(root)
    with pytest.raises(
        ValueError, match=f"one channel at 16000 Hz, got {channels} at {rate} Hz: .*on_mism"
    ):
        made(root, on_mismatch="refuse")


def test_damaged_clips_are_named_with_their_size(root: Path) -> None:
    path = folder_of(root) / "go" / "00000001_nohash_0.wav"
    whole = path.read_bytes()
    os.truncate(path, 20_000)
    with pytest.raises(ValueError, match=r"00000001_nohash_0.wav.*promises 32000 .*got 19956"):
        made(root)
    for content in (b"", whole[:20], whole[:8] + b"JUNK" + whole[12:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"00000001_nohash_0.wav is dam.*{len(content)} byte"):
            made(root)
    path.write_bytes(whole[:44])
    with pytest.raises(ValueError, match=r"00000001_nohash_0.wav.*promises 32000 .*got 0"):
        made(root)
    soundfile.write(path, np.zeros(16_000), 16_000, subtype="FLOAT")
    with pytest.raises(
        ValueError, match=r"00000001_nohash_0.wav is damaged, or not an integer WAV"
    ):
        made(root)
    soundfile.write(path, np.zeros(16_000), 16_000, subtype="PCM_24")
    with pytest.raises(ValueError, match=r"00000001_nohash_0.wav must have 16-bit samples, got 24"):
        made(root)


def test_noise_is_there_when_it_is_wanted_later(root: Path) -> None:
    parts = [
        made(root, silence=0, time_shift_ms=1, noise_volume=volume)._parts["train"]
        for volume in (0.0, 5.0)
    ]
    quiet, loud = (part.__getitems__(range(len(part)))[0] for part in parts)
    assert (quiet - loud).abs().mean() > 0.1


def test_clips_that_are_listed_but_not_there_are_counted(root: Path) -> None:
    (folder_of(root) / "yes" / "00000000_nohash_0.wav").unlink()
    with pytest.warns(UserWarning, match="1 clips listed in .* are missing"):
        made(root)


def test_no_noise_no_silence(root: Path) -> None:
    for path in (folder_of(root) / "_background_noise_").glob("*.wav"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"_background_noise_ must .*`silence`.*to 0"):
        made(root)
    assert Counter(made(root, silence=0)._parts["val"].labels.tolist())[10] == 4


@pytest.mark.parametrize(
    "settings", [{"silence": 1.0}, {"silence": -0.1}, {"time_shift_ms": 1000}, {"noise_volume": -1}]
)
def test_impossible_amounts_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}`.* got "):
        SpeechCommandsDataModule(**settings)


def write_any_wave(path: Path, rate: int = 16_000, bits: int = 16, channels: int = 1) -> None:
    """Write a second of audio under a header that says anything."""
    body = b"\1\2" * 16_000 * channels
    align = 2 * channels
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * align % 2**32, align, bits)
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    head += b"data" + struct.pack("<I", len(body))
    path.write_bytes(b"RIFF" + struct.pack("<I", len(head) + len(body)) + head + body)


@pytest.mark.parametrize("on_mismatch", ["convert", "refuse"])
@pytest.mark.parametrize("bits", [9, 12, 13, 15])
def test_samples_of_fewer_bits_are_not_read_as_16(
    bits: int, on_mismatch: str, tmp_path: Path
) -> None:
    write_any_wave(tmp_path / "a.wav")
    assert len(read_wave(str(tmp_path / "a.wav"), on_mismatch)) == 16_000
    write_any_wave(tmp_path / "a.wav", bits=bits)
    with pytest.raises(ValueError, match=rf"a\.wav.* {bits} bits"):
        read_wave(str(tmp_path / "a.wav"), on_mismatch)


@pytest.mark.parametrize("rate", [0, 1, 7, 15_999, 999_983, 2**31 - 1, 2**32 - 1])
def test_an_absurd_rate_is_refused(rate: int, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    write_any_wave(path, rate)
    with (
        time_limit(),
        memory_limit(0.5),
        pytest.raises(ValueError, match=rf"a\.wav.* {rate}\b") as caught,
    ):
        read_wave(str(path), "convert")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 32_000, 44_100, 48_000, 96_000])
def test_usual_rates_are_converted(rate: int, tmp_path: Path) -> None:
    write_any_wave(tmp_path / "a.wav", rate)
    found = read_wave(str(tmp_path / "a.wav"), "convert")
    assert len(found) == -(-16_000 * 16_000 // rate)


def test_links_to_folders_of_clips_are_not_followed(root: Path) -> None:
    before = {name: len(made(root).part(name)) for name in ("train", "val", "test")}
    (folder_of(root) / "copy").symlink_to(folder_of(root) / "yes")
    assert {name: len(made(root).part(name)) for name in before} == before
