"""Per-gate state shared by the callbacks of one Trainer.

Callbacks do not know about each other. Each field has one writer, so no callback overwrites a value
that another one has set. A gate's temperature and threshold are the scheduled value plus the
rescue offset. Its penalty weight is multiplied by the phase factor and the rescue factor.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from dg_lightning.gates.protocol import GateLike

_LOWEST_TEMPERATURE = 1e-3
_HIGHEST_THRESHOLD = 0.999


@dataclass
class SharedState:
    """State of one gate that callbacks share. A comment names the writer of each field."""

    temperature: float | None = None  # TemperatureAnnealing
    threshold: float | None = None  # ThresholdPhases
    keep: float | None = None  # ThresholdPhases, fraction of gates to keep open
    phase_factor: float = 1.0  # ThresholdPhases
    penalty_begun: bool | None = None  # the callback that penalises this gate, if any
    controlled: bool = False  # BudgetController, if it sets the open rate
    frozen: bool = False  # BudgetController, if nothing else may change this gate
    temperature_offset: float = 0.0  # CollapseDetector
    threshold_offset: float = 0.0  # CollapseDetector
    rescue_factor: float = 1.0  # CollapseDetector

    @property
    def factor(self) -> float:
        """The multiplier for the weight of every penalty on this gate."""
        return self.phase_factor * self.rescue_factor


# Keyed by Trainer, so that a new Trainer starts fresh. Stored outside the gates, so that copying or
# pickling a model does not include this state.
_STATES: WeakKeyDictionary[Any, WeakKeyDictionary[Any, SharedState]] = WeakKeyDictionary()


def shared_state(trainer: Any, gate: GateLike) -> SharedState:
    """Return the state of a gate that the callbacks of this Trainer share."""
    return _STATES.setdefault(trainer, WeakKeyDictionary()).setdefault(gate, SharedState())


def set_temperature(gate: GateLike, shared: SharedState, value: float) -> None:
    """Set the scheduled temperature, to which the rescue offset is added."""
    if shared.frozen:
        return
    shared.temperature = value
    gate.temperature.fill_(max(value + shared.temperature_offset, _LOWEST_TEMPERATURE))


def set_threshold(gate: GateLike, shared: SharedState, value: float) -> None:
    """Set the scheduled threshold, to which the rescue offset is added."""
    if shared.frozen:
        return
    shared.threshold = value
    gate.threshold.fill_(min(max(value + shared.threshold_offset, 0.0), _HIGHEST_THRESHOLD))
