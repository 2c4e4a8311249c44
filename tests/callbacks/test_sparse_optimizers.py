"""Sparse callbacks with optimizers that are not the usual ones, or not used in the usual way."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.tuner.tuning import Tuner
from sparse_nets import Plain, Watch, data, fit
from torch import Tensor

from dg_lightning.callbacks import SET, MagnitudePruning, RigL, StaticSparse


class Tuned(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.lr = self.net[0], 0.02

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=self.lr)


def test_layers_that_an_optimizer_gets_later_are_sparse_too(tmp_path: Path) -> None:
    sparse = StaticSparse({"net.*": 0.6})
    tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    fit(Tuned(), [tuning, sparse], tmp_path, max_epochs=3)
    for c in sparse.connections.values():
        assert (c.weight[~c.mask] == 0).all()
        assert c.weight.requires_grad


def test_a_search_for_a_learning_rate_may_come_first(tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[rigl],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = Tuned()
    Tuner(trainer).lr_find(model, data(), num_training=5, update_attr=False)
    trainer.fit(model, data())
    for c in rigl.connections.values():
        assert (c.weight[~c.mask] == 0).all()
        assert c.changed_at > 0


class Muonlike(torch.optim.SGD):
    """Moves every weight of a matrix, but not in its first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(0.01 if self.steps > 1 else 0.0)
        return loss


def test_it_is_cleaned_up_after_an_optimizer_that_torch_does_not_have(tmp_path: Path) -> None:
    model = Plain()
    model.configure_optimizers = lambda: Muonlike(model.parameters(), 0.1, momentum=0.9)  # type: ignore[method-assign]
    pruning = MagnitudePruning(0.5, begin=5)
    fit(model, [pruning, Watch(pruning)], tmp_path)  # which looks after every step


def test_an_optimizer_that_needs_a_closure(tmp_path: Path) -> None:
    model = Plain()
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)  # type: ignore[method-assign]
    rigl = RigL(0.5, every_n_steps=4, until="100%", drop_shape="constant")
    fit(model, [rigl, watch := Watch(rigl)], tmp_path)
    assert watch.changes() == [4, 8, 12, 16, 20]


def test_the_last_gradient_of_a_step_counts(tmp_path: Path) -> None:
    class Seeing(RigL):
        seen: list[Tensor]

        def see_gradients(self, trainer: Any, optimizer: Any, mine: Any, due: Any) -> None:
            super().see_gradients(trainer, optimizer, mine, due)
            self.seen.append(mine[0].weight.grad.clone())

        def new_masks(self, trainer: Any, step: int, due: Any) -> Any:
            assert torch.equal(self._gradients[due[0]], self.seen[-1].abs())
            assert len(self.seen) > 1
            self.seen = []
            return super().new_masks(trainer, step, due)

    model = Plain()
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)  # type: ignore[method-assign]
    rigl = Seeing(0.5, every_n_steps=4, until="100%")
    rigl.seen = []
    fit(model, [rigl], tmp_path)
    assert min(c.changed_at for c in rigl.connections.values()) == 20


def test_skipping_the_step_of_an_optimizer_that_unscales_is_refused(tmp_path: Path) -> None:
    model = Plain()
    model.net.float()
    model.configure_optimizers = lambda: torch.optim.Adam(model.parameters(), fused=True)  # type: ignore[method-assign]
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step((batch[0].float(), batch[1]), batch_idx)  # type: ignore[method-assign]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
    plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
    rigl = RigL(0.5, every_n_steps=4, skip_optimizer_step=True)
    with pytest.raises(ValueError, match=r"needs an optimizer that is not fused.*fused=False"):
        fit(model, [rigl], tmp_path, plugins=plugins)


@pytest.mark.parametrize(
    "sparse",
    [
        SET(0.5, every_n_steps=4, until="100%", drop_shape="constant"),
        MagnitudePruning(0.5, begin=4, until=10, every_n_steps=4),
        RigL(0.5, every_n_steps=4, until="100%", drop_shape="constant"),
    ],
    ids=lambda callback: type(callback).__name__,
)
@pytest.mark.filterwarnings("ignore:.*skipped the update at step 8")
def test_a_fused_step_that_a_scaler_skips_changes_no_connections(
    sparse: Any, tmp_path: Path
) -> None:
    model = Plain()
    model.net.float()
    model.configure_optimizers = lambda: torch.optim.Adam(model.parameters(), fused=True)  # type: ignore[method-assign]
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step((batch[0].float(), batch[1]), batch_idx)  # type: ignore[method-assign]

    class Overflows(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, _: Any) -> None:
            if trainer.global_step + 1 == 8:
                for p in pl_module.parameters():
                    p.grad.fill_(torch.inf)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
    plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
    callbacks = [Overflows(), sparse, watch := Watch(sparse)]
    fit(model, callbacks, tmp_path, plugins=plugins, max_epochs=1)
    assert watch.changes()
    assert 8 not in watch.changes()


def test_two_of_four_cannot_be_reached_little_by_little() -> None:
    with pytest.raises(ValueError, match=r"`structure='2:4'` .*leave `until` out"):
        MagnitudePruning(0.5, "layer", structure="2:4", begin=2, until=8)
