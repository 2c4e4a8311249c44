"""Gates in a sharded model: FSDP2 through Lightning's ModelParallelStrategy.

    python examples/fsdp.py                     # two processes on a CPU
    python examples/fsdp.py --strategy ddp      # the same without sharding, for comparison

Add gates in `configure_model`, before `fully_shard`. Then penalties, budgets and schedules work as
with DDP. Callbacks that need whole weights, such as RigL, say so in one line.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from dg_lightning import add_gates, param_groups
from dg_lightning.callbacks import BudgetController
from dg_lightning.datamodules import DigitsDataModule


class Classifier(pl.LightningModule):
    """Somebody's classifier."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
        self.net = nn.Sequential(nn.Flatten(), *layers)

    def configure_model(self) -> None:
        """Add gates, then shard."""
        add_gates(self.net, feed_forward={"kind": "static"}, example=torch.zeros(2, 64))
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy of a batch."""
        right = (self(batch[0]).argmax(-1) == batch[1]).float().mean()
        self.log("val/accuracy", right, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        """Train gates faster than weights."""
        return torch.optim.AdamW(param_groups(self, lr=1e-3, gate_lr_factor=30.0))


def main() -> None:
    """Train for a few epochs, and save a checkpoint with whole weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=["fsdp", "ddp"], default="fsdp")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("runs/fsdp"))
    given = parser.parse_args()
    pl.seed_everything(0)
    strategy: Any = "ddp"
    if given.strategy == "fsdp":
        strategy = ModelParallelStrategy(
            data_parallel_size=given.devices,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        )
    controller = BudgetController(0.5)
    trainer = pl.Trainer(
        accelerator=given.accelerator,
        devices=given.devices,
        strategy=strategy,
        max_epochs=given.epochs,
        callbacks=[controller],
        default_root_dir=given.output,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Classifier(), DigitsDataModule(batch_size=32, split_seed=0))
    trainer.save_checkpoint(given.output / f"{given.strategy}.ckpt")
    accuracy = float(trainer.callback_metrics["val/accuracy"])
    trainer.print(f"{controller.reached:.2%} of the MACs for 50 %, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
