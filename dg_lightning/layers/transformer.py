"""The blocks of a Transformer, as others write them: gates can be put into them (`add_gates`)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

__all__ = ["Attention", "Block", "KeyValueCache"]


class KeyValueCache(dict[nn.Module, tuple[Tensor, Tensor]]):
    """Keys and values of the tokens so far, by layer, for generating one token at a time."""

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new tokens, and return those of all."""
        if layer in self:
            before = self[layer]
            key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
        self[layer] = key, value
        return key, value


class Block(nn.Module):
    """Attention and feed-forward, each in a residual branch of its own.

    Args:
        width: Width of the residual stream.
        heads: Number of attention heads, which must divide the width.
        feed_forward: The feed-forward, from the width to the width.
        dropout: Dropout probability in the residual branches.
        causal: Whether a token sees earlier ones only.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        feed_forward: nn.Module,
        dropout: float = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, h: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        h = h + self.dropout(self.attention(self.attention_norm(h), cache))
        out: Tensor = h + self.dropout(self.feed_forward(self.feed_forward_norm(h)))
        return out


class Attention(nn.Module):
    """Self-attention; it has as many heads as its projections have room for."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"`heads`={heads} must divide `width`={width}.")
        self.head_size = width // heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    @override
    def forward(self, h: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        batch, tokens, _ = h.shape
        qkv = self.qkv(h)
        heads = qkv.shape[-1] // (3 * self.head_size)
        qkv = qkv.reshape(batch, tokens, 3, heads, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = cache.extend(self, key, value)
        # A single token comes after all others, and sees them all.
        is_causal, mask = self.causal and tokens > 1, None
        if is_causal and (before := key.shape[2] - tokens):
            mask = h.new_ones(tokens, before + tokens, dtype=torch.bool).tril(before)
            is_causal = False
        mixed = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out
