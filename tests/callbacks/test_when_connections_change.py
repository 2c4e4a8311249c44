"""The steps after which connections change."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from sparse_nets import Plain, Watch, fit

from dg_lightning.callbacks import MagnitudePruning, RigL

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def test_an_update_that_is_far_ahead_is_not_missed(tmp_path: Path) -> None:
    rigl = RigL(0.7, every_n_steps=70, until="100%", drop_shape="constant")
    fit(Plain(), [rigl, watch := Watch(rigl)], tmp_path, max_epochs=13)  # of 12 steps
    assert watch.changes() == [70, 140]


def test_a_rule_that_hangs_on_the_training_is_asked_in_every_step(tmp_path: Path) -> None:
    class Waits(RigL):
        steps = 0

        def on_train_batch_start(self, *_: Any) -> None:
            self.steps += 1

        def changes_after(self, step: int, last: int) -> bool:
            return self.steps == 17  # of which nobody can know ahead of time

    rigl = Waits(0.7, every_n_steps=4, until="100%")
    fit(Plain(), [rigl, watch := Watch(rigl)], tmp_path)
    assert watch.changes() == [17]


def test_connections_that_somebody_else_changes_stay_away(tmp_path: Path) -> None:
    class Cuts(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                for c in pruning.connections.values():
                    half = torch.arange(c.mask.numel()).reshape(c.mask.shape) % 2 == 0
                    c.change(half, trainer.optimizers[0])

    pruning = MagnitudePruning(0.9, begin=20)  # whose layers are full until then
    fit(Plain(), [pruning, Cuts(), watch := Watch(pruning)], tmp_path)  # looks at every step
    assert 5 in watch.changes()


@each_device
@pytest.mark.parametrize("sparsity", [0.6, {"net.0": 0.6, "net.2": 0.0}])  # or one has all of them
def test_an_update_that_is_skipped_is_warned_of(device: str, sparsity: Any, tmp_path: Path) -> None:
    class Breaks(Plain):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step + 1 == 8:  # so that the weights stay as they are
                for p in self.parameters():
                    p.grad = torch.zeros_like(p)

    class Overflows(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, _: Any) -> None:
            if trainer.global_step + 1 == 8:
                pl_module.net[2].weight.grad[0, 0] = torch.nan

    rigl = RigL(sparsity, every_n_steps=4, until="100%", drop_shape="constant")
    callbacks = [Overflows(), rigl, watch := Watch(rigl)]
    with pytest.warns(UserWarning, match="RigL skipped the update at step 8: a gradient or a"):
        fit(Breaks(), callbacks, tmp_path, accelerator=device, max_epochs=1, logger=True)
    assert watch.changes() == [4]  # not 8, and 12 is the end
    rigl = RigL(sparsity, every_n_steps=4, until="100%", drop_shape="constant")
    fit(Plain(), [rigl, watch := Watch(rigl)], tmp_path, accelerator=device, max_epochs=1)
    assert watch.changes() == [4, 8]
