"""The `dg-lightning` program: LightningCLI with shipped configs and one-line errors."""

from typing import TYPE_CHECKING, Any

from dg_lightning.cli.start import main
from dg_lightning.configs import shipped_configs

if TYPE_CHECKING:
    from dg_lightning.cli.program import GateCLI

__all__ = ["GateCLI", "main", "shipped_configs"]


def __getattr__(name: str) -> Any:
    if name != "GateCLI":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dg_lightning.cli.program import GateCLI  # needs torch

    return GateCLI
