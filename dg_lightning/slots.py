"""Slots: where the callbacks of one Trainer leave word for each other, a set for every gate.

Callbacks do not know each other. Each slot has one writer, so that nobody undoes another's work:
a gate's temperature and threshold are the value of the schedule plus the offset of a rescue, and
the weight of a penalty on it is multiplied by the factor of the phase times the one of a rescue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dg_lightning.protocol import GateLike
from dg_lightning.schedules import ValueAt

__all__ = ["Ahead", "Slots", "set_temperature", "set_temperatures", "set_threshold", "slots_of"]

_LOWEST_TEMPERATURE = 1e-3
_HIGHEST_THRESHOLD = 0.999
_AHEAD = 256  # steps


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


class Ahead:
    """The values of a schedule for the next steps, on a GPU: written from there in one launch.

    Args:
        value_at: The value as a function of the step.
    """

    def __init__(self, value_at: ValueAt) -> None:
        self._value_at = value_at
        self._first = 0
        self._values: tuple[Tensor, ...] = ()

    def at(self, step: int, device: torch.device) -> Tensor:
        """Return the value of a step: 0-d."""
        index = step - self._first
        if not 0 <= index < len(self._values) or self._values[0].device != device:
            values = [self._value_at(s) for s in range(step, step + _AHEAD)]
            self._values = torch.tensor(values, device=device).unbind()
            self._first, index = step, 0
        return self._values[index]


def set_temperatures(
    gates: Sequence[tuple[GateLike, Slots]], value: float, ahead: Ahead, step: int
) -> None:
    """Write the temperature of the schedule to several gates; `ahead` has it on their device."""
    here = [gate.temperature for gate, _ in gates]
    plain = here[0].is_cuda and value >= _LOWEST_TEMPERATURE
    if not plain or any(slots.frozen or slots.temperature_offset for _, slots in gates):
        for gate, slots in gates:
            set_temperature(gate, slots, value)
        return
    torch._foreach_copy_(here, [ahead.at(step, here[0].device)] * len(here))
    for _, slots in gates:
        slots.temperature = value


def set_threshold(gate: GateLike, slots: Slots, value: float) -> None:
    """Write the threshold of the schedule; the gate gets it with the offset of a rescue."""
    if slots.frozen:
        return
    slots.threshold = value
    gate.threshold.fill_(min(max(value + slots.threshold_offset, 0.0), _HIGHEST_THRESHOLD))
