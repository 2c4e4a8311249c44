"""Choose the largest of many scores: exactly so many, and the same ones on every process."""

import torch
from torch import Tensor

__all__ = ["largest", "largest_in_rows"]


def largest(scores: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """Mark the `count` largest scores of a whole tensor; of equal ones the first win.

    No full sort: the smallest one that is in is found, then the scores are compared with it.

    Args:
        scores: Scores of any shape.
        count: How many.
        among: Which ones may be marked, bool; all when None.

    >>> largest(torch.tensor([0.5, 0.9, 0.5, 0.1]), 2).tolist()
    [True, True, False, False]
    """
    scores = scores.detach()
    allowed = scores.numel() if among is None else int(torch.count_nonzero(among))
    if not 0 <= count <= allowed:
        raise ValueError(f"`count` must be from 0 to {allowed}, got {count}.")
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if among is None:
        last = _kth_largest(scores.flatten(), count)
    elif 2 * allowed < scores.numel():
        last = _kth_largest(scores[among], count)
    else:
        last = _kth_largest(scores.masked_fill(~among, -torch.inf).flatten(), count)
    mask = scores >= last
    if among is not None:
        mask &= among
    surplus = int(torch.count_nonzero(mask)) - count
    if surplus:
        ties = (mask & (scores == last)).flatten().nonzero()[:, 0]
        mask.view(-1)[ties[len(ties) - surplus :]] = False
    return mask


def _kth_largest(scores: Tensor, k: int) -> Tensor:
    """Return the k-th largest of a flat tensor."""
    if not scores.is_cuda and scores.dtype in (torch.float32, torch.float64):
        import numpy as np  # whose selection is five to twenty times as fast as torch's on a CPU

        place = scores.numel() - k
        return scores.new_tensor(np.partition(scores.numpy(), place)[place])
    if 2 * k <= scores.numel():  # by way of the shorter end
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
