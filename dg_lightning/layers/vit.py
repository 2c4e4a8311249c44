"""A small Vision Transformer, as others write one: gates are put into it (`AddGates`)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.layers.transformer import Block

__all__ = ["VisionTransformer"]


class VisionTransformer(nn.Module):
    """A pre-norm Vision Transformer for small images, averaged over patches.

    Args:
        input_shape: Channels, height and width of an image.
        num_classes: Number of outputs.
        patch: Height and width of a patch, which must divide those of the image.
        width: Width of the residual stream.
        depth: Number of blocks.
        heads: Number of attention heads, which must divide the width.
        hidden: Number of units of a feed-forward; None for four times the width.
        dropout: Dropout probability in the residual branches.

    >>> net = VisionTransformer([3, 32, 32], 10, width=48, depth=2, heads=3)
    >>> net(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        patch: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 6,
        hidden: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        channels, height, wide = input_shape
        if height % patch or wide % patch:
            raise ValueError(f"`patch`={patch} must divide images of {height} x {wide}.")
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.randn(height // patch * (wide // patch), width) * 0.02)
        hidden = 4 * width if hidden is None else hidden
        self.blocks = nn.ModuleList(
            Block(width, heads, feed_forward(width, hidden), dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.output(self.norm(h).mean(1))
        return logits


def feed_forward(width: int, hidden: int) -> nn.Module:
    """Return a plain feed-forward."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
