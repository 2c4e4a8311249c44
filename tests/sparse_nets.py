"""Nets, data and a watcher for the tests of sparse callbacks."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedLinear, StaticGate
from dg_lightning.gates.protocol import Feeds
from dg_lightning.rewiring import parameter_state


class Plain(pl.LightningModule):
    """Somebody's module, in double precision so that sums in another order are close."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        self.kind = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
        return torch.optim.Adam(self.parameters(), lr=0.02)


def data(batch_size: int = 8) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 12, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (96,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def fit(
    model: Any,
    callbacks: list[Any],
    root: Path,
    loader: Any = None,
    ckpt_path: Path | None = None,
    **arguments: Any,
) -> Any:
    trainer = pl.Trainer(
        callbacks=callbacks,
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": root,
            "log_every_n_steps": 3,
            **arguments,
        },
    )
    trainer.fit(model, data() if loader is None else loader, ckpt_path=ckpt_path)
    return trainer


def masks_of(callback: Any) -> dict[str, Tensor]:
    return {name: c.mask.clone() for name, c in callback.connections.items()}


class Watch(pl.Callback):
    """Looks at every layer after every step."""

    def __init__(self, sparse: Any) -> None:
        self.sparse = sparse
        self.masks: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        for c in self.sparse.connections.values():
            assert (c.weight[~c.mask] == 0).all()
            for name, slot in parameter_state(optimizer, c.weight):
                assert (slot[~c.mask] == 0).all(), name
        self.masks.append(masks_of(self.sparse))

    def changes(self) -> list[int]:
        """Return the optimizer steps, from 1, after which a mask was another one."""
        pairs = pairwise(self.masks)
        return [
            step
            for step, (a, b) in enumerate(pairs, start=2)
            if any(not torch.equal(a[name], b[name]) for name in a)
        ]


class Gated(Plain):
    def __init__(self, closed: int) -> None:
        super().__init__()
        gate = StaticGate(16)
        gate.logit.data[:closed] = -20.0
        hidden = GatedLinear(12, 16, gate=gate)
        self.net = nn.Sequential(hidden, nn.Linear(16, 4)).double()
        gate.feeds = Feeds(producer=hidden.linear, consumers=(self.net[1],), skips_rows=True)
