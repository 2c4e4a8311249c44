"""Monitoring of gates: pictures, CSV tables, and logging of both."""

from dg_lightning.monitoring.figures import gate_figure, has_matplotlib, pixels
from dg_lightning.monitoring.views import (
    GateTables,
    can_show_pictures,
    define_metrics,
    run_folder,
    show_pictures,
    show_table,
)

__all__ = [
    "GateTables",
    "can_show_pictures",
    "define_metrics",
    "gate_figure",
    "has_matplotlib",
    "pixels",
    "run_folder",
    "show_pictures",
    "show_table",
]
