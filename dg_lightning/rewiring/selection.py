"""Choose the largest of many scores: exactly so many, and the same ones on every process."""

import torch
from torch import Tensor

__all__ = ["largest", "largest_in_rows"]


def largest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` largest scores of a whole tensor; of equal ones the first win.

    No full sort: the smallest one that is in is found, then the scores are compared with it.

    >>> largest(torch.tensor([0.5, 0.9, 0.5, 0.1]), 2).tolist()
    [True, True, False, False]
    """
    total = scores.numel()
    if not 0 <= count <= total:
        raise ValueError(f"`count` must be from 0 to {total}, got {count}.")
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if count == total:
        return torch.ones_like(scores, dtype=torch.bool)
    last = _kth_largest(scores.flatten(), count)
    mask = scores > last
    missing = count - int(mask.sum())
    ties = (scores == last).flatten().nonzero()[:missing, 0]
    mask.view(-1)[ties] = True
    return mask


def _kth_largest(scores: Tensor, k: int) -> Tensor:
    """Return the k-th largest of a flat tensor, by way of the shorter end."""
    if 2 * k <= scores.numel():
        return scores.topk(k, sorted=False).values.amin()
    return scores.topk(scores.numel() - k + 1, largest=False, sorted=False).values.amax()


def largest_in_rows(scores: Tensor, counts: Tensor) -> Tensor:
    """Mark in each row of a matrix its own number of largest scores; of equal ones the first win.

    >>> largest_in_rows(torch.tensor([[1, 3, 2], [5, 5, 4]]), torch.tensor([2, 1])).tolist()
    [[False, True, True], [True, False, False]]
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    wanted = torch.arange(scores.shape[-1], device=scores.device) < counts.unsqueeze(-1)
    return torch.zeros_like(wanted).scatter_(-1, order, wanted)
