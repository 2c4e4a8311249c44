"""Whether gradients, weights and scores are numbers that can be compared."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["all_finite", "all_finite_later"]


def all_finite(values: Iterable[Tensor]) -> bool:
    """Tell whether every entry of all tensors is a number; waits for the device."""
    values = list(values)
    if not values:
        return True
    # A sum with one entry that is not finite is not; the sum itself may overflow, though. Norms of
    # all tensors are one operation on a GPU, and on a CPU slower than sums.
    on_gpu = all(value.is_cuda for value in values)
    sums = torch._foreach_norm(values) if on_gpu else [value.sum() for value in values]
    together = torch.stack([value.to(sums[0].device) for value in sums])
    if all(map(math.isfinite, together.tolist())):
        return True
    return all(bool(value.isfinite().all()) for value in values)


def all_finite_later(scores: Sequence[Tensor]) -> Tensor:
    """Return whether all scores are finite: a bool on their device."""
    largest = torch.stack([score.abs().amax() for score in scores]).amax()
    return largest < math.inf  # which what is not a number is not
