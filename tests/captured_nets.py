"""Trainings of small nets, ordinary or captured, and what is compared of them."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import CapturedSteps, GatedClassifier
from dg_lightning.training import is_replayed

BATCHES = 9  # an epoch, the last one smaller than the others
STATIC: dict[str, Any] = {"kind": "static", "threshold": 0.45}
LOW_RANK: dict[str, Any] = {**STATIC, "kind": "dynamic", "network": "low_rank", "rank": 4}


def data() -> DataLoader[Any]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(8 * 16 + 5, 12, generator=random)
    return DataLoader(TensorDataset(x, (x[:, :3] ** 2).argmax(1)), batch_size=16)


def model(
    gate: Any = None, cuda_graphs: bool = False, kind: type = GatedClassifier, **more: Any
) -> Any:
    torch.manual_seed(1)
    net = {"hidden": [24, 16], "gate": gate, "dropout": more.pop("dropout", 0.0)}
    adam = {"lr": 2**-7, "weight_decay": 0.01, "fused": True}  # a rate that float32 can hold
    return GatedClassifier(
        {"class_path": "GatedMLP", "init_args": net},
        input_shape=[12],
        num_classes=3,
        optimizer={"class_path": "torch.optim.AdamW", "init_args": adam},
        cuda_graphs=cuda_graphs,
        **more,
    )


class Replays(pl.Callback):
    """Counts the steps that are replayed, and remembers what was logged."""

    def __init__(self) -> None:
        self.replayed: list[bool] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.replayed.append(is_replayed(pl_module))
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def fit(
    module: Any, callbacks: list[Any], root: Path, batches: Any = None, **options: Any
) -> Replays:
    settings = {"max_epochs": 6, "logger": False, "enable_checkpointing": False, **options}
    torch.manual_seed(2)
    replays, ckpt_path = Replays(), settings.pop("ckpt_path", None)
    trainer = pl.Trainer(
        callbacks=[*callbacks, replays],
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=3,
        **settings,
    )
    loader = DataLoader(batches, batch_size=None) if batches else data()
    trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
    return replays


def assert_same(one: Any, other: Any) -> None:
    """Compare weights, buffers and the state of the optimizer, bit for bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different


class Own(CapturedSteps):
    """Somebody's module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))

    def losses(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2**-7, fused=True)


class Looks(pl.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.seen = True
