"""Samples on a GPU: the same batches as from the host."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from small_roots import small_root

from dg_lightning.datamodules import CIFAR10DataModule, DigitsDataModule
from dg_lightning.datamodules._splits import CropFlip, DevicePart, on_device

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HOST = torch.device("cpu")


@pytest.mark.parametrize("mode", ["reflect", "constant"])
@pytest.mark.parametrize("padding", [0, 3])
def test_crops_and_flips_are_those_of_the_host(mode: Any, padding: int) -> None:
    images = torch.randint(256, (40, 3, 8, 6), dtype=torch.uint8)
    crop = CropFlip(padding, padding_mode=mode)
    draws = crop.draw(np.random.default_rng(0), 40)
    moved = {name: torch.from_numpy(values) for name, values in draws.items()}
    assert torch.equal(crop.apply_on_device(images, moved), crop.apply(images, draws))


def datamodule(name: str, tmp_path: Path, **options: Any) -> Any:
    if name == "digits":
        return DigitsDataModule(batch_size=32, **options)
    return CIFAR10DataModule(batch_size=8, root=str(small_root(tmp_path)), **options)


def ready(data: Any) -> Any:
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_batches_are_those_of_the_host(name: str, tmp_path: Path) -> None:
    part = ready(datamodule(name, tmp_path)).part("train")
    held = DevicePart(part, HOST)  # what it does is the same on every device
    for epoch in (0, 1):
        rows = np.random.default_rng(epoch).permutation(len(part))[:20]
        for mine, theirs in zip(
            held.get_batch(rows, 3, epoch), part.get_batch(rows, 3, epoch), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_a_host_has_no_need_of_it(tmp_path: Path) -> None:
    part = ready(datamodule("digits", tmp_path)).part("train")
    assert on_device(part, HOST) is part


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("name", ["digits", "cifar10"])
@pytest.mark.parametrize("cache", ["auto", "never"])
def test_a_training_on_a_gpu_sees_the_same_batches(name: str, cache: Any, tmp_path: Path) -> None:
    data = ready(datamodule(name, tmp_path, device_cache=cache))
    expected = list(data.train_dataloader())
    data.trainer = pl.Trainer(accelerator="cuda", devices=1, logger=False)
    data.trainer.state.status = TrainerStatus.RUNNING
    for mine, theirs in zip(data.train_dataloader(), expected, strict=True):
        assert mine[0].is_cuda == mine[1].is_cuda == (cache == "auto")
        torch.testing.assert_close(mine[0].cpu(), theirs[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(mine[1].cpu(), theirs[1])


@needs_cuda
@pytest.mark.cuda
def test_what_does_not_fit_stays_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = ready(datamodule("digits", tmp_path)).part("train")
    cuda = torch.device("cuda")
    assert isinstance(on_device(part, cuda), DevicePart)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 10**9))
    assert on_device(part, cuda) is part
