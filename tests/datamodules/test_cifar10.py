import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_roots import cifar10
from torchvision import transforms

from dg_lightning.datamodules import CIFAR10DataModule


@pytest.fixture
def root(tmp_path: Path) -> Path:
    cifar10(tmp_path / "cifar-10-batches-py")
    return tmp_path


def made(root: Path, **settings: Any) -> CIFAR10DataModule:
    data = CIFAR10DataModule(root=str(root), **settings)
    data.setup("fit")
    return data


def test_values_and_labels_are_those_of_torchvision_one_by_one(root: Path) -> None:
    batch = pickle.loads((root / "cifar-10-batches-py" / "test_batch").read_bytes())
    # How torchvision's dataset makes its images: rows of red, then green, then blue.
    images = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    normalize = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    route = transforms.Compose([transforms.ToTensor(), normalize])
    expected = torch.stack([route(Image.fromarray(image)) for image in images])
    inputs, labels = next(iter(made(root, eval_batch_size=40).test_dataloader()))
    assert torch.equal(inputs, expected)
    assert labels.tolist() == batch["labels"]


def test_only_training_images_are_augmented(root: Path) -> None:
    plain, augmented = made(root, augment="none"), made(root)
    for part in ("train", "val", "test"):
        every = np.arange(len(plain._parts[part]))
        same = torch.equal(
            plain._parts[part].get_batch(every)[0], augmented._parts[part].get_batch(every)[0]
        )
        assert same == (part != "train")


def test_a_damaged_batch_is_named_with_its_checksum(root: Path) -> None:
    path = root / "cifar-10-batches-py" / "data_batch_3"
    os.truncate(path, 5000)
    with pytest.raises(
        ValueError, match=r"data_batch_3 is damaged.*54ebc095f3ab1f0389bbae665268c751"
    ):
        made(root)


def test_a_batch_that_would_run_code_is_refused(root: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(root / "evil"),)

    path = root / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Evil(), "labels": []}, protocol=2))
    with pytest.raises(ValueError, match=r"data_batch_1 is damaged .*posix.mkdir"):
        made(root)
    assert not (root / "evil").exists()


def test_a_batch_of_the_published_length_must_have_the_published_content(root: Path) -> None:
    path = root / "cifar-10-batches-py" / "test_batch"
    batch = {"data": np.zeros((10_000, 3072), np.uint8), "labels": [0] * 10_000}
    path.write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(ValueError, match="test_batch is damaged: its md5 should be 40351d58"):
        made(root)
