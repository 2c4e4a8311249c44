"""Gated layers, mixtures of experts, and Transformers that use them."""

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
