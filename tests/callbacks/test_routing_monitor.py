"""RoutingMonitor on a tiny Trainer, against the net asked directly."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from dg_lightning import GatedClassifier
from dg_lightning.callbacks import RoutingMonitor
from dg_lightning.datamodules import DigitsDataModule


def classifier(net: Any) -> GatedClassifier:
    torch.manual_seed(0)
    return GatedClassifier(net, input_shape=[1, 8, 8], num_classes=10)


def moe(**arguments: Any) -> GatedClassifier:
    init = {"width": 16, "experts": 4, "expert_width": 8, "top_k": 2, **arguments}
    return classifier({"class_path": "SwitchMoE", "init_args": init})


def fitted(model: GatedClassifier, root: Path, **arguments: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[RoutingMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **arguments,
    )
    trainer.fit(model, datamodule=DigitsDataModule(batch_size=64))
    return trainer


def test_logs_the_use_of_experts_and_what_found_no_room(tmp_path: Path) -> None:
    model = moe(capacity_factor=0.5)
    trainer = fitted(model, tmp_path)
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    # 1,293 samples: 20 batches of 64 with room for 16, one of 13 with room for 4.
    assert logged["routing/capacity/net.router"] == pytest.approx((20 * 16 + 4) / 21)
    # Each batch has twice as many choices as samples, and half of them at most find room.
    assert logged["routing/dropped/net.router"] >= 1293 - 21 * 4
    data = DigitsDataModule(batch_size=64)
    data.prepare_data()
    data.setup("fit")
    model.eval()
    used = torch.zeros(4)
    for x, _ in data.val_dataloader():
        model(x)
        used += model.net.router.chosen.sum(0)  # type: ignore[operator, union-attr]
    share = used / used.sum()
    entropy = -(share * share.log()).nansum().item()
    assert logged["routing/entropy/net.router"] == pytest.approx(entropy, abs=1e-5)
    cv = np.std(used.numpy()) / np.mean(used.numpy())
    assert logged["routing/cv/net.router"] == pytest.approx(cv, abs=1e-5)
    assert "train/aux_loss" in logged


def test_says_when_there_is_nothing_to_follow(tmp_path: Path) -> None:
    net = {"class_path": "GatedMLP", "init_args": {"hidden": [8], "gate": {"kind": "static"}}}
    with pytest.raises(ValueError, match=r"only the gates net\.hidden\.0\.gate"):
        fitted(classifier(net), tmp_path)
