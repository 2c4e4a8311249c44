"""The HTML report: one file that needs no network."""

from dg_lightning.monitoring.report.page import page, run_page, write_page

__all__ = ["page", "run_page", "write_page"]
