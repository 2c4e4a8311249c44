"""A small Vision Transformer, as others write one: gates are put into it (`AddGates`)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

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
        if width % heads:
            raise ValueError(f"`heads`={heads} must divide `width`={width}.")
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.randn(height // patch * (wide // patch), width) * 0.02)
        hidden = 4 * width if hidden is None else hidden
        self.blocks = nn.ModuleList(Block(width, heads, hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.output(self.norm(h).mean(1))
        return logits


class Block(nn.Module):
    """Attention and feed-forward, each in a residual branch of its own."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, h: Tensor) -> Tensor:
        h = h + self.dropout(self.attention(self.attention_norm(h)))
        out: Tensor = h + self.dropout(self.feed_forward(self.feed_forward_norm(h)))
        return out


class Attention(nn.Module):
    """Self-attention of a set of tokens; it has as many heads as its projections have room for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    @override
    def forward(self, h: Tensor) -> Tensor:
        batch, tokens, _ = h.shape
        qkv = self.qkv(h).reshape(batch, tokens, 3, -1, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out
