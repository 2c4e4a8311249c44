import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

from dg_lightning.datamodules import DigitsDataModule


def all_of(loader: DataLoader[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def parts(data: DigitsDataModule) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data.prepare_data()
    data.setup("fit")
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    return [all_of(loader) for loader in loaders]


def test_splits_are_exhaustive_disjoint_stratified_and_seeded() -> None:
    train, val, test = parts(DigitsDataModule())
    assert [len(labels) for _, labels in (train, val, test)] == [1293, 144, 360]
    together = torch.cat([train[0], val[0], test[0]]).flatten(1) * 16
    source = load_digits().data
    # Every sample once and none else: the sorted rows are those of scikit-learn.
    assert np.array_equal(
        source[np.lexsort(source.T)], together.numpy()[np.lexsort(together.numpy().T)]
    )
    for _, labels in (train, val, test):
        shares = torch.bincount(labels, minlength=10) / len(labels)
        torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.015, rtol=0)
    again = parts(DigitsDataModule())
    assert torch.equal(test[0], again[2][0])
    other = parts(DigitsDataModule(split_seed=1))
    assert not torch.equal(test[0], other[2][0])


def test_an_epoch_has_an_order_of_its_own_that_the_seed_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders = []
    for seed, epoch in [("1", 0), ("1", 1), ("2", 0), ("1", 0)]:
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        data = DigitsDataModule()
        data.setup("fit")
        shuffle: Any = data.train_dataloader().sampler
        shuffle.set_epoch(epoch)  # as Lightning does
        orders.append(list(shuffle))
    assert sorted(orders[0]) == list(range(1293))
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_values_shapes_and_facts() -> None:
    data = DigitsDataModule(batch_size=32)
    images, labels = parts(data)[1]
    assert images.shape[1:] == data.input_shape == (1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert images.min() == 0
    assert images.max() == 1
    assert data.num_classes == len(data.class_names) == 10
    counts = torch.bincount(parts(data)[0][1])
    torch.testing.assert_close(data.class_weights * counts, torch.full((10,), 129.3))


def test_loads_in_worker_processes_and_pickles() -> None:
    data = pickle.loads(pickle.dumps(DigitsDataModule(batch_size=500, num_workers=1)))
    data.setup("fit")
    data.setup("test")
    images, _ = all_of(data.test_dataloader())
    assert torch.equal(images, parts(DigitsDataModule())[2][0])


def test_a_batch_size_of_zero_is_named() -> None:
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
        DigitsDataModule(batch_size=0)
