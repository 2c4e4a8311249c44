"""Budgets: usage terms that a loss is penalised with, the controller of λ, and the landing."""

from .budget import GateBudget, Measure, gate_budgets
from .landing import FrozenGates, Landing
from .multiplier import Multiplier
from .penalty import (
    MacsPrices,
    Usage,
    mean_rate,
    mean_rates,
    penalty,
    scale_gradient,
    unit_costs_by_connections,
    usage_term,
    without_a_price,
)
from .regulator import Regulator

__all__ = [
    "FrozenGates",
    "GateBudget",
    "Landing",
    "MacsPrices",
    "Measure",
    "Multiplier",
    "Regulator",
    "Usage",
    "gate_budgets",
    "mean_rate",
    "mean_rates",
    "penalty",
    "scale_gradient",
    "unit_costs_by_connections",
    "usage_term",
    "without_a_price",
]
