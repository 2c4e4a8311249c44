"""Views of gates: pictures, tables as files, and what each kind of logger can show of them."""

from dg_lightning.dashboards.figures import gate_figure, has_matplotlib, pixels
from dg_lightning.dashboards.sinks import (
    can_show_pictures,
    define_metrics,
    run_folder,
    show_pictures,
    show_table,
)
from dg_lightning.dashboards.tables import GateTables

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
