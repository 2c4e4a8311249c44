"""Base class of all gates, with their probability, policy, floor and state."""

import math
import warnings
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict, override

from dg_lightning.arguments import percent, warn_of_fraction
from dg_lightning.gates.policies import (
    HARD_POLICIES,
    Policy,
    hard_gate,
    logit_for,
    open_probability,
    sample_gate,
    straight_through,
    top_k_mask,
)
from dg_lightning.gates.protocol import Feeds


class GateOptions(TypedDict, total=False):
    """Options common to all gates, as plain values. See `Gate` for their meaning."""

    block_size: int
    policy: Policy
    k: int | float | str | None
    temperature: float
    threshold: float
    initial_open_rate: float
    min_open: int | float | str
    scale: Literal["probability"] | None


class Gate(nn.Module, ABC):
    """Base class of static and input-dependent gates.

    A forward pass stores `probability` and `gate`, with one entry per block and with their graph.
    It has no other side effects. All arithmetic is in float32 or wider, even under autocast and in
    half-precision models.

    Args:
        units: Number of gated units.
        block_size: Number of neighbouring units that share one gate.
        policy: How `p` becomes `g` in training. `threshold` gives 1 if p > threshold. `top_k` gives
            1 for the k largest p. `bernoulli` samples 0 or 1 with probability p for each input.
            `soft` uses p. `concrete` draws a relaxed sample in (0, 1). `hard_concrete` clips a
            relaxed sample to [0, 1], and p is the probability that it is not 0. In evaluation,
            gates are always hard.
        k: Number of open gates for `top_k`, as a count such as 8 or a share such as "25%".
        temperature: The initial τ. It is stored in a 0-d buffer, so changing it never triggers a
            recompilation.
        threshold: The initial θ, also stored in a 0-d buffer.
        initial_open_rate: Initial p of every unit.
        min_open: Minimum number of open gates per sample, as a count or a share such as "5%". The
            gates with the largest p stay open.
        scale: `probability` multiplies open units by their p, as mixture-of-experts routers do. The
            loss then reaches p only through open units, so training can skip closed units. None
            multiplies open units by 1, with a straight-through gradient for all units.
        device: Device of the buffers.
    """

    input_dependent: bool
    accepts_half = False  # True if `logits` handles half-precision inputs itself
    initial_spread = 0.0  # standard deviation of the initial logits
    temperature: Tensor
    threshold: Tensor
    min_open: Tensor

    def __init__(
        self,
        units: int,
        *,
        block_size: int = 1,
        policy: Policy = "threshold",
        k: int | float | str | None = None,
        temperature: float = 1.0,
        threshold: float = 0.5,
        initial_open_rate: float = 0.8,
        min_open: int | float | str = 0,
        scale: Literal["probability"] | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if block_size < 1 or units < 1 or units % block_size:
            raise ValueError(f"`block_size` must divide `units`={units}, got {block_size}.")
        if policy not in get_args(Policy):
            raise ValueError(f"`policy` must be one of {get_args(Policy)}, got {policy!r}.")
        if (k is None) == (policy == "top_k"):
            raise ValueError(
                f"`k` must be set for `policy='top_k'` and for no other policy, got k={k} and "
                f"policy={policy!r}."
            )
        if not temperature > 0:
            raise ValueError(f"`temperature` must be above 0, got {temperature}.")
        if not 0 <= threshold < 1:
            raise ValueError(f"`threshold` must be in [0, 1), got {threshold}.")
        if not 0 < initial_open_rate < 1:
            raise ValueError(f"`initial_open_rate` must be in (0, 1), got {initial_open_rate}.")
        if scale not in ("probability", None):
            raise ValueError(f"`scale` must be 'probability' or None, got {scale!r}.")
        if scale is not None and policy not in HARD_POLICIES:
            raise ValueError(
                f"`scale` needs one of the policies {', '.join(HARD_POLICIES)}, got {policy!r}, "
                "which already scales units during training."
            )
        if k is None and initial_open_rate <= threshold and not self.initial_spread:
            warnings.warn(
                f"`initial_open_rate` {initial_open_rate} is not above `threshold` {threshold}, so "
                "in evaluation only `min_open` gates are open before training.",
                stacklevel=3,
            )
        self.units = units
        self.block_size = block_size
        self.blocks = units // block_size
        self.policy = policy
        self.k = None if k is None else _count("k", k, self.blocks, least=1)
        self.initial_open_rate = initial_open_rate
        self.scale = scale
        self.feeds = Feeds()
        self.probability: Tensor | None = None
        self.gate: Tensor | None = None
        self._initial = temperature, threshold, min_open
        # As 0-d buffers, they are in checkpoints, and changing them triggers no recompilation.
        for name in ("temperature", "threshold"):
            self.register_buffer(name, torch.empty((), dtype=torch.float32, device=device))
        # A float, because weight averaging would round an integer down.
        self.register_buffer("min_open", torch.zeros((), dtype=torch.float32, device=device))
        self.register_load_state_dict_post_hook(_sync_floor)  # type: ignore[no-untyped-call]

    @abstractmethod
    def logits(self, h: Tensor) -> Tensor:
        """Return the logits z in float32 or wider: ``(blocks,)`` or ``(batch, blocks)``."""

    @abstractmethod
    def decision_macs(self, open_inputs: Tensor | None = None) -> Tensor:
        """Return the MACs of one decision, given the number of open inputs (None for all)."""

    @abstractmethod
    def shift_bias(self, delta: float | Tensor) -> None:
        """Add a number to all logits, or the entries of a tensor to those of the blocks."""

    @abstractmethod
    def scale_logits(self, factor: float) -> None:
        """Multiply the logit of every unit by `factor`."""

    @abstractmethod
    def _revive_blocks(self, blocks: Tensor) -> None:
        """Reset the blocks with these indices to their initial open rate."""

    @torch.no_grad()
    def revive(self, units: Tensor) -> None:
        """Reset units to their initial open rate, together with the rest of their blocks.

        `units` contains indices or is a bool mask.
        """
        indices = units.nonzero().flatten() if units.dtype == torch.bool else units
        self._revive_blocks(torch.unique(indices // self.block_size))

    def reset_parameters(self) -> None:
        """Reset all parameters, temperature, threshold and floor to their initial values."""
        temperature, threshold, min_open = self._initial
        self.temperature.fill_(temperature)
        self.threshold.fill_(threshold)
        self.set_min_open(min_open)

    @override
    def forward(self, h: Tensor, units: Tensor | None = None) -> Tensor:
        """Return the gate, or the gated `units`.

        Passing `units` saves memory, because the gate is never expanded to one entry per unit.
        """
        g = self.decide(h)
        if units is None:
            return self.expand_blocks(g)
        by_block = units.unflatten(-1, (self.blocks, self.block_size))
        closed: Tensor = (by_block * g.to(units.dtype).unsqueeze(-1)).flatten(-2)
        return closed

    def decide(self, h: Tensor) -> Tensor:
        """Return the factor for each block, and store p and g."""
        device = h.device.type
        autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if autocast else nullcontext():
            z = self.logits(h if self.accepts_half else _widen(h)) / self.temperature
            p = open_probability(z, self.policy)
            g = self._apply_policy(z, p, samples=h.shape[:-1])
        self.probability, self.gate = p, g
        return self.scaled(g, p)

    def scaled(self, g: Tensor, p: Tensor) -> Tensor:
        """Return the factor applied to units, which is g, or g * p with `scale`."""
        return g if self.scale is None else g.detach() * p

    def _apply_policy(self, z: Tensor, p: Tensor, samples: torch.Size) -> Tensor:
        # Noisy policies draw a sample for each input, even if all inputs share the same p.
        if not self.training or self.policy in ("threshold", "top_k"):
            return hard_gate(p, self.threshold, self.k, self._floor)
        if self.policy == "soft":
            return p
        g = sample_gate(z, p.expand(*samples, -1), self.policy)
        if not self._floor:
            return g
        forced = top_k_mask(p, self._floor) & (g == 0)
        return torch.where(forced, straight_through(torch.ones_like(g), p), g)

    def expand_blocks(self, per_block: Tensor) -> Tensor:
        """Expand one value per block to one value per unit."""
        if self.block_size == 1:
            return per_block
        return per_block.unsqueeze(-1).expand(*per_block.shape, self.block_size).flatten(-2)

    def set_min_open(self, min_open: int | float | str) -> None:
        """Set the minimum number of open gates, as a count or a share such as "5%"."""
        self._floor = _count("min_open", min_open, self.blocks, least=0)
        self.min_open.fill_(self._floor)

    @property
    def most_open(self) -> int | None:
        """Largest number of gates that a sample can open; None if it can open all of them."""
        return None if self.k is None else max(self.k, self._floor)

    def initial_logit(self) -> Tensor:
        """Return the logit of the initial open rate at the current temperature."""
        return self.temperature * logit_for(self.initial_open_rate, self.policy)

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Stay in float32 when the model is cast to half precision, in which logits cannot learn.
        # In bfloat16, for example, adding 0.001 to a logit of 2 has no effect.
        def keep_precision(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            narrowed = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device, torch.float32) if narrowed else moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Tensors with a graph cannot be copied or pickled.
        return {**self.__dict__, "probability": None, "gate": None}

    @override
    def extra_repr(self) -> str:
        text = f"units={self.units}, policy={self.policy}"
        text += "" if self.k is None else f", k={self.k}"
        text += "" if self.block_size == 1 else f", block_size={self.block_size}"
        text += "" if self.scale is None else f", scale={self.scale}"
        return text if not self._floor else f"{text}, min_open={self._floor}"


def check_count(name: str, value: int | float | str) -> None:
    """Raise a ValueError if `value` is neither a count nor a share."""
    share = percent(value) if isinstance(value, str) else value
    limit = math.inf if isinstance(value, int) else 1
    if isinstance(value, bool) or share is None or not 0 <= share <= limit:
        raise ValueError(
            f"`{name}` must be a number of gates or a share such as '30%', got {value!r}."
        )


def _count(name: str, value: int | float | str, total: int, least: int) -> int:
    """Return a count, converting a share of `total` such as "30%"."""
    check_count(name, value)
    if isinstance(value, float):
        warn_of_fraction(name, value)
    if isinstance(value, str | float):
        share = percent(value) if isinstance(value, str) else value
        assert share is not None
        value = math.ceil(round(share * total, 9))
    if not least <= value <= total:
        raise ValueError(f"`{name}` must be from {least} to {total} gates, got {value}.")
    return value


def _sync_floor(gate: Gate, incompatible_keys: Any) -> None:
    gate._floor = round(float(gate.min_open))


def _widen(h: Tensor) -> Tensor:
    return h.to(torch.promote_types(h.dtype, torch.float32))


def at_least_float32(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype for gate parameters, which is `dtype` or float32 if that is wider."""
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
