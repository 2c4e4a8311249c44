"""What brings a collapsed gate back: reversible, and in the slots that belong to a rescue alone."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from dg_lightning.collapse import GateState, Mode, Verdict
from dg_lightning.protocol import GateLike, keep_p
from dg_lightning.slots import set_temperature, set_threshold, slots_of

__all__ = ["Rescue"]

_HEALTHY_CHECKS = 10  # in a row, before half of a rescue is taken back
_MARGIN = 0.1  # by which p is brought above θ
_HIGHEST = 0.85  # θ of a rescued gate
_SINKING = 0.1  # open gates of a rescued layer: below this it is about to collapse again
_RECOVERED = 0.25  # open gates above which a rescue is taken back


@dataclass
class Rescue:
    """How one gate has been rescued so far.

    After ten healthy checks some of it is taken back, and again after ten more; a gate that
    collapses again keeps what it was given.

    Args:
        weight_factor: What the weight of penalties on the gate is multiplied by.
        threshold_offset: What is added to θ.
        temperature_offset: What is added to τ.
        healthy: Healthy checks since the last change.
        relapses: How often it collapsed again after some of it was taken back.
        eased: Whether any of it was taken back.
    """

    weight_factor: float = 1.0
    threshold_offset: float = 0.0
    temperature_offset: float = 0.0
    healthy: int = 0
    relapses: int = 0
    eased: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @property
    def active(self) -> bool:
        """Whether anything of it is in force."""
        return self.weight_factor != 1 or bool(self.threshold_offset or self.temperature_offset)

    def act(
        self,
        trainer: Any,
        gate: GateLike,
        now: GateState,
        verdict: Verdict | None,
        dead: Tensor,
    ) -> str | None:
        """Do what a verdict asks for, or ease off a healthy gate; return what was done."""
        sinking = verdict is None and self.weight_factor < 1 and now.g < _SINKING
        if verdict is None and not sinking:
            return self._ease(trainer, gate, now)
        self.healthy = 0
        self.relapses += self.eased
        self.eased = False
        mode: Mode = "closed_by_penalty" if verdict is None else verdict.mode
        done = self._remedy(gate, now, mode, dead)
        self.weight_factor = min(max(self.weight_factor, 1e-3), 1e3)
        if done is None:
            return None
        self._apply(trainer, gate, now)
        return f"{'sinking again' if sinking else mode}, answered by {done}"

    def _remedy(self, gate: GateLike, now: GateState, mode: Mode, dead: Tensor) -> str | None:
        if mode in ("closed_by_threshold", "phase_shock") and now.p > 2 * _MARGIN:
            lowered = min(now.threshold, now.p) - _MARGIN
            self.threshold_offset += lowered - now.threshold
            self.weight_factor /= 2
            return f"lowering θ to {lowered:.3g} and halving λ"
        if mode in ("closed_by_threshold", "closed_by_penalty", "phase_shock"):
            threshold = min(now.threshold, _HIGHEST)  # above it no p would do
            self.threshold_offset += threshold - now.threshold
            wanted = threshold + _MARGIN
            warm = max(now.temperature, 1.0) if now.temperature < 0.5 else now.temperature
            self.temperature_offset += warm - now.temperature
            lift = warm * _logit(wanted) - now.temperature * _logit(min(max(now.p, 1e-6), wanted))
            gate.shift_bias(lift)
            self.weight_factor /= 10
            raised = f", and raising τ to {warm:.3g}" if warm != now.temperature else ""
            return f"lifting the bias by {lift:.3g} and dividing λ by 10{raised}"
        if mode in ("all_open", "always_on_units"):
            self.weight_factor *= 2
            return "doubling λ"
        if mode == "flapping":
            self.temperature_offset += now.temperature / 2
            keep_p(gate, 1.5, now.p)
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
        self._apply(trainer, gate, now)
        return "healthy again, some of the rescue taken back"

    def restore(self, trainer: Any, gate: GateLike) -> None:
        """Say again what is in force, after a checkpoint has brought the gate's settings back."""
        slots = slots_of(trainer, gate)
        slots.rescue_factor = self.weight_factor
        slots.threshold_offset = self.threshold_offset
        slots.temperature_offset = self.temperature_offset

    def _apply(self, trainer: Any, gate: GateLike, now: GateState) -> None:
        """Put what is in force into the slots of the gate, and onto the gate."""
        slots = slots_of(trainer, gate)
        # Where no schedule says what they are without an offset, the gate's own values do.
        if slots.threshold is None:
            slots.threshold = now.threshold - slots.threshold_offset
        if slots.temperature is None:
            slots.temperature = now.temperature - slots.temperature_offset
        self.restore(trainer, gate)
        set_threshold(gate, slots, slots.threshold)
        set_temperature(gate, slots, slots.temperature)


def _logit(p: float) -> float:
    return math.log(p / (1 - p))
