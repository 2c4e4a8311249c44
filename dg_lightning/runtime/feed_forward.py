"""A feed-forward with gated units, the input of every engine."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ELEMENTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)


def elementwise(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an activation that can be applied block by block, not in place.

    Raises:
        ValueError: If it may mix units, have parameters or draw random numbers.
    """
    if type(activation) not in _ELEMENTWISE:
        raise ValueError(
            "Engines that skip blocks need an elementwise activation of torch.nn without "
            f"parameters and chance, got {activation}: use engine='masked'."
        )
    if getattr(activation, "inplace", False):
        activation = copy(activation)
        vars(activation)["inplace"] = False
    return activation


@dataclass(frozen=True, eq=False)
class FeedForward:
    """Linear maps with gated units between them: ``W₂ (g * act(W₁ x + b₁)) + b₂``.

    With `other`, activated outputs are multiplied by those of another map (SwiGLU).

    Args:
        first: Weight ``(units, inputs)`` and bias of the map whose outputs are gated.
        activation: Elementwise nonlinearity applied to its outputs.
        second: Weight ``(outputs, units)`` and bias of the map that reads them.
        block_size: Number of adjacent units that share a gate.
        other: Weight and bias of the other map that makes units, shaped like the first.
        scaled: Whether open gates may differ from 1.
    """

    first: tuple[Tensor, Tensor | None]
    activation: Callable[[Tensor], Tensor]
    second: tuple[Tensor, Tensor | None]
    block_size: int
    other: tuple[Tensor, Tensor | None] | None = None
    scaled: bool = False

    @classmethod
    def of(
        cls,
        first: nn.Linear,
        activation: Callable[[Tensor], Tensor],
        second: nn.Linear,
        block_size: int,
        other: nn.Linear | None = None,
        scaled: bool = False,
    ) -> "FeedForward":
        """Create a feed-forward from linear layers."""
        maps = (first.weight, first.bias), (second.weight, second.bias)
        third = None if other is None else (other.weight, other.bias)
        return cls(maps[0], activation, maps[1], block_size, third, scaled)

    @property
    def makers(self) -> list[tuple[Tensor, Tensor | None]]:
        """The maps that make units."""
        return [self.first] if self.other is None else [self.first, self.other]

    @property
    def tensors(self) -> list[Tensor]:
        """All weights and biases."""
        maps = (*self.makers, self.second)
        return [tensor for pair in maps for tensor in pair if tensor is not None]

    def to(self, dtype: torch.dtype) -> "FeedForward":
        """Return a copy cast to another dtype; gradients flow through the cast."""
        first, second, *other = (
            (w.to(dtype), None if b is None else b.to(dtype))
            for w, b in (self.first, self.second, *self.makers[1:])
        )
        third = other[0] if other else None
        return FeedForward(first, self.activation, second, self.block_size, third, self.scaled)
