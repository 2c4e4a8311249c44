"""What the sparse callbacks leave behind, take over, and refuse."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy
from sparse_nets import Gated, Plain, Watch, data, fit, masks_of
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedClassifier
from dg_lightning.callbacks import SET, GatePenalty, MagnitudePruning, RigL, StaticSparse
from dg_lightning.callbacks._shared import (
    check_whole_weights,
)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("average", ["ema", "swa"])
@pytest.mark.filterwarnings("ignore:.*Swapping scheduler")
def test_averages_of_weights_have_the_connections_of_the_model(
    average: str, first: bool, tmp_path: Path
) -> None:
    other: Any = EMAWeightAveraging(decay=0.7)
    if average == "swa":
        other = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    rigl = RigL(0.7, every_n_steps=3, until="95%")
    model = Plain()
    fit(model, [rigl, other] if first else [other, rigl], tmp_path, max_epochs=3)
    for name, c in rigl.connections.items():
        weight: Any = model.get_submodule(name).weight
        assert (weight[~c.mask] == 0).all(), name  # the average was copied into the model
        assert (weight[c.mask] != 0).float().mean() > 0.9


def test_a_checkpoint_loads_strictly_into_the_module_alone(tmp_path: Path) -> None:
    model = Plain()
    trainer = fit(model, [RigL(0.6, every_n_steps=2)], tmp_path)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == Plain().state_dict().keys()
    assert all(isinstance(value, Tensor) for value in saved["state_dict"].values())
    Plain().load_state_dict(saved["state_dict"], strict=True)


def test_resuming_without_masks_fails_and_other_layers_too(tmp_path: Path) -> None:
    fit(Plain(), [], tmp_path).save_checkpoint(tmp_path / "dense.ckpt")
    with pytest.raises(RuntimeError, match=r"no masks for RigL.*start a new training run"):
        _resume([RigL(0.6)], tmp_path / "dense.ckpt", tmp_path)
    sparse = RigL(0.6, layers=["net.0"], every_n_steps=2)
    fit(Plain(), [sparse], tmp_path).save_checkpoint(tmp_path / "sparse.ckpt")
    other = RigL({"net.0": 0.6}, every_n_steps=2)  # the same layers, said in another way
    _resume([other], tmp_path / "sparse.ckpt", tmp_path)
    with pytest.raises(RuntimeError, match="no masks for"):
        _resume([RigL(0.6, layers=["net.2"])], tmp_path / "sparse.ckpt", tmp_path)


def _resume(callbacks: list[Any], path: Path, root: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(Plain(), data(), ckpt_path=path)


def test_sparse_weights_without_masks_are_warned_of(tmp_path: Path) -> None:
    model = Plain()
    fit(model, [StaticSparse(0.8)], tmp_path)
    fresh = Plain()
    fresh.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="already 0, but no mask was given"):
        fit(fresh, [StaticSparse(0.8)], tmp_path)
    # The model itself has them, for whichever callback comes next.
    again = RigL(0.5, every_n_steps=30, until="100%")
    with pytest.warns(UserWarning, match="RigL never rewires: .* 30 steps"):
        fit(model, [again], tmp_path)
    assert sum(int(c.mask.sum()) for c in again.connections.values()) == round(0.2 * 256)


def test_the_ledger_knows_connections_after_training_and_after_loading(tmp_path: Path) -> None:
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [16], "gate": {"kind": "static"}}}
    model = GatedClassifier(net, input_shape=[12], num_classes=4)
    x, y = torch.randn(32, 12), torch.randint(4, (32,))
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=8)
    callbacks = [RigL(0.75, every_n_steps=2), GatePenalty(0.1, "expected_macs")]
    trainer = fit(model, callbacks, tmp_path, loader)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.test(model, loader, verbose=False)
    connections = round(0.25 * (12 * 16 + 16 * 4))
    assert trainer.callback_metrics["compute/macs"] == connections  # all gates are open
    alone = GatedClassifier.load_from_checkpoint(tmp_path / "end.ckpt")
    other = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    other.test(alone, loader, verbose=False)
    assert other.callback_metrics["compute/macs"] == connections
    bare = GatedClassifier(net, input_shape=[12], num_classes=4)
    with_callback = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[RigL(0.75)]
    )
    with_callback.test(bare, loader, ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert with_callback.callback_metrics["compute/macs"] == connections


def test_prices_follow_the_connections(tmp_path: Path) -> None:
    model = Gated(closed=0)
    penalty = GatePenalty(0.1, "expected_macs")
    pruning = MagnitudePruning(0.5, begin=6)
    seen: list[float] = []

    class Prices(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            assert penalty._prices is not None
            seen.append(float(penalty._prices.usage(torch.ones(1))))

    fit(model, [penalty, pruning, Prices()], tmp_path, max_epochs=1)
    first = 12 * 16 + 16 * 4
    assert seen[0] == pytest.approx(1.0)
    masks = masks_of(pruning)
    assert seen[-1] == pytest.approx(sum(int(m.sum()) for m in masks.values()) / first)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RigL(1.0), r"`sparsity` must be in \[0, 1\), got 1.0"),
        (lambda: RigL(0.5, every_n_steps=0), "`every_n_steps` must be at least 1, got 0"),
        (lambda: RigL(0.5, drop_fraction=1.5), r"`drop_fraction` must be in \(0, 1\], got 1.5"),
        (lambda: RigL(0.5, structure="4:2"), "`structure` must be unstructured"),
        (lambda: RigL(0.5, until="soon"), "`until` must be"),
        (lambda: RigL({"a": 0.5}, layers=["a"]), "`layers` .* `sparsity`"),
        (lambda: SET(0.5, distribution="x"), "`distribution` must be uniform, er or erk"),  # type: ignore[arg-type]
        (lambda: StaticSparse(0.5, initial="x"), "`initial` must be random or magnitude"),  # type: ignore[arg-type]
        (lambda: MagnitudePruning(0.5, structure="2:4"), "`scope: global`.* `structure`"),
        (lambda: MagnitudePruning(0.5, "both"), "`scope` must be global or layer"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_value_is_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_cannot_work_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RigL and SET both make net.0 sparse.*`layers`"):
        fit(Plain(), [RigL(0.5), SET(0.5, layers=["net.0"])], tmp_path)
    with pytest.raises(ValueError, match=r"`gate_aware=.* found no gate"):
        fit(Plain(), [RigL(0.5, gate_aware="grow", every_n_steps=2)], tmp_path)
    with pytest.raises(ValueError, match=r"divisible by 5, but net.0 is 16 x 12"):
        fit(Plain(), [RigL(0.5, structure="block:5")], tmp_path)
    sharded: Any = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(ValueError, match=r"RigL needs whole weights.*FSDPStrategy.*strategy='ddp'"):
        check_whole_weights(RigL(), sharded, Plain())


def test_a_layer_that_pruning_has_emptied_is_warned_of(tmp_path: Path) -> None:
    model: Any = Plain()
    model.net[2].weight.data.mul_(1e-3)
    with pytest.warns(UserWarning, match="has left no connection in net.2"):
        fit(model, [MagnitudePruning(0.5)], tmp_path)


@pytest.mark.parametrize("same_model", [True, False])
def test_a_callback_that_has_run_before_starts_anew(same_model: bool, tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=4, until="100%", drop_shape="constant", grow="mean_gradient")
    pruned = MagnitudePruning(0.5, begin=6)
    model = Plain()
    for _ in range(2):
        model = model if same_model else Plain()
        fit(model, [rigl, watch := Watch(rigl)], tmp_path)
        assert watch.changes() == [4, 8, 12, 16, 20]
    for _ in range(2):
        fit(Plain(), [pruned], tmp_path)
        assert sum(int(c.mask.sum()) for c in pruned.connections.values()) == 128


def test_a_longer_training_goes_on_with_its_masks(tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=4)
    model = Plain()
    trainer = fit(model, [rigl], tmp_path)
    before = masks_of(rigl)
    trainer.fit_loop.max_epochs = 3
    rigl.schedule.until = 0
    with pytest.warns(UserWarning, match="RigL never rewires"):
        trainer.fit(model, data())
    assert trainer.global_step == 36
    assert all(torch.equal(mask, before[name]) for name, mask in masks_of(rigl).items())


def test_loading_older_weights_for_a_test_brings_their_masks(tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=4, until="100%")
    model = Plain()
    model.test_step = model.training_step  # type: ignore[method-assign]
    trainer = fit(model, [rigl], tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "old.ckpt")
    old = masks_of(rigl)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data())
    assert not all(torch.equal(m, old[n]) for n, m in masks_of(rigl).items())
    trainer.test(model, data(), ckpt_path=tmp_path / "old.ckpt", verbose=False)
    for name, c in rigl.connections.items():
        assert torch.equal(c.mask, old[name])
        assert c.layer.connection_mask is c.mask
        assert (c.weight[~c.mask] == 0).all()


def test_a_teacher_is_left_alone(tmp_path: Path) -> None:
    class Distil(pl.Callback):
        teacher = Plain()

        def __init__(self) -> None:
            self.held = Plain()

    model = Plain()
    model.teacher = Plain().requires_grad_(False)
    callback = Distil()
    fit(model, [StaticSparse(0.8), callback], tmp_path)
    for net in (model.teacher, callback.held):
        assert all(bool((p != 0).all()) for p in net.parameters())


def test_masks_that_do_not_keep_to_the_structure_are_refused(tmp_path: Path) -> None:
    sparse = StaticSparse(structure="2:4")
    sparse.set_initial_masks({"net.0": torch.rand(16, 12) < 0.5, "net.2": torch.rand(4, 16) < 0.5})
    with pytest.raises(ValueError, match=r"mask of .* `structure='2:4'`"):
        fit(Plain(), [sparse], tmp_path)


def test_no_hook_is_left_on_an_optimizer_after_an_exception(tmp_path: Path) -> None:
    class Breaks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.optimizer = trainer.optimizers[0]
            raise KeyboardInterrupt if trainer.global_step > 99 else RuntimeError("no more")

    breaks = Breaks()
    with pytest.raises(RuntimeError, match="no more"):
        fit(Plain(), [RigL(0.5, every_n_steps=2), breaks], tmp_path)
    assert not breaks.optimizer._optimizer_step_post_hooks


def test_a_dense_training_of_a_sparse_model_is_warned_of_and_counted_as_dense(
    tmp_path: Path,
) -> None:
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [16]}}
    model = GatedClassifier(net, input_shape=[12], num_classes=4)
    loader: Any = DataLoader(
        TensorDataset(torch.randn(32, 12), torch.randint(4, (32,))), batch_size=8
    )
    fit(model, [StaticSparse(0.75)], tmp_path, loader)
    with pytest.warns(UserWarning, match="no callback keeps it sparse"):
        trainer = fit(model, [], tmp_path, loader)
    trainer.test(model, loader, verbose=False)
    assert trainer.callback_metrics["compute/macs"] == 12 * 16 + 16 * 4


@pytest.mark.parametrize("begin", [0, "0 epochs", "0%", "1%"])
def test_pruning_before_the_first_step_may_be_said_in_any_way(begin: Any, tmp_path: Path) -> None:
    pruning = MagnitudePruning(0.5, begin=begin)
    fit(Plain(), [pruning], tmp_path)
    assert sum(int(c.mask.sum()) for c in pruning.connections.values()) == 128


def test_a_pruned_model_can_be_pruned_further(tmp_path: Path) -> None:
    model = Plain()
    fit(model, [first := MagnitudePruning(0.5)], tmp_path)
    fit(model, [second := MagnitudePruning(0.75)], tmp_path)
    for name, c in second.connections.items():
        assert torch.equal(c.mask & first.connections[name].mask, c.mask)
    assert sum(int(c.mask.sum()) for c in second.connections.values()) == 64


def test_a_file_of_masks_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`masks` must be .* checkpoint file"):
        fit(Plain(), [StaticSparse(masks=str(tmp_path / "no.ckpt"))], tmp_path)


def test_given_masks_are_for_one_training(tmp_path: Path) -> None:
    first = StaticSparse(0.6)
    fit(Plain(), [first], tmp_path).save_checkpoint(tmp_path / "sparse.ckpt")
    sparse = StaticSparse(0.6)
    sparse.set_initial_masks({"net.0": torch.ones(16, 12) != 0, "net.2": torch.ones(4, 16) != 0})
    _resume([sparse], tmp_path / "sparse.ckpt", tmp_path)  # whose masks are its own
    fit(Plain(), [sparse], tmp_path)
    for name, c in sparse.connections.items():
        assert c.mask.sum() == first.connections[name].mask.sum()


@pytest.mark.parametrize(("sparsity", "said"), [(0.9, True), (0.5, False)])
def test_a_structure_that_has_its_own_sparsity_says_so(
    sparsity: float, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sparse = StaticSparse(sparsity, structure="2:4")
    with caplog.at_level(logging.INFO):
        fit(Plain(), [sparse], tmp_path, max_steps=1)
    assert all(c.mask.float().mean() == 0.5 for c in sparse.connections.values())
    assert ("`sparsity=0.9`" in caplog.text) == said
