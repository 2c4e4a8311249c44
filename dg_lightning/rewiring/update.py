"""Make, rewire and prune masks: pure functions of tensors.

Of scores that are not finite nobody should use what is returned.
"""

from typing import Any

import torch
from torch import Tensor

from dg_lightning.own_kernels import kernel_on

from .finite import all_finite_later
from .selection import counted, largest, largest_in_rows
from .structures import Structure

__all__ = ["largest_mask", "rewired"]


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


def rewired(
    mask: Tensor,
    keep_scores: Tensor,
    grow_scores: Tensor,
    drop_fraction: float,
    structure: Structure | None = None,
    exclude_just_dropped: bool = False,
    total: int | None = None,
    *,
    by_size: bool = False,
    finite: Tensor | None = None,
) -> Tensor:
    """Drop the share of connections with the smallest scores, and grow as many others.

    The smallest are sought in the whole layer; each group grows as many as it has lost. What was
    just dropped may grow again, and then counts as kept: a layer whose best connections are the
    ones that it has does not change.

    Args:
        mask: The connections.
        keep_scores: Scores of the connections that there are.
        grow_scores: Scores of those that may come.
        drop_fraction: The share that is dropped.
        structure: What the connections keep to.
        exclude_just_dropped: Whether what is dropped may not grow again at once.
        total: The number of connections or blocks, where it is known: to count them waits for the
            device.
        by_size: Whether of all scores the size counts, not the sign.
        finite: A bool of the device, which is unset if a score is not finite.

    >>> mask = torch.tensor([[True, True, False, False]])
    >>> weights, gradients = torch.tensor([[1.0, -9, 0, 0]]), torch.tensor([[0.0, 0, 5, -7]])
    >>> rewired(mask, weights, gradients, 0.5, by_size=True).tolist()
    [[False, True, False, True]]
    """
    structure = structure or Structure()
    total = counted(structure.masks(mask))[0] if total is None else total
    dropped = int(drop_fraction * total + 1e-9)
    if exclude_just_dropped:
        dropped = min(dropped, mask.numel() // structure.block**2 - total)
    numbers = total - dropped, dropped, exclude_just_dropped
    by_kernel = dropped > 0 and by_size and mask.is_cuda
    if by_kernel and structure.kind == "unstructured":
        new = _at_once(mask, keep_scores, grow_scores, *numbers, finite)
        if new is not None:
            return new
    if by_size and structure.kind != "unstructured":  # a block has the sum of its sizes
        keep_scores, grow_scores, by_size = keep_scores.abs(), grow_scores.abs(), False
    if finite is not None:
        finite.logical_and_(all_finite_later([keep_scores, grow_scores]))
    if dropped == 0:
        return mask.clone()
    old = structure.masks(mask)
    keep, grow = structure.groups(keep_scores), structure.groups(grow_scores)
    if by_kernel and structure.block > 1:
        new = _at_once(old, keep, grow, *numbers, None)
        if new is not None:
            return structure.ungroup(new, mask)
    kept = largest(keep, total - dropped, old, total, by_size=by_size)
    candidates = ~(old if exclude_just_dropped else kept)
    if len(old) == 1:
        left = old.numel() - (total if exclude_just_dropped else total - dropped)
        grown = largest(grow, dropped, candidates, left, by_size=by_size)
        return structure.ungroup(kept | grown, mask)
    lost = old.sum(-1) - kept.sum(-1)
    grown = largest_in_rows(grow.masked_fill(~candidates, -torch.inf), lost) & candidates
    if exclude_just_dropped:  # a group may have fewer candidates than it has lost
        back = keep.masked_fill(~(old & ~kept), -torch.inf)
        grown |= largest_in_rows(back, lost - grown.sum(-1))
    return structure.ungroup(kept | grown, mask)


def _at_once(old: Tensor, *scores_and_numbers: Any) -> Tensor | None:
    """Return the new connections by `rewired_at_once`, where there is that kernel."""
    kernel = kernel_on(old.device, "rewiring.rewire_kernel", "rewired_at_once", _try_kernel)
    new: Tensor | None = None if kernel is None else kernel(old, *scores_and_numbers)
    return new


def _try_kernel(rewired_at_once: Any, device: torch.device) -> None:
    scores = torch.ones(2, 2, device=device)
    rewired_at_once(torch.eye(2, device=device).bool(), scores, scores, 1, 1, False)
