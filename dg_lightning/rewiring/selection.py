"""Choose the largest of many scores: exactly so many, and the same ones on every process."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dg_lightning.gates import top_k_mask

__all__ = ["largest", "largest_in_rows"]

_SAMPLED = 2**14  # scores that bounds are estimated from
_IN_CACHE = 2**17  # scores that fit into a CPU cache


def largest(
    scores: Tensor, count: int, among: Tensor | None = None, allowed: int | None = None
) -> Tensor:
    """Mark the `count` largest scores of a whole tensor; of equal ones the first win.

    Args:
        scores: Scores of any shape.
        count: How many.
        among: Which ones may be marked, bool; all when None.
        allowed: How many those are, if known: counting them waits for the device.

    >>> largest(torch.tensor([0.5, 0.9, 0.5, 0.1]), 2).tolist()
    [True, True, False, False]
    """
    scores = scores.detach()
    if allowed is None:
        allowed = scores.numel() if among is None else int(among.sum())
    if not 0 <= count <= allowed:
        raise ValueError(f"`count` must be from 0 to {allowed}, got {count}.")
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if scores.device.type == "cpu":
        return _largest_on_cpu(scores, count, among, count / allowed)
    candidates = scores if among is None else torch.where(among, scores, -torch.inf)
    return top_k_mask(candidates.flatten(), count).view(scores.shape)


def _largest_on_cpu(scores: Tensor, count: int, among: Tensor | None, share: float) -> Tensor:
    """Do the same with numpy, without a full sort, which takes a fraction of the time.

    A sample gives bounds for the smallest score that is in, so that only scores between them are
    sorted. If the bounds turn out wrong, all scores are.
    """
    halves = scores.dtype in (torch.bfloat16, torch.float16)  # which numpy does not have or sorts
    values = (scores.float() if halves else scores).flatten().numpy()
    allowed = None if among is None else among.flatten().numpy()
    low, high = _bounds(values, allowed, share)
    mask = np.empty(len(values), bool)
    parts = []
    for start in range(0, len(values), _IN_CACHE):
        here = slice(start, start + _IN_CACHE)
        some = values[here]
        reach = some >= low
        np.greater(some, high, out=mask[here])
        if allowed is not None:
            reach &= allowed[here]
            mask[here] &= allowed[here]
        parts.append(start + np.flatnonzero(reach ^ mask[here]))
    close = np.concatenate(parts)
    left = count - int(np.count_nonzero(mask))
    if not 0 <= left <= len(close):
        mask, left = np.zeros_like(mask), count
        close = np.arange(len(values)) if allowed is None else np.flatnonzero(allowed)
    if left:
        candidates = values[close]
        last = np.partition(candidates, len(close) - left)[len(close) - left]
        better = candidates > last
        mask[close[better]] = True
        mask[close[candidates == last][: left - np.count_nonzero(better)]] = True
    return torch.from_numpy(mask).view(scores.shape)


def _bounds(values: Any, allowed: Any, share: float) -> tuple[float, float]:
    """Estimate bounds of the smallest value among a share of the largest ones."""
    step = len(values) // _SAMPLED | 1
    sample = values[::step] if allowed is None else values[::step][allowed[::step]]
    sample = np.sort(sample)
    place = (1 - share) * len(sample)
    room = 4 * math.sqrt(share * (1 - share) * len(sample)) + 2  # four standard deviations
    first, last = int(place - room), int(place + room)
    return (
        -math.inf if step == 1 or first < 0 else float(sample[first]),
        math.inf if step == 1 or last >= len(sample) else float(sample[last]),
    )


def largest_in_rows(scores: Tensor, counts: Tensor) -> Tensor:
    """Mark in each row of a matrix its own number of largest scores; of equal ones the first win.

    >>> largest_in_rows(torch.tensor([[1, 3, 2], [5, 5, 4]]), torch.tensor([2, 1])).tolist()
    [[False, True, True], [True, False, False]]
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    wanted = torch.arange(scores.shape[-1], device=scores.device) < counts.unsqueeze(-1)
    return torch.zeros_like(wanted).scatter_(-1, order, wanted)
