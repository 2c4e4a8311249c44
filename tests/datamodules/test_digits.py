import numpy as np
import torch
from sklearn.datasets import load_digits

from dg_lightning.datamodules import DigitsDataModule


def test_the_parts_are_scikit_learns_digits_scaled_to_one() -> None:
    data = DigitsDataModule()
    data.setup("fit")
    parts = [part.__getitems__(range(len(part))) for part in data._parts.values()]
    assert [len(labels) for _, labels in parts] == [1293, 144, 360]
    together = torch.cat([inputs for inputs, _ in parts]).flatten(1).numpy() * 16
    source = load_digits().data
    assert np.array_equal(source[np.lexsort(source.T)], together[np.lexsort(together.T)])
    for _, labels in parts:
        shares = torch.bincount(labels, minlength=10) / len(labels)
        torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.015, rtol=0)
