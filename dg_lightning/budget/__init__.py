"""Budgets: usage terms that a loss is penalised with, the controller of λ, and the landing."""

from .budget import GateBudget, Measure, check_budget, gate_budgets, usage_by_budget
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
from .regulator import FrozenGates, Landing, Multiplier, Regulator, Timetable

__all__ = [
    "FrozenGates",
    "GateBudget",
    "Landing",
    "MacsPrices",
    "Measure",
    "Multiplier",
    "Regulator",
    "Timetable",
    "Usage",
    "check_budget",
    "gate_budgets",
    "mean_rate",
    "mean_rates",
    "penalty",
    "scale_gradient",
    "unit_costs_by_connections",
    "usage_by_budget",
    "usage_term",
    "without_a_price",
]
