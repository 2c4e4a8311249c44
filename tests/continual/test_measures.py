import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dg_lightning.continual import (
    AccuracyMatrix,
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
    overlap,
)

# Three tasks; figures by hand, from the definitions in Lopez-Paz and Ranzato (2017) and, for
# forgetting, first minus last.
MATRIX = torch.tensor([[0.90, 0.50, 0.40], [0.80, 0.95, 0.60], [0.70, 0.85, 0.99]])


def test_figures_are_those_of_the_definitions() -> None:
    assert average_accuracy(MATRIX, 2) == pytest.approx((0.7 + 0.85 + 0.99) / 3)
    assert forgetting(MATRIX, 2) == pytest.approx((0.2 + 0.1) / 2)
    assert forgetting(MATRIX, 1) == pytest.approx(0.1)
    assert backward_transfer(MATRIX, 2) == pytest.approx(-0.15)
    chance = torch.full((3,), 0.5)
    assert forward_transfer(MATRIX, 2, chance) == pytest.approx((0.0 + 0.1) / 2)


def test_nothing_is_forgotten_before_there_is_a_second_task() -> None:
    assert forgetting(MATRIX, 0) == backward_transfer(MATRIX, 0) == 0
    assert forward_transfer(MATRIX, 0, torch.ones(3)) == 0


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 2), st.integers(0, 2))
def test_a_cell_is_the_share_that_is_right(right: list[bool], learned: int, task: int) -> None:
    matrix = AccuracyMatrix(3)
    target = torch.zeros(len(right), dtype=torch.long)
    logits = torch.tensor([[1.0, 0.0] if r else [0.0, 1.0] for r in right])
    for half in (slice(None, 7), slice(7, None)):  # batch by batch
        matrix.update(learned, task, logits[half], target[half])
    found = matrix.compute()
    assert found[learned, task].item() == sum(right) / len(right)
    assert int(found.isnan().sum()) == 8


def test_overlap_is_that_of_sets_where_units_are_open_or_not() -> None:
    tasks = [{0, 1, 2}, {1, 2, 3}, {5}]
    rates = torch.zeros(3, 6)
    for task, units in enumerate(tasks):
        rates[task, list(units)] = 1
    pairs = [(0, 1), (0, 2), (1, 2)]
    jaccard = [len(tasks[a] & tasks[b]) / len(tasks[a] | tasks[b]) for a, b in pairs]
    assert overlap(rates) == pytest.approx(sum(jaccard) / 3)
    assert overlap(rates[:1]) == 0
    assert not math.isnan(overlap(torch.zeros(2, 4)))
