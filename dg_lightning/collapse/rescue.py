"""Reversible rescue of collapsed gates, through state that no other callback writes."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from dg_lightning.collapse.diagnosis import GateState, Mode, Verdict
from dg_lightning.gates.protocol import GateLike, preserve_probability
from dg_lightning.gates.state import set_temperature, set_threshold, shared_state

__all__ = ["Rescue"]

_HEALTHY_CHECKS = 10  # consecutive, before a rescue is eased
_MARGIN = 0.1  # between p and θ after a rescue
_HIGHEST = 0.85  # maximum θ of a rescued gate
_SINKING = 0.1  # open rate below which a rescued gate is about to collapse again
_RECOVERED = 0.25  # open rate above which a rescue is eased


@dataclass
class Rescue:
    """The rescue of one gate.

    It is eased after every ten healthy checks, but no longer once the gate has collapsed again.

    Args:
        weight_factor: Multiplier of the weight of penalties on the gate.
        threshold_offset: Offset added to θ.
        temperature_offset: Offset added to τ.
        healthy: Healthy checks since the last change.
        relapses: Number of collapses after easing.
        eased: Whether the rescue has been eased since the last collapse.
    """

    weight_factor: float = 1.0
    threshold_offset: float = 0.0
    temperature_offset: float = 0.0
    healthy: int = 0
    relapses: int = 0
    eased: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the rescue as plain values."""
        return asdict(self)

    @property
    def active(self) -> bool:
        """True if any rescue is active."""
        return self.weight_factor != 1 or bool(self.threshold_offset or self.temperature_offset)

    def act(
        self,
        trainer: Any,
        gate: GateLike,
        now: GateState,
        verdict: Verdict | None,
        dead: Tensor,
    ) -> str | None:
        """Apply the remedy for a verdict or ease the rescue; return what was done, if anything."""
        sinking = verdict is None and self.weight_factor < 1 and now.g < _SINKING
        if verdict is None and not sinking:
            return self._ease(trainer, gate, now)
        self.healthy = 0
        self.relapses += self.eased
        self.eased = False
        mode: Mode = "closed_by_penalty" if verdict is None else verdict.mode
        action = self._apply_remedy(gate, now, mode, dead)
        self.weight_factor = min(max(self.weight_factor, 1e-3), 1e3)
        if action is None:
            return None
        self._apply_settings(trainer, gate, now)
        return f"{'sinking again' if sinking else mode}, answered by {action}"

    def _apply_remedy(self, gate: GateLike, now: GateState, mode: Mode, dead: Tensor) -> str | None:
        if mode in ("closed_by_threshold", "phase_shock") and now.p > 2 * _MARGIN:
            lowered = min(now.threshold, now.p) - _MARGIN
            self.threshold_offset += lowered - now.threshold
            self.weight_factor /= 2
            return f"lowering θ to {lowered:.3g} and halving λ"
        if mode in ("closed_by_threshold", "closed_by_penalty", "phase_shock"):
            threshold = min(now.threshold, _HIGHEST)  # a higher θ leaves no room for p
            self.threshold_offset += threshold - now.threshold
            target = threshold + _MARGIN
            warm = max(now.temperature, 1.0) if now.temperature < 0.5 else now.temperature
            self.temperature_offset += warm - now.temperature
            lift = warm * _logit(target) - now.temperature * _logit(min(max(now.p, 1e-6), target))
            gate.shift_bias(lift)
            self.weight_factor /= 10
            warming = f", and raising τ to {warm:.3g}" if warm != now.temperature else ""
            return f"lifting the bias by {lift:.3g} and dividing λ by 10{warming}"
        if mode in ("all_open", "always_on_units"):
            self.weight_factor *= 2
            return "doubling λ"
        if mode == "flapping":
            self.temperature_offset += now.temperature / 2
            preserve_probability(gate, 1.5, now.p)
            return f"raising τ to {1.5 * now.temperature:.3g}"
        if mode == "dead_units":
            gate.revive(dead)
            return f"reviving {int(dead.sum())} units"
        return None

    def _ease(self, trainer: Any, gate: GateLike, now: GateState) -> str | None:
        self.healthy += 1
        recovered = now.g >= _RECOVERED or self.weight_factor >= 1
        ready = self.healthy >= _HEALTHY_CHECKS and recovered
        if not self.active or self.relapses or not ready:
            return None
        self.healthy = 0
        self.eased = True
        self.weight_factor **= 0.75
        self.threshold_offset /= 2
        self.temperature_offset /= 2
        offsets = max(abs(self.threshold_offset), abs(self.temperature_offset))
        if abs(self.weight_factor - 1) < 0.05 and offsets < 0.02:
            self.weight_factor, self.threshold_offset, self.temperature_offset = 1.0, 0.0, 0.0
        self._apply_settings(trainer, gate, now)
        return "healthy again, some of the rescue taken back"

    def restore(self, trainer: Any, gate: GateLike) -> None:
        """Restore the rescue in the shared state, after loading a checkpoint."""
        shared = shared_state(trainer, gate)
        shared.rescue_factor = self.weight_factor
        shared.threshold_offset = self.threshold_offset
        shared.temperature_offset = self.temperature_offset

    def _apply_settings(self, trainer: Any, gate: GateLike, now: GateState) -> None:
        shared = shared_state(trainer, gate)
        # Without a schedule, the base values are the gate's own.
        if shared.threshold is None:
            shared.threshold = now.threshold - shared.threshold_offset
        if shared.temperature is None:
            shared.temperature = now.temperature - shared.temperature_offset
        self.restore(trainer, gate)
        set_threshold(gate, shared, shared.threshold)
        set_temperature(gate, shared, shared.temperature)


def _logit(p: float) -> float:
    return math.log(p / (1 - p))
