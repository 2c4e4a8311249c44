"""Gradients and weights that are not finite change no connections."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from sparse_nets import Plain, Watch, fit, masks_of
from torch import Tensor

from dg_lightning.callbacks import SET, RigL


class Overflowing(Plain):
    """Its loss is not finite in some steps."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.net.float()
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step((batch[0].float(), batch[1]), batch_idx)
        return loss * torch.inf if self.global_step + 1 in self.steps else loss


class WatchMasks(Watch):
    """Does not look at weights, which are lost."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.masks.append(masks_of(self.sparse))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.filterwarnings("ignore:RigL skipped the update")
def test_a_gradient_that_is_not_finite_changes_no_connection(
    precision: Any, tmp_path: Path
) -> None:
    steps = (4,) if precision == "32-true" else (4, 9, 12)
    rigl = RigL(0.6, every_n_steps=4, until="100%", drop_shape="constant")
    if precision == "32-true":  # weights are lost, but not the masks
        masks = WatchMasks(rigl)
        fit(Overflowing(steps), [rigl, masks], tmp_path)
        assert masks.changes() == []
    else:
        watch = Watch(rigl)
        model = Overflowing(steps)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
        plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
        fit(model, [rigl, watch], tmp_path, plugins=plugins)
        assert watch.changes() == [8, 16, 20]
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("make", [RigL, SET])
@pytest.mark.filterwarnings("ignore:.* skipped the update")
def test_a_weight_that_is_not_finite_changes_no_connection(make: Any, tmp_path: Path) -> None:
    sparse = make(0.6, every_n_steps=4, until="100%", drop_shape="constant")
    watch = WatchMasks(sparse)

    class Breaks(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:  # the gradients of the step have been seen
                with torch.no_grad():
                    for c in sparse.connections.values():
                        c.weight[c.mask] = torch.nan

    fit(Plain(), [sparse, Breaks(), watch], tmp_path)
    assert watch.changes() == [4]
