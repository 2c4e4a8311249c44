"""Golden tables, torch.nn.utils.prune as oracle, and invariants over random cases."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

from dg_lightning.rewiring import Structure, drop_and_grow, largest, largest_in_rows, largest_mask
from dg_lightning.schedules.schedule import Clock, Schedule


def bits(text: str) -> Tensor:
    return torch.tensor([[c == "1" for c in text]])


OLD = bits("01010110")


# What jaxpruner's update gives; index 5 is dropped and grown again at 1.0.
@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.0, "01010110"),
        (0.25, "11000110"),
        (0.5, "10001110"),
        (0.75, "10101100"),
        (1.0, "10101100"),
    ],
)
def test_update_at_five_drop_fractions(fraction: float, expected: str) -> None:
    weights = torch.tensor([[0.0, 1, 0, 1, 0, 8, 2, 0]])
    gradients = torch.tensor([[0.9, 0.1, 0.4, 0.1, 0.5, 0.8, 0.2, 0.3]])
    assert torch.equal(drop_and_grow(OLD, weights, gradients, fraction), bits(expected))


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.25, "11010100"), (0.5, "11001100"), (0.75, "10101100"), (1.0, "10101100")],
)
def test_published_vector_with_signed_scores(fraction: float, expected: str) -> None:
    scores = torch.tensor([[-9.0, 1, 4, -1, 5, 8, -2, 3]])
    assert torch.equal(drop_and_grow(OLD, scores, scores.abs(), fraction), bits(expected))


STRUCTURES = ["unstructured", "block:2", "2:4", "fan_in"]


def test_where_nothing_is_dropped_the_mask_is_a_new_one_all_the_same() -> None:
    new = drop_and_grow(OLD, torch.ones(1, 8), torch.ones(1, 8), 0.0)
    assert new is not OLD  # which would stand for no update at all
    assert torch.equal(new, OLD)


def test_the_drop_fraction_falls_with_half_a_cosine() -> None:
    at = Schedule(0.3, 0.0, "cosine", until=100).resolve(Clock(200))
    assert [at(0), at(50), at(100), at(150)] == pytest.approx([0.3, 0.15, 0, 0])
    assert at(25) == pytest.approx(0.15 * (1 + math.cos(math.pi / 4)))


def test_what_was_just_dropped_may_be_excluded() -> None:
    weights = torch.tensor([[0.0, 1, 0, 1, 0, 8, 2, 0]])
    gradients = torch.tensor([[0.1, 0.9, 0.1, 0.9, 0.1, 0.9, 0.9, 0.1]])
    assert torch.equal(drop_and_grow(OLD, weights, gradients, 1.0), OLD)
    new = drop_and_grow(OLD, weights, gradients, 1.0, exclude_just_dropped=True)
    assert torch.equal(new, ~OLD)


@pytest.mark.parametrize("amount", [0.1, 0.3, 0.5, 0.77, 0.95])
def test_magnitude_masks_are_those_of_torch_bit_by_bit(amount: float) -> None:
    torch.manual_seed(0)
    for size in ((5, 5), (37, 21), (16, 3, 3, 3)):
        module = nn.Conv2d(3, 16, 3) if len(size) == 4 else nn.Linear(size[1], size[0])
        ours = largest_mask(module.weight.detach().abs(), 1 - amount)
        prune.l1_unstructured(module, "weight", amount=amount)
        masks: Any = module.weight_mask
        assert torch.equal(ours, masks != 0)


def test_global_masks_are_those_of_torch_bit_by_bit() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), nn.Linear(30, 7)]
    together = torch.cat([layer.weight.detach().abs().flatten() for layer in layers])
    ours = largest(together, len(together) - round(0.6 * len(together)))
    prune.global_unstructured(
        [(layer, "weight") for layer in layers], prune.L1Unstructured, amount=0.6
    )
    masks: list[Any] = [layer.weight_mask for layer in layers]
    theirs = torch.cat([mask.flatten() for mask in masks]) != 0
    assert torch.equal(ours, theirs)


def test_two_prunings_by_half_leave_a_quarter() -> None:
    weight = torch.randn(16, 16)
    once = largest_mask(weight.abs(), 0.5)
    twice = largest_mask(weight.abs().masked_fill(~once, -1), 0.25)
    assert twice.float().mean() == 0.25
    assert torch.equal(twice & once, twice)


def test_kept_blocks_are_those_of_torch_sparse() -> None:
    mask = largest_mask(torch.rand(32, 48), 0.3, Structure("block:8"))
    kept = int(torch.count_nonzero(mask)) // 64
    assert kept == round(0.3 * 24)
    assert mask.float().to_sparse_bsr((8, 8)).values().shape[0] == kept


def test_two_of_four_is_what_it_says() -> None:
    mask = largest_mask(torch.rand(8, 12), 0.1, Structure("2:4"))
    assert (mask.reshape(-1, 4).sum(-1) == 2).all()


def reference_largest(scores: Tensor, count: int, among: Tensor) -> Tensor:
    """Sort everything, slowly."""
    flat, allowed = scores.flatten().tolist(), among.flatten().tolist()
    order = sorted((i for i in range(len(flat)) if allowed[i]), key=lambda i: (-flat[i], i))
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[order[:count]] = True
    return mask.reshape(scores.shape)


@given(st.data())
def test_largest_is_a_stable_sort(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=40))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    scores = torch.tensor(values, dtype=dtype)
    among = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    )
    count = data.draw(st.integers(0, int(among.sum())))
    assert torch.equal(largest(scores, count, among), reference_largest(scores, count, among))
    everything = torch.ones_like(among)
    assert torch.equal(largest(scores, count), reference_largest(scores, count, everything))


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="`count` must be from 0 to 3, got 4"):
        largest(torch.ones(3), 4)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))
def test_largest_in_rows_has_each_row_its_count(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(5, (rows, columns), generator=generator)
    counts = torch.randint(columns + 1, (rows,), generator=generator)
    mask = largest_in_rows(scores, counts)
    for row, count, got in zip(scores, counts, mask, strict=True):
        wanted = reference_largest(row, int(count), torch.ones_like(row, dtype=torch.bool))
        assert torch.equal(got, wanted)


KINDS = ["unstructured", "fan_in", "block:2", "2:4", "1:4"]


@given(
    st.sampled_from(KINDS),
    st.integers(1, 5),
    st.integers(1, 4),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_invariants_of_an_update(
    kind: str,
    rows: int,
    columns: int,
    density: float,
    fraction: float,
    exclude: bool,
    dtype: Any,
    seed: int,
) -> None:
    shape = (2 * rows, 4 * columns)
    generator = torch.Generator().manual_seed(seed)
    structure = Structure(kind)
    old = largest_mask(torch.rand(shape, generator=generator), density, structure)
    weights = torch.randn(shape, generator=generator).to(dtype).abs() * old
    gradients = torch.randn(shape, generator=generator).to(dtype).abs()
    new = drop_and_grow(old, weights, gradients, fraction, structure, exclude)
    groups_old, groups_new = structure.masks(old), structure.masks(new)
    assert torch.equal(structure.ungroup(groups_new, new), new)  # it keeps to the structure
    assert torch.equal(groups_new.sum(-1), groups_old.sum(-1))  # in every group
    dropped, grown = groups_old & ~groups_new, groups_new & ~groups_old
    kept = groups_old & groups_new
    assert int(dropped.sum()) <= int(fraction * int(groups_old.sum()) + 1e-9)
    if fraction == 0:
        assert torch.equal(new, old)
    keep, grow = structure.groups(weights), structure.groups(gradients)
    if kind == "unstructured" or kind.startswith("block"):
        if dropped.any() and kept.any() and exclude:
            assert keep[dropped].max() <= keep[kept].min()
        left = ~groups_old & ~groups_new
        if grown.any() and left.any():
            assert grow[grown].min() >= grow[left].max()


@pytest.mark.parametrize("kind", ["blocks", "3:2", "0:4", "block:0", "2-4"])
def test_an_unknown_structure_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="`structure` must be unstructured, fan_in, block"):
        Structure(kind)


def test_a_layer_that_does_not_fit_a_structure_is_refused() -> None:
    with pytest.raises(ValueError, match="divisible by 4, but fc is 6 x 8"):
        Structure("block:4").check_layer("fc", nn.Linear(8, 6))
    with pytest.raises(ValueError, match="divisible by 4, but fc has 6"):
        Structure("2:4").check_layer("fc", nn.Linear(6, 8))
    Structure("2:4").check_layer("conv", nn.Conv2d(4, 8, 3))
    with pytest.raises(ValueError, match="transposed convolution"):
        Structure("fan_in").check_layer("conv", nn.ConvTranspose2d(4, 8, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_structure_knows_its_masks(kind: str) -> None:
    structure = Structure(kind)
    assert structure.has(largest_mask(torch.rand(4, 8), 0.5, structure))
    odd = torch.zeros(4, 8, dtype=torch.bool)
    odd[0, 0] = True
    assert structure.has(odd) == (kind == "unstructured")
