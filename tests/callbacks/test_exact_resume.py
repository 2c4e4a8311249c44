"""Ordinary loaders with a generator of their own, resumed at the end of an epoch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from dg_lightning.callbacks import ExactResume

LOADERS: dict[str, Callable[[Any, Any], Any]] = {
    "loader": lambda d, g: DataLoader(d, 8, shuffle=True, generator=g),
    "sampler": lambda d, g: DataLoader(d, 8, sampler=RandomSampler(d, generator=g)),
    "two": lambda d, g: DataLoader(
        d, 8, sampler=RandomSampler(d, generator=g), generator=torch.Generator().manual_seed(9)
    ),
    "batch sampler": lambda d, g: DataLoader(
        d, batch_sampler=BatchSampler(RandomSampler(d, generator=g), 8, drop_last=False)
    ),
    "workers": lambda d, g: DataLoader(d, 8, shuffle=True, generator=g, num_workers=1),
    "several loaders": lambda d, g: [
        DataLoader(d, 8, shuffle=True, generator=g),
        DataLoader(d, 8, shuffle=True, generator=torch.Generator().manual_seed(9)),
    ],
    "no generator": lambda d, g: DataLoader(d, 8, shuffle=True),
    "no order": lambda d, g: DataLoader(d, 8),
}


class Seen(pl.LightningModule):
    """Remembers which samples it has seen, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = batch[0] if len(batch) == 1 else torch.cat([one[0] for one in batch])
        self.seen.append(first.flatten().tolist())
        loss: Tensor = self.layer(first).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(loader: str, root: Path, ckpt_path: Path | None = None, seed: int = 3) -> list[Any]:
    pl.seed_everything(seed, verbose=False)
    samples = TensorDataset(torch.arange(32.0)[:, None])
    model = Seen()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        callbacks=[ExactResume(), ModelCheckpoint(root, filename="{epoch}", save_top_k=-1)],
    )
    made = LOADERS[loader](samples, torch.Generator().manual_seed(5))
    trainer.fit(model, made, ckpt_path=ckpt_path, weights_only=True)
    return model.seen


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("epoch", [0, 2])
def test_the_rest_has_the_order_of_the_uninterrupted_run(
    epoch: int, loader: str, tmp_path: Path
) -> None:
    whole = run(loader, tmp_path / "whole")
    rest = run(loader, tmp_path / "rest", tmp_path / "whole" / f"epoch={epoch}.ckpt", seed=8)
    assert rest == whole[4 * (epoch + 1) :]


def test_a_training_that_was_over_keeps_its_generators(tmp_path: Path) -> None:
    run("loader", tmp_path / "whole")
    last = tmp_path / "whole" / "epoch=3.ckpt"
    pl.seed_everything(8, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=4, logger=False, callbacks=[ExactResume()],
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    samples = TensorDataset(torch.arange(32.0)[:, None])
    loader = LOADERS["loader"](samples, torch.Generator().manual_seed(5))
    trainer.fit(Seen(), loader, ckpt_path=last, weights_only=True)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    (a,), (b,) = (
        torch.load(path, weights_only=True)["random_generators"]
        for path in (last, tmp_path / "again.ckpt")
    )
    assert torch.equal(a["torch"], b["torch"])
    assert torch.equal(a["loaders"][0], b["loaders"][0])


def test_a_loader_without_the_saved_generator_is_warned_of(tmp_path: Path) -> None:
    run("loader", tmp_path / "whole")
    with pytest.warns(UserWarning, match="has 1 generators of training loaders, this run has 0"):
        run("no order", tmp_path / "rest", tmp_path / "whole" / "epoch=1.ckpt")
