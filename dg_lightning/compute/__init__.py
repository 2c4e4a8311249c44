"""The compute ledger, which counts executed MACs exactly and derives metrics from them."""

from .macs import (
    LinearMap,
    decision_macs,
    executed_macs,
    expected_macs,
    gate_submodules,
    linear_maps,
    needed_parameters,
    uncounted_modules,
)
from .metric import ComputeLedger, ComputeReport

__all__ = [
    "ComputeLedger",
    "ComputeReport",
    "LinearMap",
    "decision_macs",
    "executed_macs",
    "expected_macs",
    "gate_submodules",
    "linear_maps",
    "needed_parameters",
    "uncounted_modules",
]
