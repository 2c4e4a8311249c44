"""Schedules: values as functions of the optimizer step, and the plan of a training run."""

from .plan import Curve, collect_plan, find_risks, warn_of_risks
from .schedule import (
    Clock,
    Duration,
    Phase,
    Schedule,
    Shape,
    ValueAt,
    as_schedule,
    check_duration,
    join_phases,
)

__all__ = [
    "Clock",
    "Curve",
    "Duration",
    "Phase",
    "Schedule",
    "Shape",
    "ValueAt",
    "as_schedule",
    "check_duration",
    "collect_plan",
    "find_risks",
    "join_phases",
    "warn_of_risks",
]
