"""Gates in a Vision Transformer of timm, on CIFAR-10, down to half of its MACs.

pip install 'dg-lightning[vision,models]'
python examples/timm_vit.py --root data
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import timm
import torch
from torch import Tensor, nn

from dg_lightning import param_groups
from dg_lightning.callbacks import AddGates, BudgetController
from dg_lightning.datamodules import CIFAR10DataModule
from dg_lightning.surgery import compact, save_compact


class Classifier(pl.LightningModule):
    """A project as it was before: nothing in it knows of gates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10, depth=6
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(param_groups(self, lr=1e-3, gate_lr_factor=5), weight_decay=0.05)


def main() -> None:
    """Train, take out what is closed, and save the small model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--fast", action="store_true", help="three steps, to see that it runs")
    given = parser.parse_args()
    example = torch.randn(2, 3, 32, 32)
    gates = AddGates(
        feed_forward={"kind": "static"},
        heads={"kind": "static", "min_open": 1},
        submodule="net",
        example=example,
    )
    trainer = pl.Trainer(
        max_epochs=1 if given.fast else given.epochs,
        limit_train_batches=3 if given.fast else None,
        callbacks=[gates, BudgetController(budget=0.5)],
        logger=False,
        enable_checkpointing=False,
    )
    model = Classifier()
    trainer.fit(model, CIFAR10DataModule(root=given.root, batch_size=16 if given.fast else 256))
    small = compact(model.net, example)
    save_compact(small, "small.safetensors")
    print(f"{len(small.units)} of {len(small.units) + len(small.notes)} places are smaller now.")


if __name__ == "__main__":
    main()
