"""A feed-forward with gated units, the input of every engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Block", "Blocks", "FeedForward"]


class Block(NamedTuple):
    """Weights of a block and their transposes, as views of the full weights."""

    first: Tensor
    first_t: Tensor
    bias: Tensor | None
    second: Tensor
    second_t: Tensor


class Blocks(dict[int, Block]):
    """Block views, created lazily."""

    def __init__(
        self, size: int, first: Tensor, second: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.size, self.first, self.second, self.bias = size, first, second, bias

    def __missing__(self, block: int) -> Block:
        units = slice(block * self.size, (block + 1) * self.size)
        first, second = self.first[units], self.second[:, units]
        bias = None if self.bias is None else self.bias[units]
        self[block] = views = Block(first, first.t(), bias, second, second.t())
        return views


@dataclass(frozen=True, eq=False)
class FeedForward:
    """Two linear maps with gated units between them.

    Args:
        first: Weight ``(units, inputs)`` and bias of the map whose outputs are gated.
        activation: Elementwise nonlinearity applied to its outputs.
        second: Weight ``(outputs, units)`` and bias of the map that reads them.
        block_size: Number of adjacent units that share a gate.
        scaled: Whether open gates may differ from 1.
        views: Cache of block views; creating them takes a tenth of the time of a small batch.
    """

    first: tuple[Tensor, Tensor | None]
    activation: Callable[[Tensor], Tensor]
    second: tuple[Tensor, Tensor | None]
    block_size: int
    scaled: bool = False
    views: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        first: nn.Linear,
        activation: Callable[[Tensor], Tensor],
        second: nn.Linear,
        block_size: int,
        scaled: bool = False,
        views: dict[Any, Any] | None = None,
    ) -> "FeedForward":
        """Create a feed-forward from two linear layers."""
        maps = (first.weight, first.bias), (second.weight, second.bias)
        views = {} if views is None else views
        return cls(maps[0], activation, maps[1], block_size, scaled, views)

    def blocks(self) -> Blocks:
        """Return views of the blocks, which follow in-place changes of the weights."""
        parts = [
            t.detach() for t in (self.first[0], self.second[0], self.first[1]) if t is not None
        ]
        key = (self.block_size, *((t.data_ptr(), t.shape, t.stride()) for t in parts))
        if key not in self.views:
            self.views.clear()  # the weights have been replaced
            self.views[key] = Blocks(self.block_size, *parts)
        blocks: Blocks = self.views[key]
        return blocks

    @property
    def tensors(self) -> list[Tensor]:
        """All weights and biases."""
        return [t for t in (*self.first, *self.second) if t is not None]

    def to(self, dtype: torch.dtype) -> "FeedForward":
        """Return a copy cast to another dtype; gradients flow through the cast."""
        first, second = (
            (w.to(dtype), None if b is None else b.to(dtype)) for w, b in (self.first, self.second)
        )
        return FeedForward(first, self.activation, second, self.block_size, self.scaled)
