"""Gate collapse: statistics of gates over a training run, its diagnosis, and rescue."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from dg_lightning.arguments import check_fields
from dg_lightning.gates.protocol import GateLike, deployed_gate, preserve_probability
from dg_lightning.gates.state import set_temperature, set_threshold, shared_state


class GateFigures(NamedTuple):
    """Statistics of one gate at one check. `GateState` describes the fields."""

    p: float
    g: float
    threshold: float
    temperature: float
    unit_spread: float
    sample_spread: float
    dead: float
    always_on: float
    flips: float


@torch.no_grad()
def open_shares(gates: Sequence[GateLike]) -> Tensor:
    """Return the share of samples that open each block, as one vector for all gates."""
    opened = [deployed_gate(gate).float() for gate in gates]
    return torch.cat([g.reshape(-1, g.shape[-1]).mean(0) if g.ndim > 1 else g for g in opened])


@torch.no_grad()
def unit_rates(gates: Sequence[GateLike]) -> Tensor:
    """Return the rates of all gates in the last forward pass as one vector.

    The vector contains the share of samples that open each block, the mean p of each block and, for
    each gate, the spread of p across samples, the threshold and the temperature. A single vector
    can be averaged over ranks in one operation.
    """
    opened, means, settings = open_shares(gates), [], []
    for gate in gates:
        p = gate.probability
        assert p is not None
        rows = p.detach().float()
        spread = rows.new_zeros(())  # all samples share one p
        if rows.ndim > 1:
            rows = rows.reshape(-1, p.shape[-1])
            spread, rows = rows.std(0, correction=0).mean(), rows.mean(0)
        means.append(rows)
        settings += [spread, gate.threshold.float(), gate.temperature.float()]
    return torch.cat([opened, *means, torch.stack(settings)])


class GateStatistics:
    """Statistics of gates over several checks: dead units, always-on units and flips.

    Args:
        gates: The gates.
        window: Number of checks before a unit can count as dead or always on.
    """

    def __init__(self, gates: Sequence[GateLike], window: int = 5) -> None:
        self.sizes = [gate.units // gate.block_size for gate in gates]
        self.window = window
        self.checks = 0
        self.previous: Tensor | None = None  # open shares one step before a check
        # The largest and smallest open shares in the previous and the current window.
        self.extremes: list[Any] = []
        self.dead = np.zeros(sum(self.sizes), bool)
        self._device = torch.device("cpu")

    def record_previous(self, rates: Tensor) -> None:
        """Record the `open_shares` from the step before a check, so that flips can be counted."""
        self.previous = rates

    @torch.no_grad()
    def check(self, rates: Tensor) -> list[GateFigures]:
        """Add a vector of `unit_rates` and return the statistics of every gate.

        This uses numpy, which is much faster than torch for many operations on few numbers.
        """
        blocks, self._device = sum(self.sizes), rates.device
        opened, p, settings = np.split(rates.cpu().numpy(), [blocks, 2 * blocks])
        highest, lowest = self._update_extremes(opened)
        previous = opened if self.previous is None else self.previous.cpu().numpy()
        self.previous = None
        self.dead = highest == 0
        columns = [p, opened, self.dead, lowest == 1, np.abs(opened - previous)]
        ends = list(accumulate(self.sizes))
        figures = []
        for size, end, row in zip(self.sizes, ends, settings.reshape(-1, 3).tolist(), strict=True):
            parts = [column[end - size : end] for column in columns]
            mean_p, g, dead, always_on, flips = [float(part.mean()) for part in parts]
            spread, threshold, temperature = row
            unit_spread = float(parts[0].std())
            rest = (unit_spread, spread, dead, always_on, flips)
            figures.append(GateFigures(mean_p, g, threshold, temperature, *rest))
        return figures

    def dead_units(self, index: int, block_size: int) -> Tensor:
        """Return a bool mask of the units of a gate that were dead at the last check."""
        end = sum(self.sizes[: index + 1])
        dead = self.dead[end - self.sizes[index] : end].repeat(block_size)
        return torch.from_numpy(dead).to(self._device)

    @property
    def filled(self) -> bool:
        """Whether a whole window of checks has been recorded."""
        return self.checks >= self.window

    def _update_extremes(self, opened: Any) -> tuple[Any, Any]:
        """Return the largest and smallest open share over the previous and current windows."""
        if self.checks % self.window == 0:
            self.extremes = [*self.extremes[-1:], np.stack([opened, opened])]
        else:
            highest, lowest = self.extremes[-1]
            updated = [np.maximum(highest, opened), np.minimum(lowest, opened)]
            self.extremes = [*self.extremes[:-1], np.stack(updated)]
        self.checks += 1
        windows = np.stack(self.extremes)
        return windows[:, 0].max(0), windows[:, 1].min(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {
            "checks": self.checks,
            "previous": None if self.previous is None else self.previous.clone(),
            "extremes": [torch.from_numpy(extreme).clone() for extreme in self.extremes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self.checks = state["checks"]
        self.previous = state["previous"]
        self.extremes = [extreme.cpu().numpy() for extreme in state["extremes"]]


Mode: TypeAlias = Literal[
    "closed_by_threshold",
    "closed_by_penalty",
    "phase_shock",
    "all_open",
    "identical_gates",
    "input_independent",
    "dead_units",
    "always_on_units",
    "flapping",
]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class GateState:
    """State of one gate at one check, as plain numbers.

    Args:
        step: Optimizer step.
        p: Mean probability.
        g: Fraction of units that would be open in deployment.
        floor: Minimum fraction of open units.
        threshold: The threshold θ.
        temperature: The temperature τ.
        initial_p: Initial p of the gate.
        unit_spread: Standard deviation of p across units.
        sample_spread: Standard deviation of p across samples, averaged over units.
        dead: Fraction of units that no sample opened within the window.
        always_on: Fraction of units that every sample opened within the window.
        flips: Fraction of units that opened or closed between two consecutive optimizer steps.
        input_dependent: Whether the gate reads its input.
        begun: Whether a penalty may have begun to close gates.
        penalty_share: Fraction of training during which a penalty has acted on the gate.
        fixed: Whether the number of open units is fixed, as with top-k.
        controlled: Whether a BudgetController sets the open rate.
        keep: The keep target, or None.
        factor: The penalty's phase factor.
    """

    step: int
    p: float
    g: float
    floor: float
    threshold: float
    temperature: float
    initial_p: float
    unit_spread: float
    sample_spread: float
    dead: float
    always_on: float
    flips: float
    input_dependent: bool
    begun: bool
    penalty_share: float
    fixed: bool = False
    controlled: bool = False
    keep: float | None = None
    factor: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "GateState":
        """Create a state from `as_dict` values. Names from version 0.2 are accepted."""
        renamed = {"pressed": "penalty_share"}
        return cls(**{renamed.get(name, name): value for name, value in values.items()})


_VANISHED = 1e-3  # share of the initial p below which a gate does not recover


@dataclass(frozen=True)
class Limits:
    """Limits within which gates count as healthy.

    Args:
        closed: A gate counts as closed if its g is at or below this value or the floor.
        low_p: If the p of a closed gate is below this fraction of its initial value, the penalty
            closed the gate. Otherwise the threshold did.
        open: A gate counts as all open if its g is at or above this value.
        shock: Fraction of g lost between two checks in a phase shock.
        spread: Standard deviation of p below which all units count as identical. Across samples,
            the limit is ten times as high.
        moved: Minimum change in p from its initial value before identical values are reported.
        units: Maximum fraction of dead or always-on units.
        flips: Maximum fraction of static gates that change per step. The limit for a GateNet is
            three times as high, because every batch contains new samples.
        min_penalty_share: Minimum fraction of training with a penalty before failures to learn
            are reported.
        patience: Number of consecutive checks that must agree.
    """

    closed: float = 0.02
    low_p: float = 0.6
    open: float = 0.99
    shock: float = 0.5
    spread: float = 1e-4
    moved: float = 0.02
    units: float = 0.9
    flips: float = 0.1
    min_penalty_share: float = 0.5
    patience: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("closed", "low_p", "open", "shock", "units", "min_penalty_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be in [0, 1], got {getattr(self, name)}.")
        for name in ("spread", "moved", "flips"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}.")
        if self.patience < 1:
            raise ValueError(f"`patience` must be at least 1, got {self.patience}.")


@dataclass(frozen=True)
class Verdict:
    """A failure mode with its evidence, likely cause and remedy."""

    mode: Mode
    evidence: str
    cause: str
    remedy: str

    def message(self, step: int, layer: str) -> str:
        """Return the verdict as one line."""
        return (
            f"Gate collapse at step {step}, {layer}: {self.mode}. {self.evidence}. "
            f"Likely cause: {self.cause}. Remedy: {self.remedy}."
        )


def diagnose(history: Sequence[GateState], limits: Limits) -> Verdict | None:
    """Return the failure mode of a gate from its latest states, or None if it is healthy."""
    recent = history[-limits.patience :]
    now = recent[-1]
    if len(recent) < limits.patience or not all(state.begun for state in recent):
        return None
    if all(_is_closed(state, limits) for state in recent):
        return _detect_phase_shock(history, limits) or _diagnose_closed(now, limits)
    is_reportable = now.penalty_share >= limits.min_penalty_share
    identical = all(state.unit_spread < limits.spread for state in recent)
    if identical and is_reportable and abs(now.p - now.initial_p) > limits.moved:
        return Verdict(
            "identical_gates",
            f"all units have p = {now.p:.3f} (initially {now.initial_p:.3f})",
            "only the penalty reaches the gates, not the loss (because of a detached "
            "straight-through estimator, or gates after the last trained layer)",
            "multiply the units by the gate without detaching it",
        )
    max_flips = 3 * limits.flips if now.input_dependent else limits.flips
    if all(state.flips > max_flips for state in recent):
        return Verdict(
            "flapping",
            f"{now.flips:.0%} of the gates change in a single step",
            "the gates' learning rate is too high, or p stays close to θ",
            "lower the gates' learning rate, raise τ, or move the keep target away from θ",
        )
    if all(state.g >= limits.open for state in recent):
        intended = now.controlled or now.fixed or (now.keep is not None and now.keep >= 0.8)
        return _all_open(now) if is_reportable and not intended else None
    return _diagnose_gate_net(recent, limits) if now.input_dependent and is_reportable else None


def _is_closed(state: GateState, limits: Limits) -> bool:
    # A high floor is deliberate, so a gate at such a floor has collapsed only if p has vanished.
    rests = state.floor <= 0.1 or state.p < _VANISHED * state.initial_p
    floor = state.floor if rests else 0.0
    return state.g <= max(limits.closed, floor) + 1e-6 and not state.fixed


def _diagnose_closed(now: GateState, limits: Limits) -> Verdict:
    evidence = f"p is {now.p:.3f}, but {now.g:.1%} of the gates are open at θ = {now.threshold:.3g}"
    if now.p >= limits.low_p * now.initial_p:
        return Verdict(
            "closed_by_threshold",
            evidence,
            "θ is too high for these values of p, or rose too fast",
            "lower θ, raise it later, or move the mean p away from it",
        )
    cold = now.temperature < 0.5
    return Verdict(
        "closed_by_penalty",
        f"p fell from {now.initial_p:.3f} to {now.p:.3f}, and {now.g:.1%} of the gates are open",
        f"τ = {now.temperature:.3g} is so low that the sigmoid saturates"
        if cold
        else "the penalty's weight is too large, or its ramp is too fast",
        "raise τ and cool more slowly" if cold else "lower the weight, or ramp it up more slowly",
    )


def _detect_phase_shock(history: Sequence[GateState], limits: Limits) -> Verdict | None:
    """Detect a collapse that coincides with a jump between the settings of two phases."""
    last_open = next((s for s in reversed(history) if not _is_closed(s, limits)), None)
    if last_open is None:
        return None
    after = next(s for s in history if s.step > last_open.step)
    if after.g > (1 - limits.shock) * last_open.g or last_open.g < 0.1:
        return None
    jumps = []
    if abs(after.threshold - last_open.threshold) >= 0.05:
        jumps.append(f"θ from {last_open.threshold:.3g} to {after.threshold:.3g}")
    if last_open.keep is not None and after.keep is not None:
        if abs(after.keep - last_open.keep) >= 0.1:
            jumps.append(f"the keep target from {last_open.keep:.3g} to {after.keep:.3g}")
        if abs(after.factor - last_open.factor) >= 0.25:
            jumps.append(f"the factor of λ from {last_open.factor:.3g} to {after.factor:.3g}")
    if len(jumps) < 2:
        return None
    return Verdict(
        "phase_shock",
        f"open gates fell from {last_open.g:.1%} to {after.g:.1%} between step {last_open.step} "
        f"and {after.step}, as the phase change moved {' and '.join(jumps)}",
        "settings jump between phases",
        "join phases smoothly with `join`, and use a keep target of about 0.30 before the last "
        "phase",
    )


def _all_open(now: GateState) -> Verdict:
    return Verdict(
        "all_open",
        f"{now.g:.1%} of the gates are open after a penalty during {now.penalty_share:.0%} of "
        "training",
        "the penalty's weight or the gates' learning rate is too small",
        "raise the weight (BudgetController finds a suitable one), or the gates' learning rate",
    )


def _diagnose_gate_net(recent: Sequence[GateState], limits: Limits) -> Verdict | None:
    now = recent[-1]
    if all(state.sample_spread < 10 * limits.spread for state in recent):
        return Verdict(
            "input_independent",
            f"p differs by {now.sample_spread:.1e} between samples, and {now.g:.1%} of the "
            "gates are open",
            "the GateNet ignores its input because it is dead, disconnected or penalised too early",
            "begin the penalty later, raise the gates' learning rate, or use a static gate, which "
            "costs nothing",
        )
    if all(state.dead > limits.units for state in recent):
        return Verdict(
            "dead_units",
            f"{now.dead:.0%} of the units were not opened by any sample",
            "the GateNet has closed them, and their gradients do not reopen them",
            "revive them (MinimumActivity), lower the weight, or make the layer narrower",
        )
    if all(state.always_on > limits.units for state in recent) and not now.controlled:
        return Verdict(
            "always_on_units",
            f"{now.always_on:.0%} of the units were opened by every sample",
            "the penalty is too weak for the GateNet to recoup its own cost",
            "raise the weight, or use a static gate",
        )
    return None


_HEALTHY_CHECKS = 10  # consecutive checks before a rescue is relaxed
_MARGIN = 0.1  # distance between p and θ after a rescue
_HIGHEST = 0.85  # maximum θ of a rescued gate
_SINKING = 0.1  # open rate below which a rescued gate is about to collapse again
_RECOVERED = 0.25  # open rate above which a rescue is relaxed


@dataclass
class Rescue:
    """The settings that rescue one gate from collapse.

    A rescue is relaxed after every ten healthy checks, until the gate relapses.

    Args:
        weight_factor: Multiplier for the weight of penalties on the gate.
        threshold_offset: Offset added to θ.
        temperature_offset: Offset added to τ.
        healthy: Number of healthy checks since the last change.
        relapses: Number of collapses after relaxing.
        eased: Whether the rescue has been relaxed since the last collapse.
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
        """Whether the rescue currently changes any setting."""
        return self.weight_factor != 1 or bool(self.threshold_offset or self.temperature_offset)

    def apply(
        self,
        trainer: Any,
        gate: GateLike,
        now: GateState,
        verdict: Verdict | None,
        dead: Tensor,
    ) -> str | None:
        """Apply the remedy for a verdict, or relax the rescue. Return what was done, or None."""
        sinking = verdict is None and self.weight_factor < 1 and now.g < _SINKING
        if verdict is None and not sinking:
            return self.relax(trainer, gate, now)
        self.healthy = 0
        self.relapses += self.eased
        self.eased = False
        mode: Mode = "closed_by_penalty" if verdict is None else verdict.mode
        action = self._apply_remedy(gate, now, mode, dead)
        self.weight_factor = min(max(self.weight_factor, 1e-3), 1e3)
        if action is None:
            return None
        self._apply_settings(trainer, gate, now)
        return f"{'sinking again' if sinking else mode}, remedied by {action}"

    def _apply_remedy(self, gate: GateLike, now: GateState, mode: Mode, dead: Tensor) -> str | None:
        if mode in ("closed_by_threshold", "phase_shock") and now.p > 2 * _MARGIN:
            lowered = min(now.threshold, now.p) - _MARGIN
            self.threshold_offset += lowered - now.threshold
            self.weight_factor /= 2
            return f"lowering θ to {lowered:.3g} and halving λ"
        if mode in ("closed_by_threshold", "closed_by_penalty", "phase_shock"):
            threshold = min(now.threshold, _HIGHEST)  # leave room for p above θ
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

    def relax(self, trainer: Any, gate: GateLike, now: GateState) -> str | None:
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
        return "healthy again, rescue relaxed"

    def restore(self, trainer: Any, gate: GateLike) -> None:
        """Write the rescue to the gate's shared state, for example after loading a checkpoint."""
        shared = shared_state(trainer, gate)
        shared.rescue_factor = self.weight_factor
        shared.threshold_offset = self.threshold_offset
        shared.temperature_offset = self.temperature_offset

    def _apply_settings(self, trainer: Any, gate: GateLike, now: GateState) -> None:
        shared = shared_state(trainer, gate)
        # Without a schedule, the gate's own values are the base values.
        if shared.threshold is None:
            shared.threshold = now.threshold - shared.threshold_offset
        if shared.temperature is None:
            shared.temperature = now.temperature - shared.temperature_offset
        self.restore(trainer, gate)
        set_threshold(gate, shared, shared.threshold)
        set_temperature(gate, shared, shared.temperature)


def _logit(p: float) -> float:
    return math.log(p / (1 - p))
