"""Short trainings on tasks in sequence."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from dg_lightning import GatedClassifier
from dg_lightning.datamodules import DigitsDataModule, TaskSequence

TASKS = 3


def tasks(**options: Any) -> TaskSequence:
    return TaskSequence(DigitsDataModule(batch_size=32), **{"tasks": TASKS, **options})


def classifier(gated: bool = True, num_classes: int = 10, **net: Any) -> GatedClassifier:
    gate = {"gate": {"kind": "static", "policy": "soft", "initial_open_rate": 0.6}}
    arguments = {"hidden": [32, 24], **(gate if gated else {}), **net}
    return GatedClassifier(
        {"class_path": "GatedMLP", "init_args": arguments},
        input_shape=[1, 8, 8],
        num_classes=num_classes,
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 5e-3}},
        gate_lr_factor=10.0,
    )


def trainer_for(callbacks: list[Any], root: Path, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2 * TASKS,
        "reload_dataloaders_every_n_epochs": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
    }
    return pl.Trainer(callbacks=callbacks, **{**defaults, **options})


class Somebodys(pl.LightningModule):
    """Somebody's module with layers of its own, and two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU()
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        body = torch.optim.AdamW(self.body.parameters(), lr=0.01, weight_decay=0.1)
        return [body, torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)]
