"""Choose the largest of many scores: exactly so many, and the same ones on every process."""

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["counted", "largest", "largest_in_rows"]

_SAMPLED = 2**14  # scores that tell where to look
_IN_CACHE = 2**17  # scores
_SORTED_AT_ONCE = 2**22  # scores: a GPU sorts these in the time of the launches that are saved
_WORTH_GATHERING = 2**24  # scores: fewer are sooner gone through than gathered


def largest(
    scores: Tensor,
    count: int,
    among: Tensor | None = None,
    allowed: int | None = None,
    *,
    by_size: bool = False,
) -> Tensor:
    """Mark the `count` largest scores of a whole tensor; of equal ones the first win.

    No full sort of many scores: the smallest one that is in is found, and the others are compared
    with it.

    Args:
        scores: Scores of any shape.
        count: How many.
        among: Which ones may be marked, bool; all when None.
        allowed: How many those are, where it is known: to count them waits for the device.
        by_size: Whether of scores the size counts, not the sign.

    >>> largest(torch.tensor([0.5, 0.9, 0.5, 0.1]), 2).tolist()
    [True, True, False, False]
    """
    scores = scores.detach()
    if allowed is None:
        allowed = scores.numel() if among is None else counted(among)[0]
    if not 0 <= count <= allowed:
        raise ValueError(f"`count` must be from 0 to {allowed}, got {count}.")
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if scores.device.type == "cpu":
        return _largest_on_cpu(scores, count, among, count / allowed, by_size)
    scores = scores.abs() if by_size else scores
    if scores.numel() <= _SORTED_AT_ONCE:  # and nothing waits for the device
        flat = (scores if among is None else torch.where(among, scores, -torch.inf)).flatten()
        order = flat.sort(descending=True, stable=True).indices
        mask = torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, order[:count], True)
        return mask.view(scores.shape)
    gathers = 2 * allowed < scores.numel() and scores.numel() > _WORTH_GATHERING
    if among is not None and gathers:
        last = _kth_largest(scores[among], count)
        mask = (scores >= last) & among
    else:
        scores = scores if among is None else torch.where(among, scores, -torch.inf)
        last = _kth_largest(scores.flatten(), count)
        mask = scores >= last
    surplus = counted(mask)[0] - count
    if surplus:
        ties = (mask & (scores == last)).flatten().nonzero()[:, 0]
        mask.view(-1)[ties[len(ties) - surplus :]] = False
    return mask


def counted(*masks: Tensor) -> list[int]:
    """Count what is set in masks on one device; waits for it once."""
    import numpy as np  # four times as fast as torch on a CPU

    if masks[0].device.type == "cpu":
        return [int(np.count_nonzero(mask.numpy())) for mask in masks]
    counts = [torch.count_nonzero(mask) for mask in masks]
    if len(counts) == 1:
        return [int(counts[0])]
    together: list[int] = torch.stack(counts).tolist()
    return together


def _kth_largest(scores: Tensor, k: int) -> Tensor:
    """Return the k-th largest of a flat tensor, by way of the shorter end."""
    if 2 * k <= scores.numel():
        return scores.topk(k, sorted=False).values.amin()
    return scores.topk(scores.numel() - k + 1, largest=False, sorted=False).values.amax()


def _largest_on_cpu(
    scores: Tensor, count: int, among: Tensor | None, share: float, by_size: bool
) -> Tensor:
    """Do it by numpy, which is several times as fast as torch there.

    A sample tells between which scores the last one that is in must lie, so that few are sorted. If
    the sample is wrong, all of them are. Sizes are taken of few at a time: new memory for all of
    them costs more than they do.
    """
    import numpy as np

    halves = scores.dtype in (torch.bfloat16, torch.float16)  # which numpy does not have or sorts
    values = (scores.float() if halves else scores).flatten().numpy()
    allowed = None if among is None else among.flatten().numpy()
    ranked: Any = np.abs if by_size else np.asarray
    low, high = _bounds(values, allowed, share, ranked)
    mask = np.empty(len(values), bool)
    parts = []
    for start in range(0, len(values), _IN_CACHE):
        here = slice(start, start + _IN_CACHE)
        some = ranked(values[here])
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
        candidates = ranked(values[close])
        last = np.partition(candidates, len(close) - left)[len(close) - left]
        better = candidates > last
        mask[close[better]] = True
        mask[close[candidates == last][: left - np.count_nonzero(better)]] = True
    return torch.from_numpy(mask).view(scores.shape)


def _bounds(values: Any, allowed: Any, share: float, ranked: Any) -> tuple[float, float]:
    """Guess between which values the last one of a share of the largest lies."""
    import numpy as np

    step = len(values) // _SAMPLED | 1
    sample = values[::step] if allowed is None else values[::step][allowed[::step]]
    sample = np.sort(ranked(sample))
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
