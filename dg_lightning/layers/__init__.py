"""Gated layers that read like the equations of section 3 of the paper, and Transformers."""

from .feed_forward import GatedFeedForward, MoEFeedForward, SwitchMoE
from .mlp import GatedLinear, GatedMLP
from .transformer import GPT, VisionTransformer

__all__ = [
    "GPT",
    "GatedFeedForward",
    "GatedLinear",
    "GatedMLP",
    "MoEFeedForward",
    "SwitchMoE",
    "VisionTransformer",
]
