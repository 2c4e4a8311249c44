import gzip
import os
from pathlib import Path

import pytest
import torch
from small_roots import idx
from torchvision import datasets, transforms

from dg_lightning.datamodules import FashionMNISTDataModule, MNISTDataModule


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    idx(tmp_path / "MNIST" / "raw", packed=False)
    return tmp_path / "MNIST" / "raw"


def made(raw: Path) -> MNISTDataModule:
    data = MNISTDataModule(root=str(raw.parents[1]))
    data.setup("fit")
    return data


def test_values_and_labels_are_those_of_torchvision_one_by_one(raw: Path) -> None:
    normalize = transforms.Normalize((0.1307,), (0.3081,))
    route = transforms.Compose([transforms.ToTensor(), normalize])
    data = made(raw)
    for train in (True, False):
        dataset = datasets.MNIST(str(raw.parents[1]), train=train, transform=route)
        for part in ("train", "val") if train else ("test",):
            rows = data._parts[part].rows
            inputs, labels = data._parts[part].__getitems__(range(len(rows)))
            assert torch.equal(inputs, torch.stack([dataset[int(row)][0] for row in rows]))
            assert labels.tolist() == [dataset[int(row)][1] for row in rows]


def test_packed_files_are_read_as_they_are(tmp_path: Path, raw: Path) -> None:
    idx(tmp_path / "packed" / "FashionMNIST" / "raw", packed=True)
    packed = FashionMNISTDataModule(root=str(tmp_path / "packed"))
    packed.setup("fit")
    plain = made(raw)
    scaled = [part.table.take(part.rows) for part in (packed._parts["test"], plain._parts["test"])]
    assert torch.equal(*scaled)


def test_damaged_files_are_named_with_what_was_expected(raw: Path) -> None:
    images = raw / "t10k-images-idx3-ubyte"
    whole = images.read_bytes()
    os.truncate(images, 1000)
    with pytest.raises(ValueError, match=r"t10k-images.*promises 39216 bytes, got 1000; delete it"):
        made(raw)
    images.write_bytes(b"<html>" + whole)
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte is not an IDX file with 3 dim"):
        made(raw)
    images.unlink()
    packed = images.with_name(f"{images.name}.gz")
    packed.write_bytes(gzip.compress(whole)[:-300])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz is damaged"):
        made(raw)
    packed.write_bytes(gzip.compress(whole))
    assert len(made(raw)._parts["test"]) == 50


def test_a_file_of_the_published_length_must_have_the_published_content(raw: Path) -> None:
    labels = raw / "t10k-labels-idx1-ubyte"
    head = (0x0801).to_bytes(4, "big") + (10_000).to_bytes(4, "big")
    labels.write_bytes(head + bytes(10_000))
    with pytest.raises(ValueError, match=r"labels.*md5 should be 27ae3e4e09519cfbb04c329615203637"):
        made(raw)


def test_files_that_do_not_belong_together_are_named(raw: Path) -> None:
    labels = raw / "t10k-labels-idx1-ubyte"
    content = labels.read_bytes()
    labels.write_bytes(content[:4] + (40).to_bytes(4, "big") + content[8:48])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"test files .* 50 images .* 40 labels"):
            made(raw)
    labels.write_bytes(content[:-1] + b"\x0b")
    with pytest.raises(ValueError, match="test files must be in 0 to 9, got 11"):
        made(raw)


def test_a_setup_that_failed_fails_again(raw: Path) -> None:
    labels = raw / "t10k-labels-idx1-ubyte"
    content = labels.read_bytes()
    labels.write_bytes(content[:8] + content[8:].replace(b"\x03", b"\x04"))
    data = MNISTDataModule(root=str(raw.parents[1]))
    for _ in range(2):
        with pytest.raises(ValueError, match="Class '3' has no samples in the test split"):
            data.setup("fit")


def test_a_file_that_changes_is_decoded_again(raw: Path) -> None:
    before = made(raw)._parts["test"].labels
    labels = raw / "t10k-labels-idx1-ubyte"
    content = labels.read_bytes()
    times = os.stat(labels)
    labels.write_bytes(content[:8] + content[8:][::-1])
    os.utime(labels, ns=(times.st_atime_ns, times.st_mtime_ns))  # it looks as before
    assert torch.equal(made(raw)._parts["test"].labels, before.flip(0))
