"""Folders of images: pixels against torchvision's, splits, checkpoints, and what is refused."""

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from small_roots import tiny_imagenet
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from dg_lightning.datamodules import ImageFolderDataModule, TinyImageNetDataModule

CLASSES = ("cat", "dog", "eel")


def write(folder: Path, images: int = 10, seed: int = 0, classes: Any = CLASSES) -> Path:
    draw = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(images):
            grey = index % 5 == 0
            pixels = draw.integers(0, 256, (8, 8) if grey else (8, 8, 3), dtype=np.uint8)
            kind = ("png", "bmp")[index % 2]
            Image.fromarray(pixels).save(folder / name / f"{index}.{kind}")
    return folder


def ready(path: Path, stage: str = "fit", **settings: Any) -> ImageFolderDataModule:
    settings = {"size": 8, "augment": "none", "cache_dir": str(path.parent / "cache"), **settings}
    data = ImageFolderDataModule(8, path=str(path), **settings)
    data.setup(stage)
    return data


def test_images_and_classes_are_those_of_torchvision(tmp_path: Path) -> None:
    data = ready(write(tmp_path / "pets"))
    normalize = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    steps = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), normalize])
    theirs = ImageFolder(str(tmp_path / "pets"), steps)
    assert list(data.class_names) == theirs.classes
    everything = data.part_to_predict()
    pixels, labels = everything.get_batch(np.arange(len(everything)))
    named = dict(
        zip(data.describe_samples()["file"], zip(pixels, labels, strict=True), strict=True)
    )
    for (path, label), (image, _) in zip(theirs.samples, theirs, strict=True):
        mine, my_label = named[str(Path(path).relative_to(tmp_path / "pets"))]
        torch.testing.assert_close(mine, image)
        assert my_label == label


@pytest.mark.filterwarnings("ignore:.*equal a training image")
def test_images_are_scaled_and_cropped_around_their_centre(tmp_path: Path) -> None:
    stripes = np.zeros((20, 40, 3), dtype=np.uint8)
    stripes[:, 10:30] = 255  # the square in the centre
    for name in ("a", "b"):
        (tmp_path / "wide" / name).mkdir(parents=True)
        for index in range(10):
            Image.fromarray(stripes).save(tmp_path / "wide" / name / f"{index}.png")
    data = ready(tmp_path / "wide", size=10)
    images = data.part_to_predict().table.take(np.arange(2))
    assert images.shape == (2, 3, 10, 10)
    assert images[..., 1:-1].eq(255).all()  # the border is mixed with its neighbours


def test_each_class_is_in_each_part_and_shares_hold(tmp_path: Path) -> None:
    data = ready(write(tmp_path / "pets", 20))
    sizes = {name: sum(counts.values()) for name, counts in data.class_counts().items()}
    assert sizes == {"train": 42, "val": 6, "test": 12}


def test_folders_of_parts_are_kept_and_missing_ones_held_out(tmp_path: Path) -> None:
    for name, seed in (("train", 1), ("test", 2)):
        write(tmp_path / "pets" / name, 20, seed)
    data = ready(tmp_path / "pets")
    files = data.describe_samples()
    assert {p for f, p in zip(files["file"], files["part"], strict=True) if f[:4] == "test"} == {
        "test"
    }
    assert len(data.part("test")) == 60
    assert len(data.part("val")) == 6


@pytest.mark.parametrize("names", [("Train", "Test"), ("train", "valid", "test")])
def test_parts_go_by_their_usual_names(names: tuple[str, ...], tmp_path: Path) -> None:
    for seed, name in enumerate(names):
        write(tmp_path / "pets" / name, 20, seed)
    data = ready(tmp_path / "pets")
    assert data.class_names == CLASSES
    assert len(data.part("test")) == 60
    assert len(data.part("val")) == (60 if len(names) == 3 else 6)


def test_images_are_seen_as_a_viewer_shows_them(tmp_path: Path) -> None:
    folder = tmp_path / "pets" / "cat"
    (folder / ".thumbs").mkdir(parents=True)
    write(tmp_path / "pets", 10, classes=("dog", "eel"))
    upright = np.zeros((8, 8, 3), dtype=np.uint8)
    upright[:4] = 255  # white above, black below
    turned = Image.fromarray(np.rot90(upright))
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    turned.save(folder / "a.png", exif=exif)
    deep = np.full((8, 8), 40_000, dtype=np.uint16)
    Image.fromarray(deep).save(folder / "b.png")
    Image.new("RGBA", (8, 8), (9, 9, 9, 0)).save(folder / "c.png")  # nothing to be seen
    Image.new("RGB", (8, 8)).save(folder / ".thumbs" / "d.png")
    for index in range(9):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"e{index}.png")
    data = ready(tmp_path / "pets")
    files = data.describe_samples()["file"]
    assert "cat/.thumbs/d.png" not in files
    images = data.part_to_predict().table
    place = [files.index(f"cat/{name}.png") for name in "abc"]
    seen = images.take(np.array(place))
    np.testing.assert_array_equal(seen[0].permute(1, 2, 0), upright)
    assert seen[1].eq(40_000 // 257).all()
    assert seen[2].eq(255).all()


def test_a_checkpoint_keeps_its_split_when_images_are_added(tmp_path: Path) -> None:
    fitted = ready(write(tmp_path / "pets", 20))
    before = fitted.describe_samples()
    parts = dict(zip(before["file"], before["part"], strict=True))
    draw = np.random.default_rng(9)
    new = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(new).save(tmp_path / "pets" / "cat" / "0new.png")
    other = ImageFolderDataModule(path=str(tmp_path / "pets"), cache_dir=str(tmp_path / "cache"))
    other.use_preparation(fitted.preparation())
    other.setup("test")
    files = np.array(other.describe_samples()["file"])
    tested = set(files[other.part("test").rows])
    assert tested == {name for name, part in parts.items() if part == "test"} | {"cat/0new.png"}
    assert other.input_shape == (3, 8, 8)  # from the checkpoint, not from its own arguments


def test_images_without_classes_are_predicted_but_not_tested(tmp_path: Path) -> None:
    fitted = ready(write(tmp_path / "pets"))
    flat = tmp_path / "new"
    flat.mkdir()
    Image.new("RGB", (30, 30)).save(flat / "x.png")
    (flat / "inner").mkdir()
    Image.new("RGB", (30, 30)).save(flat / "inner" / "y.png")
    other = ImageFolderDataModule(path=str(flat), cache_dir=str(tmp_path / "cache"))
    other.use_preparation(fitted.preparation())
    other.setup("predict")
    assert other.describe_samples()["file"] == ["inner/y.png", "x.png"]
    assert other.describe_samples()["true_label"] == ["", ""]
    with pytest.raises(ValueError, match=r"named after a class \(cat, dog, eel\)"):
        other.setup("test")


def test_bad_folders_get_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot find .*nowhere"):
        ready(tmp_path / "nowhere")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no images"):
        ready(tmp_path / "empty")
    broken = write(tmp_path / "broken")
    (broken / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"0\.png cannot be read .*: replace or remove it"):
        ready(broken)
    for name in ("train", "misc"):
        write(tmp_path / "mixed" / name)
    with pytest.raises(ValueError, match=r"train, val, test.*'misc'"):
        ready(tmp_path / "mixed")
    with pytest.raises(ValueError, match="got only 'cat'"):
        ready(write(tmp_path / "one", classes=("cat",)))
    with pytest.raises(ValueError, match="`size` must be at least 1"):
        ImageFolderDataModule(size=0)


def image_bytes(kind: str) -> bytes:
    """Return an image of 64 x 64 pixels in a format."""
    out = io.BytesIO()
    Image.new("RGB", (64, 64), (9, 8, 7)).save(out, kind)
    return out.getvalue()


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a Ghostscript into the path, which writes a file when it is run; return that file."""
    canary, program = tmp_path / "was_run", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {canary}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # looked for once in a process
    with Image.open(io.BytesIO(image_bytes("EPS"))) as image, suppress(OSError):
        image.load()
    assert canary.exists()  # this is what a file can do
    canary.unlink()
    return canary


@pytest.mark.parametrize("kind", ["EPS", "PCX", "PPM", "ICNS"])
@pytest.mark.parametrize("name", ["0.png", "0.jpg", "0.tiff"])
def test_a_file_in_another_format_than_its_name_allows_is_refused(
    kind: str, name: str, ghostscript: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "pets") / "cat" / name
    path.write_bytes(image_bytes(kind))
    with pytest.raises(ValueError, match=str(path)) as refused:
        ready(tmp_path / "pets")
    assert not ghostscript.exists()
    assert len(str(refused.value).splitlines()) == 1
    assert "hostscript" not in str(refused.value)


@pytest.mark.parametrize("kind", ["EPS", "PCX", "PNG"])
def test_tiny_imagenet_reads_jpeg_only(kind: str, ghostscript: Path, tmp_path: Path) -> None:
    tiny_imagenet(tmp_path / "tiny-imagenet-200")
    path = tmp_path / "tiny-imagenet-200/train/n01443537/images/n01443537_7.JPEG"
    path.write_bytes(image_bytes(kind))
    data = TinyImageNetDataModule(root=str(tmp_path))
    with pytest.raises(ValueError, match=path.name):
        data.setup("fit")
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "WEBP", "TIFF"])
def test_formats_that_are_read_may_have_another_of_their_names(kind: str, tmp_path: Path) -> None:
    (write(tmp_path / "pets") / "cat" / "0.png").write_bytes(image_bytes(kind))
    assert len(ready(tmp_path / "pets").part_to_predict()) == 30


LINKS = {
    "its own parent": ("cat/again", "cat"),
    "the root": ("cat/again", "."),
    "another class": ("cat/again", "dog"),
    "elsewhere": ("cat/again", "../elsewhere"),
    "a class": ("fox", "cat"),
    "a class that leads to the root": ("fox", "."),
    "nowhere": ("cat/again", "nowhere"),
    "itself": ("cat/again", "cat/again"),
}


@pytest.mark.filterwarnings("ignore:.*is a link to a folder")
@pytest.mark.parametrize(("link", "target"), LINKS.values(), ids=LINKS)
def test_links_to_folders_are_not_followed(link: str, target: str, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", 3, seed=1)
    root = write(tmp_path / "pets")
    (root / link).symlink_to(root / target)
    data = ready(root)
    assert data.class_names == CLASSES
    files = data.describe_samples()["file"]
    assert len(files) == 30
    assert not [name for name in files if name.startswith(link)]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    write(tmp_path / "pets")
    (tmp_path / "link").symlink_to(tmp_path / "pets")
    assert len(ready(tmp_path / "link").part_to_predict()) == 30


@pytest.mark.filterwarnings("ignore:.*is a link to a folder")
def test_links_among_the_folders_of_parts_are_not_followed(tmp_path: Path) -> None:
    for name, seed in (("train", 1), ("test", 2)):
        write(tmp_path / "pets" / name, 20, seed)
    (tmp_path / "pets" / "val").symlink_to(tmp_path / "pets" / "train")
    (tmp_path / "pets" / "test" / "cat" / "again").symlink_to(tmp_path / "pets" / "train" / "dog")
    data = ready(tmp_path / "pets")
    assert len(data.part("test")) == 60
    assert len(data.describe_samples()["file"]) == 120
