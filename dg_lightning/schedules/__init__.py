"""Schedules define values at each optimizer step. Together they form a training plan."""

from .plan import (
    Curve,
    Quantity,
    acting,
    collect_plan,
    find_risks,
    find_unused,
    plan_warnings,
    warn_of_risks,
)
from .schedule import (
    Clock,
    Duration,
    JoinedPhases,
    Phase,
    Schedule,
    Shape,
    ValueAt,
    as_schedule,
    check_duration,
)

__all__ = [
    "Clock",
    "Curve",
    "Duration",
    "JoinedPhases",
    "Phase",
    "Quantity",
    "Schedule",
    "Shape",
    "ValueAt",
    "acting",
    "as_schedule",
    "check_duration",
    "collect_plan",
    "find_risks",
    "find_unused",
    "plan_warnings",
    "warn_of_risks",
]
