"""A feed-forward with gated units: what every engine is given."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Block", "Blocks", "FeedForward"]


class Block(NamedTuple):
    """The weights of a block, as views of those of all, and transposed."""

    first: Tensor
    first_t: Tensor
    bias: Tensor | None
    second: Tensor
    second_t: Tensor


class Blocks(dict[int, Block]):
    """The blocks of a net, each made when it is asked for: where few are open, few are."""

    def __init__(
        self, size: int, first: Tensor, second: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.size, self.first, self.second, self.bias = size, first, second, bias

    def __missing__(self, block: int) -> Block:
        units = slice(block * self.size, (block + 1) * self.size)
        one, two = self.first[units], self.second[:, units]
        bias = None if self.bias is None else self.bias[units]
        self[block] = made = Block(one, one.t(), bias, two, two.t())
        return made


@dataclass(frozen=True, eq=False)
class FeedForward:
    """Two linear maps with gated units between them.

    Args:
        first: Weight ``(units, inputs)`` and bias of the map whose outputs are gated.
        activation: What is applied to its outputs, entry by entry.
        second: Weight ``(outputs, units)`` and bias of the map that reads them.
        block_size: How many neighbouring units share a gate.
        kept: Where views of the weights may be kept; to make them anew takes a tenth of the time of
            a small batch.
    """

    first: tuple[Tensor, Tensor | None]
    activation: Callable[[Tensor], Tensor]
    second: tuple[Tensor, Tensor | None]
    block_size: int
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        first: nn.Linear,
        activation: Callable[[Tensor], Tensor],
        second: nn.Linear,
        block_size: int,
        kept: dict[Any, Any] | None = None,
    ) -> "FeedForward":
        """Make one of two layers."""
        maps = (first.weight, first.bias), (second.weight, second.bias)
        return cls(maps[0], activation, maps[1], block_size, {} if kept is None else kept)

    def blocks(self) -> Blocks:
        """Return the blocks.

        They show what the weights are, whatever becomes of them in place.
        """
        parts = [
            t.detach() for t in (self.first[0], self.second[0], self.first[1]) if t is not None
        ]
        key = (self.block_size, *((t.data_ptr(), t.shape, t.stride()) for t in parts))
        if key not in self.kept:
            self.kept.clear()  # of weights that have been replaced
            self.kept[key] = Blocks(self.block_size, *parts)
        blocks: Blocks = self.kept[key]
        return blocks

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
