"""A small GPT whose feed-forwards may be gated, or mixtures of experts."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict, override

from dg_lightning.gates import GateSettings
from dg_lightning.layers.feed_forward import GatedFeedForward, MoEFeedForward
from dg_lightning.layers.mlp import Activation
from dg_lightning.layers.transformer import Block, KeyValueCache

__all__ = ["GPT", "ExpertSettings"]


class ExpertSettings(TypedDict, total=False):
    """Settings of experts, as plain values. See `MoEFeedForward` for their meaning."""

    experts: int
    top_k: int
    capacity_factor: float | None
    load_balance: float
    z_loss: float


class GPT(nn.Module):
    """A pre-norm causal Transformer: tokens in, logits of the next token out.

    Args:
        input_shape: Length of the context, as a shape: the command line takes it from the data.
        num_classes: Number of different tokens; the command line takes it from the data.
        width: Width of the residual stream.
        depth: Number of blocks.
        heads: Number of attention heads, which must divide the width.
        hidden: Number of units of a feed-forward; None for four times the width.
        gate: Settings of the gates on the units of every feed-forward; None for none.
        experts: Settings of experts; the feed-forwards are then mixtures of experts.
        activation: Nonlinearity of the feed-forwards.
        glu: Whether their units are products of two maps, see `GatedFeedForward`.
        dropout: Dropout probability of the embeddings and in the residual branches.

    >>> net = GPT([16], 256, width=32, depth=2, heads=2, gate={"kind": "dynamic", "block_size": 16})
    >>> net(torch.zeros(3, 16, dtype=torch.long)).shape
    torch.Size([3, 16, 256])
    """

    def __init__(
        self,
        input_shape: list[int],
        num_classes: int,
        width: int = 384,
        depth: int = 6,
        heads: int = 6,
        hidden: int | None = None,
        gate: GateSettings | None = None,
        experts: ExpertSettings | None = None,
        activation: Activation = "gelu",
        glu: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if experts is not None and (gate is not None or glu):
            raise ValueError("`experts` have a router of their own: leave out `gate` and `glu`.")
        if len(input_shape) != 1:
            raise ValueError(f"`input_shape` must be the length of the context, got {input_shape}.")
        (self.context,) = input_shape
        units = 4 * width if hidden is None else hidden
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(self.context, width)
        self.dropout = nn.Dropout(dropout)

        def feed_forward() -> nn.Module:
            if experts is not None:
                return MoEFeedForward(width, units, activation=activation, **experts)
            return GatedFeedForward(width, units, gate=gate, activation=activation, glu=glu)

        self.blocks = nn.ModuleList(
            Block(width, heads, feed_forward(), dropout, causal=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, num_classes)
        self._initialise(depth)

    @torch.no_grad()
    def _initialise(self, depth: int) -> None:
        """Draw small weights; those that write into the residual stream shrink with its depth."""
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        blocks: Any = self.blocks
        for block in blocks:
            for writer in (block.attention.output, block.feed_forward.second):
                writer.weight.div_(math.sqrt(2 * depth))

    @override
    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the logits of the token after each token ``(batch, tokens)``.

        Args:
            x: The tokens; if there is a cache, those that follow the ones in it.
            cache: Keys and values of the tokens before; those of the new tokens are added.
        """
        before = 0 if not cache else next(iter(cache.values()))[0].shape[2]
        if before + x.shape[1] > self.context:
            raise ValueError(
                f"There are {before + x.shape[1]} tokens for a context of {self.context}: give "
                "fewer, or use `generate`."
            )
        places = torch.arange(before, before + x.shape[1], device=x.device)
        h = self.dropout(self.tokens(x) + self.positions(places))
        for block in self.blocks:
            h = block(h, cache)
        logits: Tensor = self.output(self.norm(h))
        return logits

    def auxiliary_loss(self) -> Tensor | None:
        """Return the mean over the blocks of the losses of experts; None without experts."""
        parts = [b.feed_forward for b in self.blocks if isinstance(b.feed_forward, MoEFeedForward)]
        losses = [part.auxiliary_loss() for part in parts]
        return torch.stack(losses).mean() if losses else None

    @torch.no_grad()
    def generate(
        self,
        x: Tensor,
        length: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return tokens ``(batch, tokens)`` continued by `length` tokens, one drawn after another.

        Where the context is full, the second half of it is read again, as a new beginning.

        Args:
            x: The tokens to continue, at least one each.
            length: How many tokens to add.
            temperature: Of the draws; 0 takes the most probable token.
            generator: Random generator of the draws.
        """
        if x.shape[1] == 0 or temperature < 0:
            raise ValueError(
                "There must be a token to continue, and `temperature` must be at least 0, got "
                f"{x.shape[1]} tokens and {temperature}."
            )
        cache, unread = KeyValueCache(), x[:, -self.context :]
        for _ in range(length):
            seen = next(iter(cache.values()))[0].shape[2] if cache else 0
            if seen + unread.shape[1] > self.context:
                cache, unread = KeyValueCache(), x[:, -max(self.context // 2, 1) :]
            logits = self(unread, cache)[:, -1].float()
            if temperature == 0:
                unread = logits.argmax(-1, keepdim=True)
            else:
                chances = (logits / temperature).softmax(-1)
                unread = torch.multinomial(chances, 1, generator=generator)
            x = torch.cat([x, unread], 1)
        return x
