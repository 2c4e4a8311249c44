"""Engines: ways to compute a gated feed-forward of which each sample needs some blocks only.

    y = W₂ (g ∘ act(W₁ x + b₁)) + b₂

All give the same values and the same gradients, with one exception that is the point of it: a block
that a sample closes is not computed, so its gate learns nothing from that sample's loss (as in a
mixture of experts), while `masked` computes it and lets its gate learn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FeedForward", "by_blocks", "by_open_rows", "masked"]


@dataclass(frozen=True, eq=False)
class FeedForward:
    """Two linear maps with gated units between them.

    Args:
        first: Weight ``(units, inputs)`` and bias of the map whose outputs are gated.
        activation: What is applied to its outputs, entry by entry.
        second: Weight ``(outputs, units)`` and bias of the map that reads them.
        block_size: How many neighbouring units share a gate.
    """

    first: tuple[Tensor, Tensor | None]
    activation: Callable[[Tensor], Tensor]
    second: tuple[Tensor, Tensor | None]
    block_size: int

    @classmethod
    def of(
        cls,
        first: nn.Linear,
        activation: Callable[[Tensor], Tensor],
        second: nn.Linear,
        block_size: int,
    ) -> "FeedForward":
        """Make one of two layers."""
        maps = (first.weight, first.bias), (second.weight, second.bias)
        return cls(maps[0], activation, maps[1], block_size)

    @property
    def tensors(self) -> list[Tensor]:
        """Weights and biases."""
        return [t for t in (*self.first, *self.second) if t is not None]

    def to(self, dtype: torch.dtype) -> "FeedForward":
        """Return it with weights of another type, which gradients flow through."""
        first, second = (
            (w.to(dtype), None if b is None else b.to(dtype)) for w, b in (self.first, self.second)
        )
        return FeedForward(first, self.activation, second, self.block_size)

    def units(self, start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return what belongs to some blocks: weight and bias before, weight behind."""
        units = slice(start * self.block_size, stop * self.block_size)
        weight, bias = self.first
        return weight[units], None if bias is None else bias[units], self.second[0][:, units]


def masked(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Compute every block, and multiply by the gate: the reference."""
    hidden = net.activation(F.linear(x, *net.first))
    units = gate.to(hidden.dtype).repeat_interleave(net.block_size, -1)
    return F.linear(hidden * units, *net.second)


def by_blocks(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Multiply each block with the samples that open it, one block after the other."""
    is_open = gate.detach() != 0
    by_block = is_open.t()
    sample = by_block.nonzero()[:, 1]
    counts = is_open.sum(0).tolist()
    parts = sample.split(counts)
    if torch.is_grad_enabled():
        packed = torch.cat([_block(x, gate, net, b, rows) for b, rows in enumerate(parts)])
    else:
        packed = _blocks_in_place(x, net, parts)
    # The rows of `packed` that belong to a sample, sample by sample.
    row_of_pair = (by_block.flatten().cumsum(0) - 1).view_as(by_block).t()[is_open]
    ends = is_open.sum(1).cumsum(0)
    total: Tensor = _SumRows.apply(packed, row_of_pair, ends, sample)  # type: ignore[no-untyped-call]
    bias = net.second[1]
    return total if bias is None else total + bias


def _block(x: Tensor, gate: Tensor, net: FeedForward, block: int, rows: Tensor) -> Tensor:
    """Return what a block adds to the outputs of the samples that open it."""
    first, bias, second = net.units(block, block + 1)
    # With all samples there is nothing to select.
    inputs = x if len(rows) == len(x) else x.index_select(0, rows)
    hidden = net.activation(F.linear(inputs, first, bias))
    if gate.requires_grad:
        hidden = hidden * gate[rows, block].to(hidden.dtype).unsqueeze(-1)
    return F.linear(hidden, second)


def _blocks_in_place(x: Tensor, net: FeedForward, parts: tuple[Tensor, ...]) -> Tensor:
    """Do the same for all blocks without gradients, and without a copy of each."""
    packed = x.new_empty(sum(map(len, parts)), len(net.second[0]))
    start = 0
    for block, rows in enumerate(parts):
        if not len(rows):
            continue
        first, bias, second = net.units(block, block + 1)
        inputs = x if len(rows) == len(x) else x.index_select(0, rows)
        hidden = net.activation(F.linear(inputs, first, bias))
        torch.mm(hidden, second.t(), out=packed[start : start + len(rows)])
        start += len(rows)
    return packed


class _SumRows(torch.autograd.Function):
    """Sums of some rows each; in reverse, every row takes the gradient of its sum."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, row_of_pair: Tensor, ends: Tensor, sample: Tensor
    ) -> Tensor:
        ctx.save_for_backward(sample)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        if not len(row_of_pair):
            return packed.new_zeros(len(ends), packed.shape[1])
        return F.embedding_bag(row_of_pair, packed, starts, mode="sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (sample,) = ctx.saved_tensors
        return gradient.index_select(0, sample), None, None, None


@torch.no_grad()
def by_open_rows(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Read only the weights of open units, sample by sample: for a batch of one or few.

    Neighbouring open blocks are one product. Without gradients.
    """
    weight, bias = net.second
    out = x.new_zeros(len(x), len(weight))
    if bias is not None:
        out += bias
    for sample, row, blocks in zip(x, out, (gate != 0).tolist(), strict=True):
        for start, stop in _runs(blocks):
            first, first_bias, second = net.units(start, stop)
            hidden = torch.mv(first, sample)
            if first_bias is not None:
                hidden += first_bias
            row.addmv_(second, net.activation(hidden))
    return out


def _runs(is_open: list[bool]) -> list[tuple[int, int]]:
    """List the runs of open blocks, each as its first and one past its last.

    >>> _runs([True, True, False, True])
    [(0, 2), (3, 4)]
    """
    edges = [
        i
        for i, (a, b) in enumerate(zip([False, *is_open], [*is_open, False], strict=True))
        if a != b
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))
