"""Ordinary loaders with a generator of their own, resumed at the end of an epoch."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from dg_lightning.callbacks import ExactResume
from dg_lightning.datamodules import DigitsDataModule

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
    with pytest.warns(UserWarning, match=r"has 1 generators .* this run has 0"):
        run("no order", tmp_path / "rest", tmp_path / "whole" / "epoch=1.ckpt")


class Stopped(Exception):
    """Ends a run as a kill does: nothing more is saved."""


class StopAt(pl.Callback):
    """Stops a run after a step, before checkpoints of that step are written."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Stopped


class Recorded(pl.LightningModule):
    """Records what happens, and lets its weights depend on all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.2))
        self.events: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.events.append(("batch", self.current_epoch, batch_idx, self.global_step))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self._happened("validated")

    def on_train_epoch_start(self) -> None:
        self._happened("started")

    def on_train_epoch_end(self) -> None:
        self._happened("ended")

    def _happened(self, name: str) -> None:
        if not self.trainer.sanity_checking:
            self.events.append((name, self.current_epoch, self.global_step))
            for parameter in self.parameters():
                parameter.data.mul_(0.97)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


STEPS = 6  # optimizer steps of an epoch
NO_VALIDATION = {"limit_val_batches": 0}
SAVING: dict[str, dict[str, Any]] = {
    "steps": {"every_n_train_steps": 2, "save_top_k": 0},
    "steps of an epoch": {"every_n_train_steps": STEPS, "save_top_k": 0},
    "epochs": {"save_on_train_epoch_end": True},
    "validations": {"save_on_train_epoch_end": False},
}


def interrupted(
    folder: Path,
    stops: list[int],
    saving: str,
    loader: str = "",
    kind: type[Recorded] = Recorded,
    **settings: Any,
) -> tuple[dict[str, Tensor], int, list[list[Any]]]:
    """Train, stopped and resumed after these steps; return weights, steps and events by run."""
    data = DigitsDataModule(batch_size=256, split_seed=0)
    data.prepare_data()
    data.setup("fit")
    events = []
    for stop in [*stops, None]:
        pl.seed_everything(3, verbose=False)
        model = kind()
        events.append(model.events)
        checkpoints = ModelCheckpoint(folder, save_last=True, **SAVING[saving])
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[ExactResume(), StopAt(stop), checkpoints],
            **{"max_epochs": 4, **settings},
        )
        last = folder / "last.ckpt"
        path = last if last.exists() else None
        given: dict[str, Any] = {"datamodule": data}
        if loader:
            rows = data.part("train")
            samples = TensorDataset(*rows.__getitems__(range(len(rows))))
            given = {
                "train_dataloaders": LOADERS[loader](samples, torch.Generator().manual_seed(5)),
                "val_dataloaders": DataLoader(samples, 512),
            }
            trainer.limit_train_batches = STEPS
        try:
            trainer.fit(model, ckpt_path=path, weights_only=True, **given)
        except Stopped:
            assert stop is not None
        else:
            assert stop is None
    return model.state_dict(), trainer.global_step, events


@pytest.mark.parametrize(
    ("stops", "saving", "settings"),
    [
        # Stopped in the step after an epoch's last checkpoint, and once more.
        ([7], "steps", {}),
        ([7, 9], "steps", {}),
        ([7, 9], "steps", NO_VALIDATION),
        ([7, 13, 19], "steps", {}),
        ([7, 13, 19], "steps", NO_VALIDATION),
        ([7, 9], "steps", {"max_steps": 20}),
        ([7, 9], "steps", {**NO_VALIDATION, "max_steps": 20}),
        ([7, 9], "steps", {"check_val_every_n_epoch": 2}),
        ([13, 15], "steps", {"check_val_every_n_epoch": 2}),
        ([7, 9], "steps", {"num_sanity_val_steps": 0}),
        # Stopped between a checkpoint and the validation that follows it in mid-epoch.
        ([3], "steps", {"val_check_interval": 2}),
        ([7, 11, 13], "steps", {"val_check_interval": 2}),
        ([9], "steps", {"val_check_interval": 4, "check_val_every_n_epoch": None}),
        # Steps and epochs are limited, and checkpoints are of whole epochs.
        ([8], "epochs", {"max_steps": 20}),
        ([8, 14], "epochs", {**NO_VALIDATION, "max_steps": 20}),
        ([8, 14], "epochs", {}),
        ([8, 14], "validations", {}),
        ([8, 14], "validations", {"max_steps": 20}),
    ],
    ids=str,
)
def test_a_run_that_is_stopped_again_does_what_the_uninterrupted_one_does(
    stops: list[int], saving: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    whole, steps, (events,) = interrupted(tmp_path / "whole", [], saving, **settings)
    assert steps == settings.get("max_steps", 4 * STEPS)
    rest, rest_steps, parts = interrupted(tmp_path / "rest", stops, saving, **settings)
    assert rest_steps == steps
    for part in parts[1:]:  # each goes on where a checkpoint was written, and leaves nothing out
        start = events.index(part[0])
        assert part == events[start : start + len(part)]
    for before, after in pairwise(parts):
        assert events.index(after[0]) <= events.index(before[-1]) + 1
    assert parts[-1][-1] == events[-1]
    for name, weight in whole.items():
        assert torch.equal(weight, rest[name]), name


@pytest.mark.parametrize("settings", [{}, NO_VALIDATION, {"max_steps": 20}], ids=str)
@pytest.mark.parametrize("saving", ["steps of an epoch", "epochs"])
@pytest.mark.parametrize("loader", ["loader", "no generator", "workers"])
def test_a_run_with_an_ordinary_loader_can_be_stopped_twice(
    loader: str, saving: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    whole, steps, (events,) = interrupted(tmp_path / "a", [], saving, loader, **settings)
    rest, rest_steps, parts = interrupted(tmp_path / "b", [8, 14], saving, loader, **settings)
    assert rest_steps == steps
    for part in parts[1:]:
        assert part == events[events.index(part[0]) :][: len(part)]
    for name, weight in whole.items():
        assert torch.equal(weight, rest[name]), name


class Skips(Recorded):
    """Ends every epoch early, as Lightning allows."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


class Monitored(Recorded):
    """Lets its learning rate depend on what an epoch has logged in training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train"}}


@pytest.mark.parametrize(
    ("kind", "stops", "saving"),
    [
        (Skips, [6], "epochs"),
        (Skips, [6, 10], "epochs"),
        (Monitored, [7], "steps"),
        (Monitored, [7, 13], "steps"),
    ],
)
def test_epochs_that_end_early_and_metrics_of_training_go_on_too(
    kind: Any, stops: list[int], saving: str, tmp_path: Path
) -> None:
    whole, steps, _ = interrupted(tmp_path / "whole", [], saving, kind=kind)
    rest, rest_steps, _ = interrupted(tmp_path / "rest", stops, saving, kind=kind)
    assert rest_steps == steps
    for name, weight in whole.items():
        assert torch.equal(weight, rest[name]), name
