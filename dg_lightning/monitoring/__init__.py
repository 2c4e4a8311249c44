"""Gate monitoring: figures and CSV tables, and logging of both."""

from dg_lightning.monitoring.figures import gate_figure, has_matplotlib, render_rgb
from dg_lightning.monitoring.views import (
    GateTables,
    define_metrics,
    run_folder,
    show_pictures,
    show_table,
    supports_images,
)

__all__ = [
    "GateTables",
    "define_metrics",
    "gate_figure",
    "has_matplotlib",
    "render_rgb",
    "run_folder",
    "show_pictures",
    "show_table",
    "supports_images",
]
