"""Gated layers that read like the equations of section 3 of the paper, and Transformers."""

from .feed_forward import GatedFeedForward, MoEFeedForward
from .gpt import GPT
from .mlp import GatedLinear, GatedMLP
from .switch_moe import SwitchMoE
from .vit import VisionTransformer

__all__ = [
    "GPT",
    "GatedFeedForward",
    "GatedLinear",
    "GatedMLP",
    "MoEFeedForward",
    "SwitchMoE",
    "VisionTransformer",
]
