"""Gate collapse: statistics over a training run, diagnosis and rescue."""

from .diagnosis import MODES, GateState, Limits, Mode, Rescue, Verdict, diagnose
from .statistics import GateStatistics, open_shares, unit_rates

__all__ = [
    "MODES",
    "GateState",
    "GateStatistics",
    "Limits",
    "Mode",
    "Rescue",
    "Verdict",
    "diagnose",
    "open_shares",
    "unit_rates",
]
