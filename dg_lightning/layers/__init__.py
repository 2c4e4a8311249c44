"""Gated layers that read like the equations of section 3 of the paper, and a net to be gated."""

from .mlp import GatedLinear, GatedMLP
from .switch_moe import SwitchMoE
from .vit import VisionTransformer

__all__ = [
    "GatedLinear",
    "GatedMLP",
    "SwitchMoE",
    "VisionTransformer",
]
