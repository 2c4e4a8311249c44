"""A small classifier, and three clouds of points for it to learn."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedClassifier

NET: Any = {
    "class_path": "dg_lightning.GatedMLP",
    "init_args": {
        "hidden": [12, 8],
        "gate": {"kind": "dynamic", "network": "low_rank", "rank": 2},
        "input_gate": {"kind": "static"},
    },
}


class Blobs(pl.LightningDataModule):
    """Three separable clouds of points, unequal in number."""

    num_classes = 3
    input_shape = (2, 3)

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        self.y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
        centres = torch.randn(3, 2, 3, generator=generator) * 3
        self.x = centres[self.y] + torch.randn(100, 2, 3, generator=generator)

    @property
    def class_weights(self) -> Tensor:
        return 100 / (3 * torch.bincount(self.y))

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def model_of(**arguments: Any) -> GatedClassifier:
    """Return the classifier of the points."""
    torch.manual_seed(0)
    return GatedClassifier(**{"net": NET, "input_shape": [2, 3], "num_classes": 3, **arguments})


def trainer_of(folder: Path, **arguments: Any) -> pl.Trainer:
    """Return a Trainer of two epochs."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "deterministic": True,
    }
    return pl.Trainer(**{**defaults, **arguments})
