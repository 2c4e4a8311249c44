"""Gates: a logit becomes a probability, a probability becomes a gate.

A gate decides, before a layer's matrix product, which of the layer's units run::

    z = logit            one per unit (static) or GateNet(h) (input-dependent)
    p = sigmoid(z / τ)   the chance that the unit is open: what a penalty sees
    g = policy(p)        what the unit is multiplied by: 0 or 1 in every evaluation

The backward pass of a hard gate is the one of `p` (straight-through estimator), so that the
gradient of the loss reaches the logit of a closed unit too.

Reference: Y. I. Choi, "DynamicGate-MLP", 2025, sections 3.1 to 3.5.
"""

from dg_lightning.gates.base import Gate, GateOptions
from dg_lightning.gates.dynamic import DynamicGate
from dg_lightning.gates.policies import Policy, straight_through, top_k_mask
from dg_lightning.gates.settings import GateSettings, make_gate
from dg_lightning.gates.static import StaticGate

__all__ = [
    "DynamicGate",
    "Gate",
    "GateOptions",
    "GateSettings",
    "Policy",
    "StaticGate",
    "make_gate",
    "straight_through",
    "top_k_mask",
]
