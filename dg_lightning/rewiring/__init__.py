"""Sparse connectivity: densities, structures, drop and grow; without Lightning."""

from .connections import Connections, change_all
from .densities import Distribution, densities
from .finite import all_finite
from .gate_correction import OpenRates
from .gradient_mask import GradientMask
from .imports import (
    announce_masks,
    forget_masks,
    import_pruned,
    masks_of_pruned,
    saved_masks,
)
from .optimizer_slots import WEIGHT_BY_WEIGHT, parameter_slots, reset_slots
from .selection import largest, largest_in_rows
from .sparse_layers import generator_for, initial_mask, sparse_layers
from .structures import Structure
from .update import largest_mask, rewired

__all__ = [
    "WEIGHT_BY_WEIGHT",
    "Connections",
    "Distribution",
    "GradientMask",
    "OpenRates",
    "Structure",
    "all_finite",
    "announce_masks",
    "change_all",
    "densities",
    "forget_masks",
    "generator_for",
    "import_pruned",
    "initial_mask",
    "largest",
    "largest_in_rows",
    "largest_mask",
    "masks_of_pruned",
    "parameter_slots",
    "reset_slots",
    "rewired",
    "saved_masks",
    "sparse_layers",
]
