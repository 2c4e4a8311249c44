"""The program `dg-lightning`: LightningCLI with shipped configs and one-line errors."""

from dg_lightning.cli.configs import shipped_configs
from dg_lightning.cli.program import GateCLI, main

__all__ = ["GateCLI", "main", "shipped_configs"]
