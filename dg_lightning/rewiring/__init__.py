"""Sparse connectivity: densities, structures, drop and grow, masks on layers; without Lightning."""

from typing import Any

from .densities import Distribution, check_sparsity, densities, layer_densities
from .drop_and_grow import drop_and_grow, largest_mask
from .drop_schedule import DropSchedule, DropShape
from .gate_correction import OpenRates
from .imports import (
    announce_masks,
    forget_masks,
    import_pruned,
    masks_of_pruned,
    saved_masks,
)
from .initial_masks import (
    Initial,
    check_masks,
    generator_for,
    given_masks,
    initial_mask,
    masks_of,
    sample_masks,
    sparse_layers,
)
from .selection import largest, largest_in_rows
from .sparse_layer import (
    WEIGHT_BY_WEIGHT,
    SparseLayer,
    change_connections,
    parameter_state,
    reset_state,
)
from .structures import Structure
from .zeroing import zero_outside

__all__ = [
    "WEIGHT_BY_WEIGHT",
    "Distribution",
    "DropSchedule",
    "DropShape",
    "Initial",
    "OpenRates",
    "SparseLayer",
    "Structure",
    "announce_masks",
    "change_connections",
    "check_masks",
    "check_sparsity",
    "densities",
    "drop_and_grow",
    "forget_masks",
    "generator_for",
    "given_masks",
    "import_pruned",
    "initial_mask",
    "largest",
    "largest_in_rows",
    "largest_mask",
    "layer_densities",
    "masks_of",
    "masks_of_pruned",
    "parameter_state",
    "reset_state",
    "sample_masks",
    "saved_masks",
    "sparse_layers",
    "zero_outside",
]
