"""What every gate does: probability, policy, floor, state."""

import math
import warnings
from abc import ABC, abstractmethod
from typing import Any, Self, TypedDict, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.gates.decision import decided
from dg_lightning.gates.policies import (
    Policy,
    logit_for,
    open_probability,
    sampled,
    straight_through,
    top_k_mask,
)
from dg_lightning.protocol import Feeds

__all__ = ["Gate", "GateOptions", "at_least_float32"]


class GateOptions(TypedDict, total=False):
    """What every gate can be told, as plain values; `Gate` says what they mean."""

    block_size: int
    policy: Policy
    k: int | float | None
    temperature: float
    threshold: float
    initial_open_rate: float
    min_open: int | float


class Gate(nn.Module, ABC):
    """What static and input-dependent gates share: probability, policy, floor, state.

    A forward pass leaves its probabilities and gates in `probability` and `gate`, one entry per
    block, with their graph; it has no other side effect. Where both are made at once, the gradient
    of a loss by p is to be found at `gate`, which hands it on (straight through). All arithmetic is
    in float32 (or wider), under autocast and in a half-precision model too.

    Args:
        units: How many units the gate opens and closes.
        block_size: How many neighbouring units share one gate.
        policy: How `p` becomes `g` in training. `threshold`: 1 where p > threshold. `top_k`: 1 for
            the k largest. `bernoulli`: a draw with chance p, per sample. `soft`: p itself.
            `concrete`: a relaxed draw in (0, 1). `hard_concrete`: a relaxed draw clipped to [0, 1];
            p is then the chance that it is not 0. Evaluation is always hard.
        k: Open gates of `top_k`, an int as a count, a float as a fraction.
        temperature: τ, a 0-d buffer, so that a change never recompiles a compiled model.
        threshold: θ, a 0-d buffer, one for each gate.
        initial_open_rate: The p that every unit starts with.
        min_open: Floor on open gates, an int as a count, a float as a fraction. Every sample has at
            least that many: the ones with the largest p.
        device: Where the state is made.
    """

    input_dependent: bool
    reads_half = False  # whether `logits` takes inputs in half precision, and widens them itself
    temperature: Tensor
    threshold: Tensor
    min_open: Tensor

    def __init__(
        self,
        units: int,
        *,
        block_size: int = 1,
        policy: Policy = "threshold",
        k: int | float | None = None,
        temperature: float = 1.0,
        threshold: float = 0.5,
        initial_open_rate: float = 0.8,
        min_open: int | float = 0,
        device: Any = None,
    ) -> None:
        super().__init__()
        if block_size < 1 or units < 1 or units % block_size:
            raise ValueError(f"`block_size` must divide `units`={units}, got {block_size}.")
        if policy not in get_args(Policy):
            raise ValueError(f"`policy` must be one of {get_args(Policy)}, got {policy!r}.")
        if (k is None) == (policy == "top_k"):
            raise ValueError(f"`k` goes with `policy='top_k'`, got k={k} and policy={policy!r}.")
        if not temperature > 0:
            raise ValueError(f"`temperature` must be above 0, got {temperature}.")
        if not 0 <= threshold < 1:
            raise ValueError(f"`threshold` must be in [0, 1), got {threshold}.")
        if not 0 < initial_open_rate < 1:
            raise ValueError(f"`initial_open_rate` must be in (0, 1), got {initial_open_rate}.")
        if k is None and initial_open_rate <= threshold:
            warnings.warn(
                f"initial_open_rate {initial_open_rate} is not above threshold {threshold}: "
                "gates that no floor opens start closed when evaluated.",
                stacklevel=3,
            )
        self.units = units
        self.block_size = block_size
        self.blocks = units // block_size
        self.policy = policy
        self.k = None if k is None else _count("k", k, self.blocks, least=1)
        self.initial_open_rate = initial_open_rate
        self.feeds = Feeds()
        self.probability: Tensor | None = None
        self.gate: Tensor | None = None
        self._given = {"temperature": temperature, "threshold": threshold, "min_open": min_open}
        # 0-d buffers: they travel in the checkpoint, and a change never recompiles a model.
        for name in ("temperature", "threshold"):
            self.register_buffer(name, torch.empty((), dtype=torch.float32, device=device))
        # The floor too is a float: an average of weights would round a whole number down.
        self.register_buffer("min_open", torch.zeros((), dtype=torch.float32, device=device))

    @abstractmethod
    def logits(self, h: Tensor) -> Tensor:
        """Return z, float32 or wider, an entry per block: ``(blocks,)`` or ``(batch, blocks)``."""

    @abstractmethod
    def decision_macs(self, open_inputs: Tensor | None = None) -> Tensor:
        """Return the MACs of the decision for a sample with so many inputs open; None is all."""

    @abstractmethod
    def shift_bias(self, delta: float) -> None:
        """Add `delta` to the logit of every unit."""

    @abstractmethod
    def scale_logits(self, factor: float) -> None:
        """Multiply the logit of every unit, for every input."""

    @abstractmethod
    def _revive_blocks(self, blocks: Tensor) -> None:
        """Bring blocks, given by index, back to their initial open rate."""

    @torch.no_grad()
    def revive(self, units: Tensor) -> None:
        """Bring units, given by index or as a bool mask, back to their initial open rate.

        With blocks, the whole block of each unit.
        """
        indices = units.nonzero().flatten() if units.dtype == torch.bool else units
        self._revive_blocks(torch.unique(indices // self.block_size))

    def reset_parameters(self) -> None:
        """Start anew: temperature, threshold and floor as they were given, every unit open."""
        self.temperature.fill_(self._given["temperature"])
        self.threshold.fill_(self._given["threshold"])
        self.set_min_open(self._given["min_open"])

    @override
    def forward(self, h: Tensor) -> Tensor:
        return self.per_unit(self.decide(h))

    def decide(self, h: Tensor) -> Tensor:
        """Return g, one entry per block; leave it and its p behind."""
        if torch.is_autocast_enabled(h.device.type):  # it takes long to say that it is off
            with torch.autocast(h.device.type, enabled=False):
                p, g = self._decided(h)
        else:
            p, g = self._decided(h)
        if torch.compiler.is_compiling() or not {"probability", "gate"} <= vars(self).keys():
            self.probability, self.gate = p, g
        else:  # a module takes long to set an attribute
            vars(self).update(probability=p, gate=g)
        return g

    def _decided(self, h: Tensor) -> tuple[Tensor, Tensor]:
        z, temperature = self.logits(h if self.reads_half else _widened(h)), self.temperature
        if not self.training or self.policy in ("threshold", "top_k"):
            return decided(z, temperature, self.threshold, self.policy, self.k, self._floor)
        z = z / temperature
        p = open_probability(z, self.policy)
        return p, p if self.policy == "soft" else self._drawn(z, p, samples=h.shape[:-1])

    def _drawn(self, z: Tensor, p: Tensor, samples: torch.Size) -> Tensor:
        """Return one draw per sample, also where all samples share one probability."""
        g = sampled(z, p.expand(*samples, -1), self.policy)
        if not self._floor:
            return g
        forced = top_k_mask(p, self._floor) & (g == 0)
        return torch.where(forced, straight_through(torch.ones_like(g), p), g)

    def per_unit(self, per_block: Tensor) -> Tensor:
        """Repeat a value per block for each of the block's units."""
        if self.block_size == 1:
            return per_block
        return per_block.unsqueeze(-1).expand(*per_block.shape, self.block_size).flatten(-2)

    def set_min_open(self, min_open: int | float) -> None:
        """Set the floor on open gates, an int as a count, a float as a fraction."""
        self._floor = _count("min_open", min_open, self.blocks, least=0)
        self.min_open.fill_(self._floor)

    def initial_logit(self) -> Tensor:
        """Return the z whose probability is the initial open rate at the temperature of now."""
        return self.temperature * logit_for(self.initial_open_rate, self.policy)

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # `.half()` and `.bfloat16()` of a model would leave logits too coarse to learn: a step of
        # 0.001 at a logit of 2 is lost in bfloat16. Move with the model, but stay in float32.
        def keep_precision(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            narrowed = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device, torch.float32) if narrowed else moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self

    @override
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._floor = round(float(self.min_open))

    def __getstate__(self) -> dict[str, Any]:
        # What the last forward pass left has a graph, which can be neither copied nor pickled.
        return {**self.__dict__, "probability": None, "gate": None}

    @override
    def extra_repr(self) -> str:
        text = f"units={self.units}, policy={self.policy}"
        text += "" if self.k is None else f", k={self.k}"
        text += "" if self.block_size == 1 else f", block_size={self.block_size}"
        return text if not self._floor else f"{text}, min_open={self._floor}"


def _count(name: str, value: int | float, total: int, least: int) -> int:
    """Resolve a count, or a fraction written as a float, against `total`."""
    if isinstance(value, float):
        if not 0 <= value <= 1:
            raise ValueError(f"`{name}` as a fraction must be in [0, 1], got {value}.")
        value = math.ceil(round(value * total, 9))
    if not least <= value <= total:
        raise ValueError(f"`{name}` must be from {least} to {total} gates, got {value}.")
    return value


def _widened(h: Tensor) -> Tensor:
    return h.to(torch.promote_types(h.dtype, torch.float32))


def at_least_float32(dtype: torch.dtype | None) -> torch.dtype:
    """Return the type of a gate's parameters: the wanted one, never narrower than float32."""
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
