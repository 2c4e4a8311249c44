"""Which connections to keep, drop and grow: pure functions, scores and mask in, mask out.

The result is undefined if any score is not finite.
"""

import torch
from torch import Tensor

from .selection import largest, largest_in_rows
from .structures import Structure

__all__ = ["drop_and_grow", "largest_mask"]


def largest_mask(scores: Tensor, density: float, structure: Structure | None = None) -> Tensor:
    """Keep the largest scores of a layer, as many as the density says in every group.

    >>> largest_mask(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), 0.5).tolist()
    [[True, True, False, False]]
    """
    structure = structure or Structure()
    grouped = structure.groups(scores)
    count = structure.count(scores, density)
    if len(grouped) == 1:
        return structure.ungroup(largest(grouped, count), scores)
    counts = torch.full((len(grouped),), count, device=scores.device)
    return structure.ungroup(largest_in_rows(grouped, counts), scores)


def drop_and_grow(
    mask: Tensor,
    keep_scores: Tensor,
    grow_scores: Tensor,
    drop_fraction: float,
    structure: Structure | None = None,
    exclude_just_dropped: bool = False,
    total: int | None = None,
) -> Tensor:
    """Drop the share of connections with the smallest scores, and grow as many others.

    The smallest are taken from the whole layer; each group grows as many as it has lost. What was
    just dropped may grow again, and then counts as kept: a layer that has its best connections
    already does not change.

    Args:
        mask: The connections, bool.
        keep_scores: Scores of the connections that exist, at least 0.
        grow_scores: Scores of the candidates, at least 0.
        drop_fraction: The share that is dropped.
        structure: The structure that connections keep to.
        exclude_just_dropped: Whether dropped connections may not grow again at once.
        total: The number of connections or blocks, if known: counting them waits for the device.

    >>> mask = torch.tensor([[True, True, False, False]])
    >>> weights, gradients = torch.tensor([[1.0, 9, 0, 0]]), torch.tensor([[0.0, 0, 5, 7]])
    >>> drop_and_grow(mask, weights, gradients, 0.5).tolist()
    [[False, True, False, True]]
    """
    structure = structure or Structure()
    old = structure.masks(mask)
    total = int(old.sum()) if total is None else total
    dropped = int(drop_fraction * total + 1e-9)
    if exclude_just_dropped:
        dropped = min(dropped, old.numel() - total)
    if dropped == 0:
        return mask.clone()
    keep, grow = structure.groups(keep_scores), structure.groups(grow_scores)
    kept = largest(keep, total - dropped, old, total)
    candidates = ~(old if exclude_just_dropped else kept)
    if len(old) == 1:
        left = old.numel() - (total if exclude_just_dropped else total - dropped)
        return structure.ungroup(kept | largest(grow, dropped, candidates, left), mask)
    lost = old.sum(-1) - kept.sum(-1)
    grown = largest_in_rows(grow.masked_fill(~candidates, -torch.inf), lost) & candidates
    if exclude_just_dropped:  # a group may have fewer candidates than it has lost
        back = keep.masked_fill(~(old & ~kept), -torch.inf)
        grown |= largest_in_rows(back, lost - grown.sum(-1))
    return structure.ungroup(kept | grown, mask)
