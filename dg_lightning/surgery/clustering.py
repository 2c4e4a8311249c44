"""Blocks of units that are active together: balanced clusters, and units in a new order."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dg_lightning.compute.maps import weight_axes
from dg_lightning.surgery.probing import Units

__all__ = ["cluster_units", "reorder_units"]

_ROUNDS = 10


@torch.no_grad()
def cluster_units(activity: Tensor, size: int, seed: int = 0) -> Tensor:
    """Return an order of units in which those that are active together are neighbours.

    K-means by cosine with clusters of equal size.

    Args:
        activity: What each unit contributes to each token, ``(tokens, units)``, at least 0.
        size: Units of a block, which must divide their number.
        seed: Of the first centres.

    >>> together = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [2, 0, 2, 0]])
    >>> sorted(cluster_units(together, 2)[:2].tolist()) in ([0, 2], [1, 3])
    True
    """
    points = F.normalize(activity.float().t(), dim=1)
    drawn = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
    centres = points[drawn[: len(points) // size].to(points.device)]
    block = torch.zeros(len(points), dtype=torch.long, device=points.device)
    for _ in range(_ROUNDS):
        before, block = block, _assign(points @ centres.t(), size)
        if torch.equal(block, before):
            break
        sums = torch.zeros_like(centres).index_add_(0, block, points)
        centres = F.normalize(sums, dim=1)
    return block.argsort(stable=True)


def _assign(similarity: Tensor, size: int) -> Tensor:
    """Return the block of each unit: the most similar one that has room for it.

    Units apply to a block, and it takes those that suit it best; the others try the next one.
    """
    block = torch.full((len(similarity),), -1, device=similarity.device)
    room = torch.full((similarity.shape[1],), size, device=similarity.device)
    while len(left := (block < 0).nonzero()[:, 0]):
        wanted = similarity[left].masked_fill(room == 0, -torch.inf).argmax(1)
        for index in wanted.unique().tolist():
            applied = left[wanted == index]
            taken = min(len(applied), int(room[index]))
            best = applied[similarity[applied, index].topk(taken).indices]
            block[best] = index
            room[index] -= taken
    return block


@torch.no_grad()
def reorder_units(model: nn.Module, units: Units, order: Tensor) -> None:
    """Put units into a new order, in the maps that make them and in the one that reads them.

    The model computes the same as before.

    Args:
        model: The model.
        units: Units of a feed-forward.
        order: The unit that comes first, second and so on.
    """
    for name, rows in units.producers.items():
        producer: Any = model.get_submodule(name)
        # Rows by unit: one each, or two in a map that makes both halves of a gated unit.
        by_unit = rows.argsort(stable=True).view(units.size, -1)
        source = torch.empty_like(rows)
        source[by_unit] = by_unit[order.cpu()]
        source = source.to(producer.weight.device)
        axis = weight_axes(producer)[0]
        producer.weight.copy_(producer.weight.index_select(axis, source))
        if producer.bias is not None:
            producer.bias.copy_(producer.bias[source])
    consumer: Any = model.get_submodule(units.consumer)
    axis = weight_axes(consumer)[1]
    consumer.weight.copy_(consumer.weight.index_select(axis, order.to(consumer.weight.device)))
