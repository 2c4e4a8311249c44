"""DataModules, one a dataset."""

from .digits import DigitsDataModule

__all__ = ["DigitsDataModule"]
