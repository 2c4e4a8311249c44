"""The HTML report of a study or a run: one file, no network."""

from dg_lightning.report.page import write_report

__all__ = ["write_report"]
