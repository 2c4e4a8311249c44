"""RigL, SET, StaticSparse and MagnitudePruning on a real Trainer."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedClassifier, GatedLinear, StaticGate
from dg_lightning.callbacks import SET, GatePenalty, MagnitudePruning, RigL, StaticSparse
from dg_lightning.callbacks._agreement import (  # type: ignore[import-not-found]
    refuse_sharded_parameters,
)
from dg_lightning.rewiring import parameter_slots


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


def fit(model: Any, callbacks: list[Any], root: Path, loader: Any = None, **arguments: Any) -> Any:
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
    trainer.fit(model, data() if loader is None else loader)
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
            for name, slot in parameter_slots(optimizer, c.weight):
                assert (slot[~c.mask] == 0).all(), name
        self.masks.append(masks_of(self.sparse))

    def changes(self) -> list[int]:
        """Return the optimizer steps, from 1, after which a mask was another one."""
        pairs = zip(self.masks, self.masks[1:], strict=False)
        return [
            step
            for step, (a, b) in enumerate(pairs, start=2)
            if any(not torch.equal(a[name], b[name]) for name in a)
        ]


@pytest.mark.parametrize("make", [RigL, SET])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_connections_move_on_schedule_and_their_number_stays(
    make: Any, optimizer: str, tmp_path: Path
) -> None:
    sparse = make(0.7, every_n_steps=4, until=0.75, drop_shape="constant")
    watch = Watch(sparse)
    trainer = fit(Plain(optimizer), [sparse, watch], tmp_path)
    assert trainer.global_step == 24
    assert watch.changes() == [4, 8, 12, 16]
    counts = {name: {int(m[name].sum()) for m in watch.masks} for name in watch.masks[0]}
    assert all(len(count) == 1 for count in counts.values())
    assert sum(min(count) for count in counts.values()) == round(0.3 * (12 * 16 + 16 * 4))


def test_an_update_is_the_one_of_algorithm_2(tmp_path: Path) -> None:
    """Against a loop of our own, with plain torch and sorting."""
    rigl = RigL(0.6, every_n_steps=3, until=1.0, drop_fraction=0.4, drop_shape="constant", seed=5)
    model = Plain("sgd")
    fit(model, [rigl], tmp_path, max_epochs=1)

    other: Any = Plain("sgd")
    optimizer = other.configure_optimizers()
    layers = {"net.0": other.net[0], "net.2": other.net[2]}
    sparse = StaticSparse(0.6, seed=5)  # the same first masks
    fit(Plain("sgd"), [sparse], tmp_path, max_steps=1, max_epochs=-1)
    masks = masks_of(sparse)
    for name, layer in layers.items():
        layer.weight.data *= masks[name]
    for step, batch in enumerate(data(), start=1):
        optimizer.zero_grad()
        other.training_step(batch, 0).backward()
        scores = {name: layer.weight.grad.abs().flatten() for name, layer in layers.items()}
        for name, layer in layers.items():
            layer.weight.grad *= masks[name]
        optimizer.step()
        if step % 3 or step >= 12:
            continue
        for name, layer in layers.items():
            weight, mask = layer.weight.data.flatten(), masks[name].flatten()
            active = [i for i in range(len(mask)) if mask[i]]
            drop = int(0.4 * len(active))
            kept = sorted(active, key=lambda i: (-abs(float(weight[i])), i))[: len(active) - drop]
            rest = [i for i in range(len(mask)) if i not in kept]
            grown = sorted(rest, key=lambda i: (-float(scores[name][i]), i))[:drop]
            new = torch.zeros_like(mask)
            new[kept + grown] = True
            changed = (new != mask).reshape(layer.weight.shape)
            layer.weight.data[changed] = 0
            optimizer.state[layer.weight]["momentum_buffer"][changed] = 0
            masks[name] = new.reshape(layer.weight.shape)
    for name, mask in masks.items():
        assert torch.equal(rigl.connections[name].mask, mask)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("grow", ["gradient", "mean_gradient"])
def test_micro_batches_are_one_large_batch(grow: Any, tmp_path: Path) -> None:
    ends = []
    for batch_size, accumulate in ((32, 1), (8, 4)):
        rigl = RigL(0.6, every_n_steps=2, until=1.0, grow=grow)
        model = Plain()
        fit(model, [rigl], tmp_path, data(batch_size), accumulate_grad_batches=accumulate)
        ends.append((masks_of(rigl), list(model.parameters())))
    for name, mask in ends[0][0].items():
        assert torch.equal(mask, ends[1][0][name])
    for a, b in zip(ends[0][1], ends[1][1], strict=True):
        torch.testing.assert_close(a, b)


def test_no_sparsity_is_dense_training_bit_by_bit(tmp_path: Path) -> None:
    ends = []
    for callbacks in ([], [RigL(0.0, every_n_steps=2, until=1.0)]):
        model = Plain()
        fit(model, callbacks, tmp_path)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_two_processes_are_one_with_twice_the_batch(
    in_two_processes: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    ranks = in_two_processes(f"""
sys.path.insert(0, sys.path[0] + "/callbacks")
from test_rewiring_callbacks import *
from torch.utils.data import DistributedSampler
result = []
for make in (RigL, SET, MagnitudePruning):
    sparse = make(0.6, every_n_steps=2, until=0.8)
    model = Plain()
    dataset = data().dataset
    sampler = DistributedSampler(dataset, 2, int(os.environ["RANK"]), shuffle=False)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    fit(model, [sparse], Path({str(tmp_path)!r}), loader, strategy="ddp", devices=2,
        use_distributed_sampler=False)
    masks = {{n: m.tolist() for n, m in masks_of(sparse).items()}}
    result.append([masks, {{n: p.tolist() for n, p in model.named_parameters()}}])
""")
    assert ranks[0] == ranks[1]
    for make, (masks, weights) in zip((RigL, SET, MagnitudePruning), ranks[0], strict=True):
        # A process has every second sample: a batch of 16 holds the same ones.
        sparse, model = make(0.6, every_n_steps=2, until=0.8), Plain()
        fit(model, [sparse], tmp_path, data(16))
        assert {n: m.tolist() for n, m in masks_of(sparse).items()} == masks, make
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), torch.tensor(weights[name]).double())


class Overflowing(Plain):
    """Its loss is not finite in some steps."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.net.float()
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step((batch[0].float(), batch[1]), batch_idx)
        return loss * torch.inf if self.global_step + 1 in self.steps else loss


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.filterwarnings("ignore:RigL leaves the update")
def test_a_gradient_that_is_not_finite_changes_no_connection(
    precision: Any, tmp_path: Path
) -> None:
    steps = (4,) if precision == "32-true" else (4, 9, 12)
    rigl = RigL(0.6, every_n_steps=4, until=1.0, drop_shape="constant")
    watch = Watch(rigl)
    if precision == "32-true":  # weights are lost, but not the masks
        watch.on_train_batch_end = lambda *_: watch.masks.append(masks_of(rigl))  # type: ignore[method-assign]
        fit(Overflowing(steps), [rigl, watch], tmp_path)
        assert watch.changes() == []
    else:
        model = Overflowing(steps)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
        plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
        fit(model, [rigl, watch], tmp_path, plugins=plugins)
        assert watch.changes() == [8, 16, 20]
        assert all(p.isfinite().all() for p in model.parameters())


class Manual(Plain):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net[0].parameters(), lr=0.02),
            torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.9),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()


def test_manual_optimization_with_two_optimizers(tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=4, until=0.9)
    first: dict[str, Tensor] = {}

    class Check(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if not first:
                first.update(masks_of(rigl))
            for c in rigl.connections.values():
                assert (c.weight[~c.mask] == 0).all()

    fit(Manual(), [rigl, Check()], tmp_path)
    for name, c in rigl.connections.items():
        assert not torch.equal(c.mask, first[name]), name
        assert c.mask.sum() == first[name].sum()


def test_an_update_may_take_the_place_of_the_step(tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=4, until=1.0, drop_shape="constant", skip_optimizer_step=True)
    weights: list[Tensor] = []

    class Weights(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            weights.append(pl_module.net[0].weight.detach().clone())

    trainer = fit(Plain(), [rigl, Weights(), watch := Watch(rigl)], tmp_path)
    assert trainer.global_step == 24
    assert watch.changes() == [4, 8, 12, 16, 20]
    kept = watch.masks[2]["net.0"] & watch.masks[3]["net.0"]
    assert torch.equal(weights[2][kept], weights[3][kept])  # step 4 was not made
    assert not torch.equal(weights[3][kept], weights[4][kept])


def test_a_convolution_is_rewired_too(tmp_path: Path) -> None:
    model = Plain()
    model.net = nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(8, 4)
    ).double()
    rigl = RigL(0.5, every_n_steps=4, until=1.0, drop_shape="constant")
    fit(model, [rigl, watch := Watch(rigl)], tmp_path)
    assert watch.changes() == [4, 8, 12, 16, 20]
    assert model.net[1].connection_mask.shape == (8, 3, 2, 2)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("average", ["ema", "swa"])
@pytest.mark.filterwarnings("ignore:.*Swapping scheduler")
def test_averages_of_weights_have_the_connections_of_the_model(
    average: str, first: bool, tmp_path: Path
) -> None:
    other: Any = EMAWeightAveraging(decay=0.7)
    if average == "swa":
        other = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    rigl = RigL(0.7, every_n_steps=3, until=0.95)
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
    with pytest.raises(RuntimeError, match=r"has no masks of RigL.*Start a new training"):
        _resume([RigL(0.6)], tmp_path / "dense.ckpt", tmp_path)
    sparse = RigL(0.6, layers=["net.0"], every_n_steps=2)
    fit(Plain(), [sparse], tmp_path).save_checkpoint(tmp_path / "sparse.ckpt")
    other = RigL({"net.0": 0.6}, every_n_steps=2)  # the same layers, said in another way
    _resume([other], tmp_path / "sparse.ckpt", tmp_path)
    with pytest.raises(RuntimeError, match="has no masks of"):
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
    with pytest.warns(UserWarning, match="are 0 already, and there is no mask of them"):
        fit(fresh, [StaticSparse(0.8)], tmp_path)
    # The model itself has them, for whichever callback comes next.
    again = RigL(0.5, every_n_steps=30, until=1.0)
    with pytest.warns(UserWarning, match="RigL never rewires: its interval is 30 steps"):
        fit(model, [again], tmp_path)
    assert sum(int(c.mask.sum()) for c in again.connections.values()) == round(0.2 * 256)


def test_pruning_at_once_is_kept_through_fine_tuning(tmp_path: Path) -> None:
    pruning = MagnitudePruning(0.5, begin="1 epochs")
    watch = Watch(pruning)
    fit(Plain(), [pruning, watch], tmp_path)
    assert watch.changes() == [12]
    total = sum(int(mask.sum()) for mask in watch.masks[-1].values())
    assert total == 128  # of 256, by magnitude over both layers


def test_gradual_pruning_follows_the_cube_and_nothing_comes_back(tmp_path: Path) -> None:
    pruning = MagnitudePruning(0.8, "layer", begin=4, until=16, every_n_steps=4)
    watch = Watch(pruning)
    fit(Plain(), [pruning, watch], tmp_path)
    assert watch.changes() == [8, 12, 16]  # at 4, it begins with nothing
    for step in (8, 12, 16):
        sparsity = 0.8 * (1 - (1 - (step - 4) / 12) ** 3)
        left = int(watch.masks[step - 1]["net.0"].sum())
        assert left == 192 - round(sparsity * 192)
    for before, after in zip(watch.masks, watch.masks[1:], strict=False):
        assert all(torch.equal(before[n] & after[n], after[n]) for n in after)


def test_pruning_before_training_is_by_the_first_weights(tmp_path: Path) -> None:
    model: Any = Plain()
    weight = model.net[0].weight.detach().clone()
    pruning = MagnitudePruning({"net.0": 0.25}, "layer")
    fit(model, [pruning], tmp_path)
    mask = pruning.connections["net.0"].mask
    assert int(mask.sum()) == 144
    assert weight.abs()[mask].min() >= weight.abs()[~mask].max()
    assert list(pruning.connections) == ["net.0"]


class Gated(Plain):
    def __init__(self, closed: int) -> None:
        super().__init__()
        gate = StaticGate(16)
        gate.logit.data[:closed] = -20.0
        hidden = GatedLinear(12, 16, gate=gate)
        self.net = nn.Sequential(hidden, nn.Linear(16, 4)).double()
        from dg_lightning.protocol import Feeds

        gate.feeds = Feeds(producer=hidden.linear, consumers=(self.net[1],), skips_rows=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["no", "grow", "drop_and_grow"])
def test_connections_of_closed_units_are_moved_by_the_gate_aware_rule_only(
    rule: Any, tmp_path: Path
) -> None:
    model = Gated(closed=4)
    rigl = RigL(
        {"*linear": 0.5}, every_n_steps=2, until=1.0, drop_shape="constant", gate_aware=rule
    )
    watch = Watch(rigl)
    fit(model, [rigl, watch], tmp_path)
    rows = [int(masks["net.0.linear"][:4].sum()) for masks in (watch.masks[0], watch.masks[-1])]
    if rule == "drop_and_grow":
        assert rows[1] == 0
    else:
        assert rows[1] > 0.4 * rows[0]


def test_the_share_of_samples_with_both_ends_open_is_counted_over_micro_batches() -> None:
    from dg_lightning.rewiring import OpenRates

    model = Gated(closed=0)
    hidden: Any = model.net[0]
    rates = OpenRates(model, {"a": hidden.linear, "b": model.net[1]})
    for opened in ([[1, 1], [1, 0]], [[0, 1], [0, 0]]):
        hidden.gate.gate = torch.tensor(opened).float().repeat(1, 8)
        rates.see(step=3)
    by_layer = rates.by_layer(rates.rates())
    first, second = by_layer[hidden.linear], by_layer[model.net[1]]
    assert first.flatten().tolist() == [0.5, 0.5] * 8
    assert first.shape == (16, 1)
    assert second.tolist() == [0.5, 0.5] * 8
    hidden.gate.gate = torch.tensor([1.0, 0.0]).repeat(8)  # a static gate
    rates.see(step=7)
    assert rates.by_layer(rates.rates())[model.net[1]].tolist() == [1.0, 0.0] * 8


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
            seen.append(float(penalty._prices.form[0, 1]))  # type: ignore[union-attr]

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
        (lambda: RigL({"a": 0.5}, layers=["a"]), "`sparsity` by layer names the layers"),
        (lambda: SET(0.5, distribution="x"), "`distribution` must be uniform, er or erk"),  # type: ignore[arg-type]
        (lambda: StaticSparse(0.5, initial="x"), "`initial` must be random or magnitude"),  # type: ignore[arg-type]
        (lambda: MagnitudePruning(0.5, structure="2:4"), "`scope: global` has one sparsity"),
        (lambda: MagnitudePruning(0.5, "both"), "`scope` must be global or layer"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_value_is_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_cannot_work_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RigL and SET both make net.0 sparse: part them"):
        fit(Plain(), [RigL(0.5), SET(0.5, layers=["net.0"])], tmp_path)
    with pytest.raises(ValueError, match="finds no gate at the layers that it rewires"):
        fit(Plain(), [RigL(0.5, gate_aware="grow", every_n_steps=2)], tmp_path)
    with pytest.raises(ValueError, match=r"needs sizes that 5 divides, net.0 has 16 x 12"):
        fit(Plain(), [RigL(0.5, structure="block:5")], tmp_path)
    sharded: Any = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(ValueError, match=r"RigL needs whole weights.*FSDPStrategy.*strategy='ddp'"):
        refuse_sharded_parameters("RigL", sharded, Plain())


def test_a_layer_that_pruning_has_emptied_is_warned_of(tmp_path: Path) -> None:
    model: Any = Plain()
    model.net[2].weight.data.mul_(1e-3)
    with pytest.warns(UserWarning, match="has left no connection in net.2"):
        fit(model, [MagnitudePruning(0.5)], tmp_path)
