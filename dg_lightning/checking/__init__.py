"""Check a training before it is run: does everything hold in this project?"""

from .check import check
from .findings import Finding, Report

__all__ = ["Finding", "Report", "check"]
