"""Decisions that a gate would make in deployment, from its last forward pass in training."""

import torch
from torch import Tensor

from dg_lightning.gates.policies import top_k_mask
from dg_lightning.gates.protocol import GateLike

__all__ = ["deployed_gate", "floor_of", "logit"]


def deployed_gate(gate: GateLike, shift: float = 0.0) -> Tensor:
    """Return a bool mask of the blocks that the last forward pass would open in deployment.

    Always hard, whatever the training policy, and with the floor applied. `shift` is added to every
    ``z / τ``.
    """
    p = gate.probability
    if p is None or gate.gate is None:
        raise RuntimeError(
            f"A gate of {gate.units} units took no part in the last forward pass: let the net use "
            "it, or name the other gates with `layers`."
        )
    p = p.detach()
    if getattr(gate, "k", None) is not None:
        chosen: Tensor | None = getattr(gate, "chosen", None)  # router: before capacity drops
        return gate.gate.detach() != 0 if chosen is None else chosen
    is_open = logit(p) + shift > logit(gate.threshold) if shift else p > gate.threshold
    floor = floor_of(gate)
    return is_open | top_k_mask(p, floor) if floor else is_open


def logit(p: Tensor) -> Tensor:
    """Return the logit in double precision, finite even where float32 has rounded p to 0 or 1."""
    return torch.logit(p.double(), eps=1e-7)


def floor_of(gate: GateLike) -> int:
    """Return the minimum number of open blocks: the floor, or the k of top-k."""
    return max(round(float(gate.min_open)), getattr(gate, "k", None) or 0)
