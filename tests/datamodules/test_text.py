from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dg_lightning.datamodules import TextDataModule


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files of letters, each with letters of its own, and some that are left out."""
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    for index in range(40):
        place = texts / ("deep" if index % 2 else "")
        (place / f"{index}.txt").write_text(chr(0x30 + index) * (200 + 10 * index))
    (texts / "copy.txt").write_text("0" * 200)  # of 0.txt
    (texts / "empty.txt").touch()
    (texts / "picture.txt").write_bytes(b"\0\1\2" * 500)
    (texts / "other.md").write_text("~" * 500)
    return texts


def text(folder: Path, /, **options: Any) -> TextDataModule:
    settings = {"folder": str(folder), "pattern": "*.txt", "context": 32, "batch_size": 8}
    settings["cache_dir"] = str(folder / "c")
    data = TextDataModule(**{**settings, **options})
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.filterwarnings("ignore:.*not text")
def test_files_belong_to_one_part_each_and_none_is_lost(folder: Path) -> None:
    data = text(folder, val_share=0.2, test_share=0.1)
    parts: Any = {name: data.part(name) for name in ("train", "val", "test")}
    letters = {name: set(part.text.array.tolist()) for name, part in parts.items()}
    assert not letters["train"] & letters["val"]
    assert not letters["train"] & letters["test"]
    assert not letters["val"] & letters["test"]
    everything = np.concatenate([part.text.array for part in parts.values()])
    sizes = {chr(0x30 + i): 200 + 10 * i for i in range(40)}
    values, counts = np.unique(everything, return_counts=True)
    assert {chr(v): c for v, c in zip(values, counts, strict=True)} == sizes
    shares = {name: len(part.text) / len(everything) for name, part in parts.items()}
    assert shares["val"] == pytest.approx(0.2, abs=0.05)
    assert shares["test"] == pytest.approx(0.1, abs=0.05)
    again = text(folder, val_share=0.2, test_share=0.1, split_seed=1)
    assert set(again.part("val").text.array.tolist()) != letters["val"]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*not text")
def test_a_batch_is_bytes_and_the_bytes_after_them(folder: Path) -> None:
    data = text(folder, windows_per_epoch=50, eval_windows=9)
    loader = data.train_dataloader()
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [8] * 6 + [2]
    for x, y in batches:
        assert x.shape == y.shape == (len(x), 32)
        assert x.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
    source = data.part("train").text.array.tobytes()  # type: ignore[attr-defined]
    assert all(bytes(row.tolist()) in source for x, _ in batches for row in x)
    second_epoch = list(loader)
    assert not torch.equal(batches[0][0], second_epoch[0][0])
    fresh = data.train_dataloader()
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, fresh, strict=True))
    held_out = [torch.cat([x for x, _ in data.val_dataloader()]) for _ in range(2)]
    assert len(held_out[0]) == 9
    assert torch.equal(*held_out)


@pytest.mark.filterwarnings("ignore:.*not text")
def test_a_resumed_epoch_sees_its_other_windows(folder: Path) -> None:
    data = text(folder, windows_per_epoch=40)
    loader = data.train_dataloader()
    everything = list(loader)
    started = data.train_dataloader()
    iterator = iter(started)
    for _ in range(2):
        next(iterator)
    resumed = data.train_dataloader()
    resumed.load_state_dict(started.state_dict())
    rest = list(resumed)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(rest, everything[2:], strict=True))


def test_without_a_folder_it_is_the_source_of_python() -> None:
    data = TextDataModule(context=64, batch_size=4, eval_windows=4)
    data.setup("fit")
    assert len(data.part("train").text) > 2_000_000  # type: ignore[attr-defined]
    assert not any("site-packages" in Path(path).parts for path in data.sources())
    assert b"def " in data.part("val").text.array.tobytes()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*not text")
def test_bad_input_gets_one_line(folder: Path) -> None:
    for options, message in (
        ({"folder": str(folder / "none")}, "`folder` must be a folder"),
        ({"pattern": "*.md"}, "needs at least three files, .* got 1"),
        ({"context": 0}, "`context` must be at least 1"),
        ({"context": 5000}, "a window needs 5001"),
        ({"val_share": 0.6, "test_share": 0.4}, "`val_share` .* got 0.6 and 0.4"),
        ({"packages": True}, "`packages` and `folder`"),
        ({"sample_temperature": -1.0}, "`sample_temperature` must be at least 0"),
        ({"prompt": ""}, "`prompt` must"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            text(folder, **options)


def test_one_large_file_is_for_training(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_text("x" * 100_000)
    for index in range(5):
        (tmp_path / f"{index}.txt").write_text(str(index) * 200)
    for seed in range(5):
        data = text(tmp_path, split_seed=seed)
        assert len(data.part("train").text) >= 100_000  # type: ignore[attr-defined]
        assert len(data.part("val").text) >= 200  # type: ignore[attr-defined]


def test_files_must_differ(tmp_path: Path) -> None:
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text("same" * 100)
    with pytest.raises(ValueError, match=r"at least three different text files.*got 1"):
        text(tmp_path)
