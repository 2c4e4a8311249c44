"""RigL, SET, StaticSparse and MagnitudePruning on a real Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from sparse_nets import Gated, Plain, Watch, data, fit, masks_of
from torch import Tensor, nn

from dg_lightning.callbacks import SET, MagnitudePruning, RigL, StaticSparse


@pytest.mark.parametrize("make", [RigL, SET])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_connections_move_on_schedule_and_their_number_stays(
    make: Any, optimizer: str, tmp_path: Path
) -> None:
    sparse = make(0.7, every_n_steps=4, until="75%", drop_shape="constant")
    watch = Watch(sparse)
    trainer = fit(Plain(optimizer), [sparse, watch], tmp_path)
    assert trainer.global_step == 24
    assert watch.changes() == [4, 8, 12, 16]
    counts = {name: {int(m[name].sum()) for m in watch.masks} for name in watch.masks[0]}
    assert all(len(count) == 1 for count in counts.values())
    assert sum(min(count) for count in counts.values()) == round(0.3 * (12 * 16 + 16 * 4))


def test_an_update_is_the_one_of_algorithm_2(tmp_path: Path) -> None:
    """Against a loop of our own, with plain torch and sorting."""
    rigl = RigL(
        0.6, every_n_steps=3, until="100%", drop_fraction=0.4, drop_shape="constant", seed=5
    )
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
        rigl = RigL(0.6, every_n_steps=2, until="100%", grow=grow)
        model = Plain()
        fit(model, [rigl], tmp_path, data(batch_size), accumulate_grad_batches=accumulate)
        ends.append((masks_of(rigl), list(model.parameters())))
    for name, mask in ends[0][0].items():
        assert torch.equal(mask, ends[1][0][name])
    for a, b in zip(ends[0][1], ends[1][1], strict=True):
        torch.testing.assert_close(a, b)


def test_no_sparsity_is_dense_training_bit_by_bit(tmp_path: Path) -> None:
    ends = []
    for callbacks in ([], [RigL(0.0, every_n_steps=2, until="100%")]):
        model = Plain()
        fit(model, callbacks, tmp_path)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(
    in_two_processes: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    ranks = in_two_processes(f"""
from pathlib import Path
from torch.utils.data import DataLoader, DistributedSampler
from dg_lightning.callbacks import SET, MagnitudePruning, RigL
from sparse_nets import Plain, data, fit, masks_of
result = []
for make in (RigL, SET, MagnitudePruning):
    sparse = make(0.6, every_n_steps=2, until="80%")
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
        sparse, model = make(0.6, every_n_steps=2, until="80%"), Plain()
        fit(model, [sparse], tmp_path, data(16))
        assert {n: m.tolist() for n, m in masks_of(sparse).items()} == masks, make
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), torch.tensor(weights[name]).double())


@pytest.mark.parametrize("make", [RigL, SET])
def test_somebodys_own_rule_is_given_scores_of_at_least_0(make: Any, tmp_path: Path) -> None:
    least = []

    class Own(make):  # type: ignore[misc]
        def rewire(self, step: int, c: Any, keep: Tensor, grow: Tensor) -> Any:
            least.extend([float(keep.min()), float(grow.min())])
            assert torch.equal(keep, c.weight.abs())
            return super().rewire(step, c, keep, grow)

    masks, weights = [], []
    for kind in (make, Own):
        sparse, model = kind(0.6, every_n_steps=4, until="100%"), Plain()
        fit(model, [sparse], tmp_path)
        masks.append(masks_of(sparse))
        weights.append(dict(model.named_parameters()))
    assert least
    assert min(least) >= 0
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


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
    rigl = RigL(0.6, every_n_steps=4, until="90%")
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
    rigl = RigL(0.6, every_n_steps=4, until="100%", drop_shape="constant", skip_optimizer_step=True)
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
    rigl = RigL(0.5, every_n_steps=4, until="100%", drop_shape="constant")
    fit(model, [rigl, watch := Watch(rigl)], tmp_path)
    assert watch.changes() == [4, 8, 12, 16, 20]
    assert model.net[1].connection_mask.shape == (8, 3, 2, 2)


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


@pytest.mark.parametrize("rule", ["no", "grow", "drop_and_grow"])
def test_connections_of_closed_units_are_moved_by_the_gate_aware_rule_only(
    rule: Any, tmp_path: Path
) -> None:
    model = Gated(closed=4)
    rigl = RigL(
        {"*linear": 0.5}, every_n_steps=2, until="100%", drop_shape="constant", gate_aware=rule
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
    rates = OpenRates(model, [hidden.linear, model.net[1]])
    for opened in ([[1, 1], [1, 0]], [[0, 1], [0, 0]]):
        hidden.gate.gate = torch.tensor(opened).float().repeat(1, 8)
        rates.add(step=3)
    by_layer = rates.shares(lambda rate: rate)
    first, second = by_layer[hidden.linear], by_layer[model.net[1]]
    assert first.flatten().tolist() == [0.5, 0.5] * 8
    assert first.shape == (16, 1)
    assert second.tolist() == [0.5, 0.5] * 8
    hidden.gate.gate = None  # which runs in the second micro-batch only
    rates.add(step=5)
    hidden.gate.gate = torch.tensor([1.0, 0.0]).repeat(8)
    rates.add(step=5)
    assert rates.shares(lambda rate: rate)[model.net[1]].tolist() == [1.0, 0.0] * 8
    hidden.gate.gate = torch.tensor([1.0, 0.0]).repeat(8)  # a static gate
    rates.add(step=7)
    assert rates.shares(lambda rate: rate)[model.net[1]].tolist() == [1.0, 0.0] * 8


def test_two_ends_that_open_for_the_same_samples_are_counted_together() -> None:
    """Where both ends open for half of the samples, they do so for half, none or a quarter."""
    from dg_lightning import GatedMLP
    from dg_lightning.rewiring import OpenRates

    net: Any = GatedMLP(2, [2, 3], 2, gate={"kind": "dynamic"})
    rates = OpenRates(net, [net.hidden[1].linear])
    net.hidden[0].gate.gate = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]).float()
    net.hidden[1].gate.gate = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 1, 1], [0, 1, 0]]).float()
    rates.add(step=1)
    shares = rates.shares(lambda share: share)[net.hidden[1].linear]
    assert shares.tolist() == [[0.5, 0.0], [0.0, 0.5], [0.25, 0.25]]
