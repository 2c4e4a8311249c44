"""What a gate decides when it is deployed, read off its last forward pass in training."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dg_lightning.gates import Gate
from dg_lightning.gates.policies import raised
from dg_lightning.protocol import GateLike
from dg_lightning.recorded import Recorded

__all__ = ["deployed_gate", "floor_of", "logit", "read_off"]

Result = TypeVar("Result")


def deployed_gate(gate: GateLike, shift: float = 0.0) -> Tensor:
    """Return which blocks the last forward pass would have open when deployed: bool.

    Hard, whatever the policy in training, and with the floor. With `shift`, as if so much had been
    added to every ``z / τ``.
    """
    p = gate.probability
    if p is None or gate.gate is None:
        raise RuntimeError(
            f"A gate of {gate.units} units took no part in the last forward pass: let the net use "
            "it, or name the other gates with `layers`."
        )
    p = p.detach()
    if getattr(gate, "k", None) is not None:
        chosen: Tensor | None = getattr(gate, "chosen", None)  # of a router: before any was dropped
        return gate.gate.detach() != 0 if chosen is None else chosen
    is_open = logit(p) + shift > logit(gate.threshold) if shift else p > gate.threshold
    floor = floor_of(gate)
    return raised(is_open, p, floor) if floor else is_open


def logit(p: Tensor) -> Tensor:
    """Return the logit in double precision; of what float32 has rounded to 0 or 1, a large one."""
    return torch.logit(p.double(), eps=1e-7)


def floor_of(gate: GateLike) -> int:
    """Return how many blocks are open at least: the floor, or the k of top-k.

    Where the gate knows it on the host too, without waiting for the device.
    """
    known: int | None = getattr(gate, "_floor", None)
    floor = round(float(gate.min_open)) if known is None else known
    return max(floor, getattr(gate, "k", None) or 0)


def read_off(
    gates: Sequence[GateLike],
    function: Callable[[], Result],
    recorded: Recorded,
    reads: Sequence[Tensor] = (),
) -> Result:
    """Compute a function of what gates leave behind and decide, and of the tensors that it `reads`.

    By a recording, where it is known what it reads of the gates.
    """
    floors, passed = [], []
    for gate in gates:
        if not isinstance(gate, Gate) or gate.k is not None or gate.probability is None:
            return function()
        floors.append(floor_of(gate))
        passed.append(gate.probability)

    def of_passed(*probabilities: Tensor) -> Result:
        try:
            for gate, p in zip(gates, probabilities, strict=True):
                gate.probability = p
            return function()
        finally:
            for gate, p in zip(gates, passed, strict=True):
                gate.probability = p

    settings = [tensor for gate in gates for tensor in (gate.threshold, gate.temperature)]
    return recorded(of_passed, [*settings, *reads], passed, tuple(floors))
