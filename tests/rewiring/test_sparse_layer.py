"""One layer's connections, with real optimizers and without a Trainer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dg_lightning.rewiring import (
    WEIGHT_BY_WEIGHT,
    SparseLayer,
    Structure,
    drop_and_grow,
    generator_for,
    initial_mask,
    parameter_state,
    reset_state,
    sparse_layers,
)
from dg_lightning.rewiring.sparse_layer import (
    change_connections,
    pack_mask,
    unpack_mask,
    zero_outside,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.3),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def random_mask(weight: Tensor, density: float, kind: str = "unstructured") -> Tensor:
    generator = generator_for(0, "layer", 0, weight.device)
    return initial_mask(weight, density, Structure(kind), generator)


def assert_clean(c: SparseLayer, optimizer: torch.optim.Optimizer) -> None:
    """Weights of missing connections are 0, and their slots as new."""
    assert (c.weight[~c.mask] == 0).all()
    for name, slot in parameter_state(optimizer, c.weight):
        left = slot[~c.mask]
        fresh = {"sum": 0.3, "step_size": 0.1}.get(name, 0.0)
        assert torch.equal(left, torch.full_like(left, fresh)), name


def mask_gradient(c: SparseLayer) -> None:
    assert c.weight.grad is not None
    zero_outside([(c.weight.grad, c.mask)])


def dense_gradient(layer: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in layer.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@given(
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(["unstructured", "fan_in", "block:2", "2:4"]),
    st.floats(0.1, 0.9),
    st.floats(0.1, 1.0),
    st.integers(0, 1000),
)
@settings(max_examples=60)
def test_missing_connections_stay_at_zero_and_new_ones_start_there(
    name: str, kind: str, density: float, fraction: float, seed: int
) -> None:
    torch.manual_seed(seed)
    layer: Any = nn.Linear(8, 6)
    optimizer = OPTIMIZERS[name](layer.parameters())
    c = SparseLayer("layer", layer, random_mask(layer.weight, density, kind), Structure(kind))
    for step in range(4):
        dense_gradient(layer, seed + step)
        gradient = layer.weight.grad.clone()
        mask_gradient(c)
        optimizer.step()
        assert type(optimizer) in WEIGHT_BY_WEIGHT
        assert_clean(c, optimizer)
        before = layer.weight.detach().clone()
        slots = {n: s.clone() for n, s in parameter_state(optimizer, layer.weight)}
        old = c.mask.clone()
        c.change(drop_and_grow(old, before.abs(), gradient.abs(), fraction, c.structure), optimizer)
        kept, new = old & c.mask, c.mask & ~old
        assert torch.equal(layer.weight[kept], before[kept])
        assert (layer.weight[new] == 0).all()
        assert (layer.weight[~c.mask] == 0).all()
        for n, slot in parameter_state(optimizer, layer.weight):
            assert torch.equal(slot[kept], slots[n][kept]), n
            if name not in ("adagrad", "rprop"):  # whose slots do not start at 0
                assert (slot[~kept] == 0).all(), n
        assert_clean(c, optimizer)


def test_slots_that_do_not_start_at_zero_start_where_the_optimizer_does() -> None:
    for name, slot, value in (("adagrad", "sum", 0.3), ("rprop", "step_size", 0.1)):
        layer: Any = nn.Linear(3, 2, bias=False)
        optimizer = OPTIMIZERS[name](layer.parameters())
        for seed in range(3):
            dense_gradient(layer, seed)
            optimizer.step()
        where = torch.tensor([[False, True, False], [False, True, False]])
        reset_state(optimizer, layer.weight, keep=~where)
        state = optimizer.state[layer.weight][slot].flatten()
        assert state[[1, 4]].tolist() == pytest.approx([value, value])
        assert (state[[0, 2, 3, 5]] != value).all()


def test_whatever_stands_in_a_group_the_slots_start_where_the_optimizer_does() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    groups: list[Any] = [
        [("weight", weight)],  # torch notes the names as a list
        [{"params": [weight], "tags": ["mine"], "scale": torch.ones(3)}],
    ]
    optimizers = [torch.optim.Adagrad(g, initial_accumulator_value=0.3) for g in groups]
    optimizers.append(torch.optim.Adagrad([weight], torch.tensor(0.1), 0, 0, 0.3))
    for optimizer in optimizers:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        reset_state(optimizer, weight, keep=torch.eye(2, 3).bool())
        found = optimizer.state[weight]["sum"]
        torch.testing.assert_close(found, 0.3 + torch.eye(2, 3))


@each_optimizer
def test_a_full_mask_trains_bit_for_bit_as_no_mask(name: str) -> None:
    ends = []
    for masked in (False, True):
        torch.manual_seed(0)
        layer: Any = nn.Linear(8, 6)
        optimizer = OPTIMIZERS[name](layer.parameters())
        mask = torch.ones(6, 8, dtype=torch.bool)
        SparseLayer("layer", layer, mask)
        for step in range(5):
            dense_gradient(layer, step)
            if masked:
                zero_outside([(layer.weight.grad, mask)])
            optimizer.step()
        ends.append(layer.weight.detach().clone())
    assert torch.equal(*ends)


class Mixing(torch.optim.SGD):
    """An optimizer that does not work weight by weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.mean())


def test_it_is_cleaned_up_after_an_optimizer_that_mixes_weights() -> None:
    layer = nn.Linear(8, 6)
    optimizer = Mixing(layer.parameters(), 0.1, momentum=0.9)
    c = SparseLayer("layer", layer, random_mask(layer.weight, 0.3))
    dense_gradient(layer, 0)
    mask_gradient(c)
    optimizer.step()
    assert type(optimizer) not in WEIGHT_BY_WEIGHT
    assert (layer.weight[~c.mask] != 0).any()
    c.clean(optimizer)
    assert_clean(c, optimizer)


def test_figures_are_those_counted_by_hand() -> None:
    layer = nn.Linear(4, 3)
    first = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    c = SparseLayer("layer", layer, first)
    assert c.figures() == {
        "density": 0.25,
        "churn": 0,
        "explored": 0.25,
        "dead_inputs": 2,
        "dead_outputs": 1,
    }
    second = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    c.change(second, None)
    c.change(first, None)
    figures = c.figures()
    assert figures["explored"] == pytest.approx(4 / 12)
    assert figures["churn"] == pytest.approx(1 / 3)


def test_the_explored_share_of_a_large_layer_is_close_to_the_exact_one() -> None:
    layer = nn.Linear(1024, 512)
    seen = mask = random_mask(layer.weight, 0.1)
    c = SparseLayer("layer", layer, mask)
    for step in range(3):
        generator = generator_for(step, "next", 1, layer.weight.device)
        mask = initial_mask(layer.weight, 0.1, Structure(), generator)
        seen = seen | mask
        c.change(mask, None)
    assert c.figures()["explored"] == pytest.approx(float(seen.float().mean()), abs=0.01)


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_masks_are_packed_and_unpack_mask(values: list[bool]) -> None:
    mask = torch.tensor(values)
    assert torch.equal(unpack_mask(pack_mask(mask), mask.shape), mask)
    assert len(pack_mask(mask)) == -(-len(values) // 8)


def test_state_brings_mask_and_history_back() -> None:
    torch.manual_seed(0)
    layer, other = nn.Linear(16, 8), nn.Linear(16, 8)
    c = SparseLayer("layer", layer, random_mask(layer.weight, 0.2))
    c.change(drop_and_grow(c.mask, layer.weight.abs(), torch.rand(8, 16), 0.5), None)
    again = SparseLayer("layer", other, torch.ones(8, 16, dtype=torch.bool))
    again.load_state_dict(c.state_dict())
    assert torch.equal(again.mask, c.mask)
    assert again.checksum() == c.checksum()
    assert again.figures() == c.figures()
    assert (other.weight[~c.mask] == 0).all()
    assert not again.full


def test_layers_are_found_once_and_a_weight_that_is_no_parameter_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 1), nn.Embedding(3, 4))
    net.append(nn.Linear(4, 4))
    net[4].weight = net[0].weight  # tied
    assert list(sparse_layers(net, None, set())) == ["0", "2"]
    assert list(sparse_layers(net, ["2"], set())) == ["2"]
    with pytest.raises(ValueError, match=r"'x'.* 0, 2"):
        sparse_layers(net, ["x"], set())
    net[2].requires_grad_(False)
    assert list(sparse_layers(net, None, set())) == ["0"]
    assert list(sparse_layers(net, ["2"], set())) == ["2"]  # who names it wants it
    nn.utils.parametrizations.weight_norm(net[0])
    assert list(sparse_layers(net, ["2"], set())) == ["2"]
    with pytest.raises(ValueError, match="The weight of 0 is not a plain parameter"):
        sparse_layers(net, None, set())
    with pytest.raises(ValueError, match="LayerNorm has no layer to make sparse"):
        sparse_layers(nn.LayerNorm(2), None, set())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("shape", [(300, 1000), (6, 4, 3, 3)])
def test_figures_by_hand(shape: tuple[int, ...], device: str) -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(1000, 300) if len(shape) == 2 else nn.Conv2d(4, 6, 3)
    layer = layer.to(device)
    c = SparseLayer("layer", layer, torch.rand(shape) < 0.05)
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(4):
        old, new = c.mask.clone(), torch.rand(shape).to(device) < 0.05
        c.change(new, optimizer)
        matrix, figures = new.flatten(1), c.figures()
        assert c.count == int(new.sum())
        assert not c.full
        assert figures["density"] == c.count / new.numel()
        assert figures["churn"] == int((new & ~old).sum()) / c.count
        assert figures["dead_inputs"] == int((~matrix.any(0)).sum())
        assert figures["dead_outputs"] == int((~matrix.any(1)).sum())
    again = SparseLayer("layer", layer, torch.zeros_like(c.mask))
    again.load_state_dict(c.state_dict())
    assert again.figures() == c.figures()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_scores_that_are_not_finite_change_nothing(value: float) -> None:
    layers: list[Any] = [nn.Linear(4, 3), nn.Linear(4, 3)]
    sparse = [SparseLayer(str(i), layer, torch.rand(3, 4) < 0.5) for i, layer in enumerate(layers)]
    before = [(c.mask.clone(), c.weight.detach().clone()) for c in sparse]
    scores = [torch.full((3, 4), 3e38), torch.rand(3, 4)]  # whose sum overflows in float32
    scores[1][0, 0] = value
    masks = {c: ~c.mask for c in sparse}
    assert not change_connections(masks, None, scores)
    for c, (mask, weight) in zip(sparse, before, strict=True):
        assert torch.equal(c.mask, mask)
        assert torch.equal(c.weight, weight)
    assert change_connections(masks, None, scores[:1])
    assert all(torch.equal(c.mask, ~mask) for c, (mask, _) in zip(sparse, before, strict=True))


def test_weights_in_another_memory_format_are_rewired_alike() -> None:
    ends = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layer: Any = nn.Conv2d(4, 8, 3)
        layer = layer.to(memory_format=memory_format)
        optimizer = torch.optim.Adam(layer.parameters(), 0.1)
        c = SparseLayer("layer", layer, random_mask(layer.weight, 0.3))
        for seed in range(3):
            dense_gradient(layer, seed)
            scores = layer.weight.grad.abs()
            mask_gradient(c)
            optimizer.step()
            c.change(drop_and_grow(c.mask, layer.weight.abs(), scores, 0.5), optimizer)
            assert_clean(c, optimizer)
        ends.append((layer.weight.detach().clone(), c.mask))
    assert torch.equal(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][0], ends[1][0])
