"""Schedules: values as functions of the optimizer step, and the plan of a training run."""

from .phases import JoinedPhases, Phase
from .plan import Curve, collect_plan, find_risks, warn_of_risks
from .schedule import (
    Clock,
    Duration,
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
    "Schedule",
    "Shape",
    "ValueAt",
    "as_schedule",
    "check_duration",
    "collect_plan",
    "find_risks",
    "warn_of_risks",
]
