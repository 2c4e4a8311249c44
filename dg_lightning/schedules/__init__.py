"""Schedules define values at each optimizer step. Together they form a training plan."""

from .schedule import (
    Clock,
    Curve,
    Duration,
    JoinedPhases,
    Phase,
    Schedule,
    Shape,
    ValueAt,
    as_schedule,
    check_duration,
    collect_plan,
    find_risks,
    warn_of_risks,
)

__all__ = [
    "Clock",
    "Curve",
    "Duration",
    "JoinedPhases",
    "Phase",
    "Schedule",
    "Shape",
    "ValueAt",
    "as_schedule",
    "check_duration",
    "collect_plan",
    "find_risks",
    "warn_of_risks",
]
