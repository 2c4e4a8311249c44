"""Independent Lightning callbacks, for our module and for anybody's."""

from .budget_controller import BudgetController
from .collapse_detector import CollapseDetector
from .exact_resume import ExactResume
from .gate_penalty import GatePenalty
from .minimum_activity import MinimumActivity
from .temperature_annealing import TemperatureAnnealing
from .threshold_phases import ThresholdPhases

__all__ = [
    "BudgetController",
    "CollapseDetector",
    "ExactResume",
    "GatePenalty",
    "MinimumActivity",
    "TemperatureAnnealing",
    "ThresholdPhases",
]
