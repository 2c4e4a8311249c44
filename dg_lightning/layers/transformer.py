"""Transformer blocks, a Vision Transformer, and a GPT with gated feed-forwards or experts."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import TypedDict, override

from dg_lightning.gates import GateSettings
from dg_lightning.layers.feed_forward import GatedFeedForward, MoEFeedForward
from dg_lightning.layers.mlp import Activation


class KeyValueCache:
    """Keys and values of earlier tokens for each attention layer, used for generation.

    Args:
        size: Largest number of tokens.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens = 0  # number of earlier tokens
        # Position of the new token in a CUDA graph, which cannot depend on `tokens`.
        self.position: Tensor | None = None
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._positions: Tensor | None = None  # of new tokens, while a GPT reads them
        self._mask: Tensor | None = None  # of keys that each new token attends to; 0 or -inf

    def start(self, tokens: int, device: torch.device) -> Tensor:
        """Begin to read new tokens, and return their positions."""
        self._mask, self._positions = None, self._new_positions(tokens, device)
        return self._positions

    def finish(self, tokens: int) -> None:
        """Count the tokens that all layers have read."""
        self._positions = None
        self.tokens += tokens

    def _new_positions(self, tokens: int, device: torch.device) -> Tensor:
        if self.position is not None:
            return self.position
        return torch.arange(self.tokens, self.tokens + tokens, device=device)

    def extend(
        self, layer: nn.Module, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the keys and values of new tokens.

        Returns:
            The keys and values of all tokens so far, and a mask to add to the scores of the new
            tokens (None if they attend to all).
        """
        batch, heads, tokens, size = key.shape
        if layer not in self._kept:
            shape = batch, heads, self.size, size
            self._kept[layer] = key.new_zeros(shape), value.new_zeros(shape)
        is_shared = self._positions is not None  # not if a block is called by itself
        positions = self._positions if is_shared else self._new_positions(tokens, key.device)
        assert positions is not None
        keys, values = self._kept[layer]
        if len(keys) != batch:
            raise ValueError(
                f"The cache holds {len(keys)} sequences, got {batch}: use a new cache for each "
                "batch."
            )
        if key.requires_grad:  # earlier tokens may need their gradient, too
            keys = keys.index_copy(2, positions, key)
            values = values.index_copy(2, positions, value)
            self._kept[layer] = keys, values
        else:
            keys.index_copy_(2, positions, key)
            values.index_copy_(2, positions, value)
        if self.position is None:
            keys, values = (kept[:, :, : self.tokens + tokens] for kept in (keys, values))
            if tokens == 1:
                return keys, values, None
        if self._mask is None or not is_shared:  # the same in all layers
            places = torch.arange(keys.shape[2], device=key.device)
            mask = key.new_zeros(len(positions), len(places))
            self._mask = mask.masked_fill_(places > positions.unsqueeze(1), -torch.inf)
        return keys, values, self._mask


class Block(nn.Module):
    """Transformer block with attention and a feed-forward, each in a residual branch.

    Args:
        width: Width of the residual stream.
        heads: Number of attention heads, which must divide the width.
        feed_forward: The feed-forward, with `width` inputs and outputs.
        dropout: Dropout probability in the residual branches.
        causal: Whether a token attends only to itself and earlier tokens.
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
    """Self-attention. The width of the query, key and value layer sets the number of heads."""

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
        # Backward concatenates the three parts once, without a copy of each.
        parts = self.qkv(h).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for p in parts)
        is_causal, mask = self.causal, None
        if cache is not None:
            is_causal = False
            key, value, mask = cache.extend(self, key, value)
        mixed = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class VisionTransformer(nn.Module):
    """A pre-norm Vision Transformer for small images, with mean pooling over patches.

    Args:
        input_shape: Channels, height and width of an image.
        num_classes: Number of outputs.
        patch: Height and width of a patch, which must divide the height and width of the image.
        width: Width of the residual stream.
        depth: Number of blocks.
        heads: Number of attention heads, which must divide the width.
        hidden: Number of units in each feed-forward, by default four times the width.
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
            raise ValueError(f"`patch`={patch} must divide the image size {height} x {wide}.")
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


class ExpertSettings(TypedDict, total=False):
    """Plain settings for experts. `MoEFeedForward` explains them."""

    experts: int
    top_k: int
    capacity_factor: float | None
    load_balance: float
    z_loss: float


class GPT(nn.Module):
    """A pre-norm causal Transformer that maps tokens to logits for the next token.

    Args:
        input_shape: Context length, as a list with one number. The command line sets it from the
            data.
        num_classes: Size of the vocabulary. The command line sets it from the data.
        width: Width of the residual stream.
        depth: Number of blocks.
        heads: Number of attention heads, which must divide the width.
        hidden: Number of units in each feed-forward, by default four times the width.
        gate: Gate settings for the units in every feed-forward; None for dense feed-forwards.
        experts: Settings that turn the feed-forwards into mixtures of experts; None for no experts.
        activation: Nonlinearity of the feed-forwards.
        glu: Whether feed-forward units are products of two linear layers, as in `GatedFeedForward`.
        dropout: Dropout probability for the embeddings and in the residual branches.

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
            raise ValueError("`experts` cannot be combined with `gate` or `glu`: leave those out.")
        if len(input_shape) != 1:
            raise ValueError(f"`input_shape` must be [context length], got {input_shape}.")
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
        """Initialise embeddings, and scale down the layers that write to the residual stream."""
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        blocks: Any = self.blocks
        for block in blocks:
            for writer in (block.attention.output, block.feed_forward.fc2):
                writer.weight.div_(math.sqrt(2 * depth))

    @override
    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the logits for the next token after each token in `x`.

        Args:
            x: The tokens ``(batch, tokens)``. With a cache, pass only the new tokens.
            cache: Keys and values of earlier tokens. The new ones are added in place.
        """
        cached = cache or KeyValueCache(self.context)
        before = cached.tokens
        if before + x.shape[1] > (most := min(self.context, cached.size)):
            raise ValueError(
                f"Got {before + x.shape[1]} tokens for a context of {most}: pass fewer, or "
                "use `generate`."
            )
        places = cached.start(x.shape[1], x.device)
        h = self.dropout(self.tokens(x) + self.positions(places))
        for block in self.blocks:
            h = block(h, cache)
        cached.finish(x.shape[1])
        logits: Tensor = self.output(self.norm(h))
        return logits

    def auxiliary_loss(self) -> Tensor | None:
        """Return the auxiliary loss averaged over blocks, or None if there are no experts."""
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
        cuda_graph: bool = False,
    ) -> Tensor:
        """Return `x` continued by `length` sampled tokens.

        When the context is full, generation restarts from its second half.

        Args:
            x: The tokens to continue ``(batch, tokens)``, with at least one per sequence.
            length: Number of tokens to add.
            temperature: Sampling temperature. 0 always picks the most probable token.
            generator: Random generator for sampling.
            cuda_graph: Whether to replay the step for one token as a CUDA graph, on a GPU. Hooks
                on modules run only while it is recorded.
        """
        if x.shape[1] == 0 or temperature < 0:
            raise ValueError(
                "`x` must have at least one token and `temperature` must be at least 0, got "
                f"{x.shape[1]} tokens and {temperature}."
            )
        cache, unread = KeyValueCache(self.context), x[:, -self.context :]
        replay: _CapturedToken | None = None
        for _ in range(length):
            if cache.tokens + unread.shape[1] > self.context:
                cache.tokens, unread = 0, x[:, -max(self.context // 2, 1) :]
            if cuda_graph and x.is_cuda and unread.shape[1] == 1:
                replay = replay or _CapturedToken(self, cache, unread)
                logits = replay(unread)
            else:
                logits = self(unread, cache)[:, -1].float()
            if temperature == 0:
                unread = logits.argmax(-1, keepdim=True)
            else:
                chances = (logits / temperature).softmax(-1)
                unread = torch.multinomial(chances, 1, generator=generator)
            x = torch.cat([x, unread], 1)
        return x


class _CapturedToken:
    """Reads one more token per sequence by replaying a CUDA graph.

    Args:
        net: The model.
        cache: Keys and values of earlier tokens.
        token: A token of each sequence ``(batch, 1)``.
    """

    def __init__(self, net: GPT, cache: KeyValueCache, token: Tensor) -> None:
        for block in net.blocks:
            skip = getattr(block.feed_forward, "skip", None)
            if not getattr(skip, "can_capture", True):
                raise ValueError(
                    "`cuda_graph` needs an engine that never waits for the device, such as 'auto' "
                    "or 'triton': choose it with `skip_closed_blocks`."
                )
        self.cache, self.token = cache, token.clone()
        self.position = torch.tensor([cache.tokens], device=token.device)
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(token.device)
        kind = token.device.type
        mixed = torch.is_autocast_enabled(kind)
        cache.position, tokens = self.position, cache.tokens
        # Weights that autocast has cast would be freed before the graph is replayed.
        with torch.autocast(kind, torch.get_autocast_dtype(kind), mixed, cache_enabled=False):
            stream.wait_stream(torch.cuda.current_stream(token.device))
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles kernels; writes what the first replay writes again
                    net(self.token, cache)
                    cache.tokens = tokens
            with torch.cuda.graph(self.graph, stream=stream):
                self.logits: Tensor = net(self.token, cache)[:, -1].float()
        cache.position, cache.tokens = None, tokens

    def __call__(self, token: Tensor) -> Tensor:
        """Return the logits for the next token."""
        self.token.copy_(token)
        self.position.fill_(self.cache.tokens)
        self.graph.replay()
        self.cache.tokens += 1
        return self.logits
