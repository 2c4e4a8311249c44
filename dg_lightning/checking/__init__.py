"""Check a training run before it starts."""

from .check import check
from .findings import Finding, Report

__all__ = ["Finding", "Report", "check"]
