"""Networks that decide which of their own units to run, for PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dg_lightning.budget import penalty
    from dg_lightning.checking.check import check
    from dg_lightning.gates import DynamicGate, StaticGate, gate_layers
    from dg_lightning.layers import GatedFeedForward, GatedLinear, GatedMLP, SwitchMoE
    from dg_lightning.surgery import add_gates, compact, convert, remove_gates
    from dg_lightning.training import (
        CapturedSteps,
        GatedClassifier,
        GatedLM,
        GatedRegressor,
        param_groups,
        trust,
    )

__all__ = [
    "CapturedSteps",
    "DynamicGate",
    "GatedClassifier",
    "GatedFeedForward",
    "GatedLM",
    "GatedLinear",
    "GatedMLP",
    "GatedRegressor",
    "StaticGate",
    "SwitchMoE",
    "__version__",
    "add_gates",
    "check",
    "compact",
    "convert",
    "gate_layers",
    "param_groups",
    "penalty",
    "remove_gates",
    "trust",
]
__version__ = "0.2.0"

# Imported on first use, because importing torch takes seconds and simple commands do not need it.
_EXPORTS = {
    "CapturedSteps": "training",
    "DynamicGate": "gates",
    "GatedClassifier": "training",
    "GatedFeedForward": "layers",
    "GatedLM": "training",
    "GatedLinear": "layers",
    "GatedMLP": "layers",
    "GatedRegressor": "training",
    "StaticGate": "gates",
    "SwitchMoE": "layers",
    "add_gates": "surgery",
    "check": "checking",
    "compact": "surgery",
    "convert": "surgery",
    "gate_layers": "gates",
    "param_groups": "training",
    "penalty": "budget",
    "remove_gates": "surgery",
    "trust": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    return value
