"""Gated layers: plain modules that read like the equations of section 3 of the paper."""

from .mlp import GatedLinear, GatedMLP
from .switch_moe import SwitchMoE

__all__ = [
    "GatedLinear",
    "GatedMLP",
    "SwitchMoE",
]
