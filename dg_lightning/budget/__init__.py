"""Compute budgets, with usage penalties, control of λ, and landing on the budget."""

from .budget import GateBudget, Measure, check_budget, gate_budgets, usage_by_budget
from .penalty import (
    MacsCost,
    Usage,
    gates_without_macs,
    mean_rate,
    mean_rates,
    penalty,
    scale_gradient,
    unit_costs_by_connections,
    usage_term,
)
from .regulator import (
    FrozenGates,
    Landing,
    Method,
    Multiplier,
    Regulator,
    Timetable,
    balance_loads,
    gate_loads,
)

__all__ = [
    "FrozenGates",
    "GateBudget",
    "Landing",
    "MacsCost",
    "Measure",
    "Method",
    "Multiplier",
    "Regulator",
    "Timetable",
    "Usage",
    "balance_loads",
    "check_budget",
    "gate_budgets",
    "gate_loads",
    "gates_without_macs",
    "mean_rate",
    "mean_rates",
    "penalty",
    "scale_gradient",
    "unit_costs_by_connections",
    "usage_by_budget",
    "usage_term",
]
