"""Networks that decide which of their own units to run, for PyTorch Lightning."""

from pathlib import Path

from dg_lightning.gates import DynamicGate, StaticGate
from dg_lightning.layers import GatedLinear, GatedMLP
from dg_lightning.module import GatedClassifier
from dg_lightning.protocol import gate_layers
from dg_lightning.switch_moe import SwitchMoE

__all__ = [
    "DynamicGate",
    "GatedClassifier",
    "GatedLinear",
    "GatedMLP",
    "StaticGate",
    "SwitchMoE",
    "__version__",
    "gate_layers",
]
__version__ = "0.1.0"

# In a checkout callbacks/, datamodules/ and configs/ lie beside this package; a wheel has them
# inside it.
if not (Path(__file__).parent / "callbacks").is_dir():
    __path__.append(str(Path(__file__).parents[1]))
