import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from small_roots import tiny_imagenet
from torchvision import datasets, transforms

from dg_lightning.datamodules import TinyImageNetDataModule


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny_imagenet(tmp_path / "tiny-imagenet-200")
    return tmp_path


def made(root: Path, **settings: Any) -> TinyImageNetDataModule:
    data = TinyImageNetDataModule(root=str(root), **settings)
    data.setup("fit")
    return data


@pytest.mark.parametrize(
    ("statistics", "mean", "std"),
    [
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("tiny_imagenet", (0.480, 0.448, 0.398), (0.277, 0.269, 0.282)),
    ],
)
def test_training_values_and_labels_are_those_of_an_image_folder(
    root: Path, statistics: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    route = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    folder = datasets.ImageFolder(str(root / "tiny-imagenet-200" / "train"), route)
    data = made(root, augment="none", statistics=statistics)
    for part in ("train", "val"):
        rows = data._parts[part].rows
        inputs, labels = data._parts[part].__getitems__(range(len(rows)))
        # Grey images are among them: the folder's loader makes them RGB.
        assert torch.equal(inputs, torch.stack([folder[int(row)][0] for row in rows]))
        assert labels.tolist() == [folder[int(row)][1] for row in rows]


def test_the_official_validation_images_are_the_test_set(root: Path) -> None:
    folder = root / "tiny-imagenet-200" / "val"
    data = made(root)
    lines = [line.split("\t") for line in (folder / "val_annotations.txt").read_text().splitlines()]
    wnids = sorted(wnid for wnid in os.listdir(root / "tiny-imagenet-200" / "train"))
    inputs, labels = next(iter(data.test_dataloader()))
    expected = {
        wnids.index(line[1]): transforms.ToTensor()(
            Image.open(folder / "images" / line[0]).convert("RGB")
        )
        for line in lines
    }
    assert sorted(labels.tolist()) == sorted(wnids.index(line[1]) for line in lines)
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    for label, image in expected.items():
        assert any(torch.equal(found, (image - mean) / std) for found in inputs[labels == label])
    assert data.class_names == ("goldfish", "Egyptian cat", "n04067472")


def test_flip_alone_keeps_every_pixel_in_its_row(root: Path) -> None:
    plain, flipped = made(root, augment="none"), made(root, augment="flip")
    every = range(len(plain._parts["train"]))
    images, changed = (d._parts["train"].__getitems__(every)[0] for d in (plain, flipped))
    mirrored = (changed != images).flatten(1).any(1)
    assert torch.equal(changed[mirrored], images[mirrored].flip(-1))
    assert 10 < int(mirrored.sum()) < len(every) - 10


def test_damaged_and_strange_images_are_named(root: Path) -> None:
    path = root / "tiny-imagenet-200" / "train" / "n01443537" / "images" / "n01443537_7.JPEG"
    whole = path.read_bytes()
    os.truncate(path, 300)
    with pytest.raises(ValueError, match=r"n01443537_7.JPEG is damaged \(300 bytes"):
        made(root)
    Image.new("RGB", (32, 64)).save(path)
    with pytest.raises(
        ValueError, match=r"n01443537_7.JPEG must have 64 x 64 pixels, got \(64, 32\)"
    ):
        made(root)
    path.write_bytes(whole)
    with (root / "tiny-imagenet-200" / "val" / "val_annotations.txt").open("a") as file:
        file.write("<html>\n")
    with pytest.raises(ValueError, match=r"val_annotations.txt is damaged: .*'<html>'"):
        made(root)
    tiny_imagenet(root / "again" / "tiny-imagenet-200")
    root = root / "again"
    (root / "tiny-imagenet-200" / "wnids.txt").write_text("n01443537\nn02124075\n")
    with pytest.raises(ValueError, match=r"wnids.txt lacks n04067472"):
        made(root)


def test_words_that_come_later_are_read(root: Path) -> None:
    words = root / "tiny-imagenet-200" / "words.txt"
    content = words.read_text()
    words.unlink()
    assert made(root).class_names == ("n01443537", "n02124075", "n04067472")
    words.write_text(content)
    assert made(root).class_names == ("goldfish", "Egyptian cat", "n04067472")


def test_an_image_that_is_listed_but_not_there_is_missing(root: Path) -> None:
    (root / "tiny-imagenet-200" / "val" / "images" / "val_3.JPEG").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"cannot find .*val/images/val_3.JPEG; remove .*-200, which .*: download http",
    ):
        made(root)
