"""Base class of all gates: probability, policy, floor, state."""

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

    A forward pass stores `probability` and `gate`, one entry per block, with their graph; it has no
    other side effect. All arithmetic is in float32 (or wider), even under autocast and in
    half-precision models.

    Args:
        units: Number of gated units.
        block_size: Number of neighbouring units that share one gate.
        policy: How `p` becomes `g` in training. `threshold`: 1 where p > threshold. `top_k`: 1 for
            the k largest. `bernoulli`: sampled with probability p, per input. `soft`: p itself.
            `concrete`: a relaxed sample in (0, 1). `hard_concrete`: a relaxed sample clipped to
            [0, 1]; p is then the probability that it is not 0. Evaluation is always hard.
        k: Number of open gates for `top_k`: a count such as 8, or a share such as "25%".
        temperature: τ, a 0-d buffer, so changing it never triggers a recompilation.
        threshold: θ, a 0-d buffer.
        initial_open_rate: Initial p of every unit.
        min_open: Minimum number of open gates per sample, those with the largest p: a count, or
            a share such as "5%".
        scale: `probability` multiplies open units by their p, as mixture-of-experts routers do. The
            loss then reaches p through open units only, so training can skip closed units. None
            multiplies open units by 1, with a straight-through gradient for all units.
        device: Device of the state.
    """

    input_dependent: bool
    accepts_half = False  # True if `logits` handles half-precision inputs itself
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
                f"`k` must be given for `policy='top_k'` and for no other, got k={k} and "
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
                f"`scale` needs the policy {', '.join(HARD_POLICIES)}, got {policy!r}, which "
                "already scales units in training."
            )
        if k is None and initial_open_rate <= threshold:
            warnings.warn(
                f"`initial_open_rate` {initial_open_rate} is not above `threshold` {threshold}: "
                "gates start closed in evaluation, except for `min_open` of them.",
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
        # 0-d buffers: saved in checkpoints, and changing them never triggers a recompilation.
        for name in ("temperature", "threshold"):
            self.register_buffer(name, torch.empty((), dtype=torch.float32, device=device))
        # A float, because weight averaging would round an integer down.
        self.register_buffer("min_open", torch.zeros((), dtype=torch.float32, device=device))
        self.register_load_state_dict_post_hook(_sync_floor)  # type: ignore[no-untyped-call]

    @abstractmethod
    def logits(self, h: Tensor) -> Tensor:
        """Return z in float32 or wider, with shape ``(blocks,)`` or ``(batch, blocks)``."""

    @abstractmethod
    def decision_macs(self, open_inputs: Tensor | None = None) -> Tensor:
        """Return the MACs per sample of the decision, given its open inputs (None: all)."""

    @abstractmethod
    def shift_bias(self, delta: float) -> None:
        """Add `delta` to the logit of every unit."""

    @abstractmethod
    def scale_logits(self, factor: float) -> None:
        """Multiply the logit of every unit by `factor`."""

    @abstractmethod
    def _revive_blocks(self, blocks: Tensor) -> None:
        """Reset blocks, given by index, to their initial open rate."""

    @torch.no_grad()
    def revive(self, units: Tensor) -> None:
        """Reset units, given by index or as a bool mask, to their initial open rate.

        The whole block of each unit is reset.
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
        """Return the factor of each block, and store p and g."""
        device = h.device.type
        autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if autocast else nullcontext():
            z = self.logits(h if self.accepts_half else _widen(h)) / self.temperature
            p = open_probability(z, self.policy)
            g = self._apply_policy(z, p, samples=h.shape[:-1])
        self.probability, self.gate = p, g
        return self.scaled(g, p)

    def scaled(self, g: Tensor, p: Tensor) -> Tensor:
        """Return the factor applied to units: g, or g * p with `scale`."""
        return g if self.scale is None else g.detach() * p

    def _apply_policy(self, z: Tensor, p: Tensor, samples: torch.Size) -> Tensor:
        # Noisy policies sample once per input, even if all inputs share one p.
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
        """Expand values per block to values per unit."""
        if self.block_size == 1:
            return per_block
        return per_block.unsqueeze(-1).expand(*per_block.shape, self.block_size).flatten(-2)

    def set_min_open(self, min_open: int | float | str) -> None:
        """Set the minimum number of open gates: a count, or a share such as "5%"."""
        self._floor = _count("min_open", min_open, self.blocks, least=0)
        self.min_open.fill_(self._floor)

    def initial_logit(self) -> Tensor:
        """Return the logit of the initial open rate at the current temperature."""
        return self.temperature * logit_for(self.initial_open_rate, self.policy)

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Stay in float32 when the model is cast to half precision, which is too coarse for logits
        # to learn: in bfloat16, a step of 0.001 from a logit of 2 is rounded away.
        def keep_precision(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            narrowed = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device, torch.float32) if narrowed else moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Tensors with a graph can be neither copied nor pickled.
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
    """Resolve a count, or a share of `total` such as "30%"."""
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
    """Return the dtype for a gate's parameters: `dtype`, or float32 if that is wider."""
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
