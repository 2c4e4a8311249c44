"""Independent Lightning callbacks, for our module and for anybody's."""

from .gate_penalty import GatePenalty

__all__ = ["GatePenalty"]
