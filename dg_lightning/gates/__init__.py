"""Gates turn a logit into a probability, and the probability into a gate.

A gate decides, before a layer's matrix product, which of the layer's units run::

    z = logit            one per unit (static) or GateNet(h) (input-dependent)
    p = sigmoid(z / τ)   the probability that the unit is open, which penalties act on
    g = policy(p)        the factor applied to the unit, always 0 or 1 in evaluation

In the backward pass, a hard gate has the gradient of `p` (straight-through estimator), so
the loss also reaches the logits of closed units.

Reference: Y. I. Choi, "DynamicGate-MLP", 2025, sections 3.1 to 3.5.
"""

from .base import Gate, GateOptions
from .kinds import DynamicGate, GateSettings, StaticGate, make_gate
from .policies import Policy, straight_through, top_k_mask
from .protocol import (
    Feeds,
    GateLike,
    connection_mask,
    detach_graph,
    gate_layers,
    init_recorded_gates,
    set_connections,
    values_by_pattern,
)
from .state import SharedState, set_temperature, set_threshold, shared_state

__all__ = [
    "DynamicGate",
    "Feeds",
    "Gate",
    "GateLike",
    "GateOptions",
    "GateSettings",
    "Policy",
    "SharedState",
    "StaticGate",
    "connection_mask",
    "detach_graph",
    "gate_layers",
    "init_recorded_gates",
    "make_gate",
    "set_connections",
    "set_temperature",
    "set_threshold",
    "shared_state",
    "straight_through",
    "top_k_mask",
    "values_by_pattern",
]
