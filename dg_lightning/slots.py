"""Slots: where the callbacks of one Trainer leave word for each other, a set for every gate.

Callbacks do not know each other. Each slot has one writer, so that nobody undoes another's work:
a gate's temperature and threshold are the value of the schedule plus the offset of a rescue, and
the weight of a penalty on it is multiplied by the factor of the phase times the one of a rescue.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from dg_lightning.protocol import GateLike

__all__ = ["Slots", "set_temperature", "set_threshold", "slots_of"]

_LOWEST_TEMPERATURE = 1e-3
_HIGHEST_THRESHOLD = 0.999


@dataclass
class Slots:
    """What is said of one gate; the comment names the writer."""

    temperature: float | None = None  # TemperatureAnnealing
    threshold: float | None = None  # ThresholdPhases
    keep: float | None = None  # ThresholdPhases: the share of gates to keep open
    phase_factor: float = 1.0  # ThresholdPhases
    pressing: bool | None = None  # GatePenalty, BudgetController: has a penalty begun to act?
    controlled: bool = False  # BudgetController: how much is open is its business
    frozen: bool = False  # BudgetController: the gate has landed, and nothing may change it
    temperature_offset: float = 0.0  # CollapseDetector
    threshold_offset: float = 0.0  # CollapseDetector
    rescue_factor: float = 1.0  # CollapseDetector

    @property
    def factor(self) -> float:
        """What the weight of every penalty on this gate is multiplied by."""
        return self.phase_factor * self.rescue_factor


# By Trainer, so that a later fit with other callbacks starts with empty slots; beside the gates, so
# that nothing of it is copied or pickled with a model.
_SLOTS: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Slots]] = WeakKeyDictionary()


def slots_of(trainer: Any, gate: GateLike) -> Slots:
    """Return the slots of a gate in the training of this Trainer."""
    return _SLOTS.setdefault(trainer, WeakKeyDictionary()).setdefault(gate, Slots())


def set_temperature(gate: GateLike, slots: Slots, value: float) -> None:
    """Write the temperature of the schedule; the gate gets it with the offset of a rescue."""
    if slots.frozen:
        return
    slots.temperature = value
    gate.temperature.fill_(max(value + slots.temperature_offset, _LOWEST_TEMPERATURE))


def set_threshold(gate: GateLike, slots: Slots, value: float) -> None:
    """Write the threshold of the schedule; the gate gets it with the offset of a rescue."""
    if slots.frozen:
        return
    slots.threshold = value
    gate.threshold.fill_(min(max(value + slots.threshold_offset, 0.0), _HIGHEST_THRESHOLD))
