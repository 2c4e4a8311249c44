"""The largest of many scores, against a full sort."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dg_lightning.rewiring import largest


def by_sort(scores: Tensor, count: int, among: Tensor | None) -> Tensor:
    """Mark the largest by sorting all of them; of equal ones the first."""
    flat = scores.flatten().double()
    if among is not None:
        flat = flat.masked_fill(~among.flatten(), -torch.inf)
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[flat.argsort(descending=True, stable=True)[:count]] = True
    return mask.view(scores.shape)


def scores_of(kind: str, dtype: Any) -> Tensor:
    scores = torch.rand(300, 400, generator=torch.Generator().manual_seed(0))
    if kind == "ties":
        scores = (8 * scores).floor()
    elif kind == "zeros":
        scores = scores * (scores > 0.9)
    elif kind == "sorted":  # a stride through it is no fair sample of a part
        scores = scores.flatten().sort().values.view(300, 400)
    elif kind == "outliers":  # which no sample of every seventh meets
        scores = torch.zeros(300, 400)
        scores.view(-1)[1:1000:7] = 1 + torch.rand(143)
    return scores.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "sorted", "outliers"])
def test_many_scores_are_chosen_as_by_a_full_sort(kind: str, dtype: Any) -> None:
    scores = scores_of(kind, dtype)
    some = torch.rand(300, 400, generator=torch.Generator().manual_seed(1)) < 0.1
    first = torch.zeros(300, 400, dtype=torch.bool)
    first[:20] = True
    for among in (None, some, ~some, first):
        allowed = scores.numel() if among is None else int(among.sum())
        for count in (1, allowed // 30, allowed // 2, allowed - 3, allowed):
            expected = by_sort(scores, count, among)
            assert torch.equal(largest(scores, count, among), expected), (kind, count)
            assert torch.equal(largest(scores, count, among, allowed), expected)


def test_too_many_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 2, got 3"):
        largest(torch.rand(4), 3, torch.tensor([True, False, True, False]))
    assert not largest(torch.rand(4), 0).any()
