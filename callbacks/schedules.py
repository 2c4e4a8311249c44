"""Schedule the temperature, threshold and keep target of gates."""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from dg_lightning.arguments import as_dataclass, checked, renamed
from dg_lightning.gates import (
    GateLike,
    SharedState,
    gate_layers,
    set_temperature,
    set_threshold,
    shared_state,
)
from dg_lightning.gates.protocol import set_initial_temperature
from dg_lightning.schedules import (
    Clock,
    Curve,
    Duration,
    JoinedPhases,
    Phase,
    Quantity,
    Schedule,
    Shape,
    ValueAt,
    check_duration,
    warn_of_risks,
)
from dg_lightning.training import keep_settings_live, log_step

from ._shared import check_single_writer, check_step_counting


class _GateSchedule(pl.Callback, ABC):
    """Base class of callbacks that set one number of their gates in every step."""

    quantity: Literal["temperature", "threshold"]
    symbol: str

    def __init__(self, schedule: Schedule, layers: list[str] | None) -> None:
        self.schedule = schedule
        self.layers = layers
        self._gates: dict[str, GateLike] = {}

    @property
    def writes(self) -> set[str]:
        """What this callback sets on its gates."""
        return {self.quantity}

    @abstractmethod
    def write(self, gate: GateLike, shared: SharedState, value: float) -> None:
        """Set the number on one gate."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._gates = gate_layers(pl_module, self.layers)
        check_single_writer(self, trainer, pl_module)
        check_step_counting(self, trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._value_at = self.schedule.resolve(Clock.from_trainer(trainer))
        keep_settings_live(pl_module, trainer)
        warn_of_risks(self, trainer, pl_module)

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return the curve of the number."""
        gates = tuple(gate_layers(pl_module, self.layers))
        return [Curve(self.quantity, self.symbol, self.schedule.resolve(clock), gates)]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        value = self._value_at(trainer.global_step)
        for gate in self._gates.values():
            shared = shared_state(trainer, gate)
            if getattr(shared, self.quantity) != value:
                self.write(gate, shared, value)
        suffixes = [""] if self.layers is None else [f"/{name}" for name in self._gates]
        log_step(pl_module, {f"gates/{self.quantity}{suffix}": value for suffix in suffixes})


class TemperatureAnnealing(_GateSchedule):
    """Anneals the temperature τ of gates over the optimizer steps.

    τ is part of the gate, so a checkpoint is deployed with the τ of its step. If the schedule
    starts at a different τ from the one the gates were built with, the logits are rescaled once so
    that every unit keeps its initial p.

    Args:
        start: τ until `begin`.
        end: τ from `until` on.
        shape: Shape of the curve from `start` to `end`.
        begin: When τ begins to change.
        until: When τ reaches `end`.
        staircase: `epoch` holds τ constant within each epoch.
        layers: Name patterns of the gates (default: all).

    | logged key | meaning |
    |---|---|
    | `gates/temperature` | τ, with the suffix `/<layer>` if `layers` is given |

    >>> TemperatureAnnealing(start=2.0, end=1.0, until="70%").schedule.end
    1.0
    """

    quantity = "temperature"
    symbol = "τ"

    @checked
    def __init__(
        self,
        start: float = 2.0,
        end: float = 1.0,
        shape: Shape = "linear",
        begin: Duration = 0,
        until: Duration = "70%",
        staircase: Literal["epoch"] | None = None,
        layers: list[str] | None = None,
    ) -> None:
        for name, value in (("start", start), ("end", end)):
            if value <= 0:
                raise ValueError(f"`{name}` must be above 0, got {value}.")
        super().__init__(Schedule(start, end, shape, begin, until, staircase=staircase), layers)

    @override
    def write(self, gate: GateLike, shared: SharedState, value: float) -> None:
        set_temperature(gate, shared, value)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.global_step == 0:
            for gate in self._gates.values():
                set_initial_temperature(gate, self._value_at(0))


class ThresholdRamp(_GateSchedule):
    """Moves the threshold θ of gates over the optimizer steps.

    θ is part of the gate, so a checkpoint is deployed with the θ of its step. For a threshold that
    changes in phases, use `ThresholdPhases`.

    Args:
        start: θ until `begin`.
        end: θ from `until` on.
        shape: Shape of the curve from `start` to `end`.
        begin: When θ begins to change.
        until: When θ reaches `end`.
        staircase: `epoch` holds θ constant within each epoch.
        layers: Name patterns of the gates (default: all).

    | logged key | meaning |
    |---|---|
    | `gates/threshold` | θ, with the suffix `/<layer>` if `layers` is given |

    >>> ThresholdRamp(start=0.5, end=0.75, until="50%").schedule.end
    0.75
    """

    quantity = "threshold"
    symbol = "θ"

    @checked
    def __init__(
        self,
        start: float,
        end: float,
        shape: Shape = "linear",
        begin: Duration = 0,
        until: Duration = "70%",
        staircase: Literal["epoch"] | None = None,
        layers: list[str] | None = None,
    ) -> None:
        for name, value in (("start", start), ("end", end)):
            if not 0 <= value < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {value}.")
        super().__init__(Schedule(start, end, shape, begin, until, staircase=staircase), layers)

    @override
    def write(self, gate: GateLike, shared: SharedState, value: float) -> None:
        set_threshold(gate, shared, value)


_PAPER = (
    Phase(keep=0.90, threshold=0.55, weight_factor=0.0),
    Phase(keep=0.55, threshold=0.65, weight_factor=1.0, begin="30%"),
    Phase(keep=0.25, threshold=0.75, weight_factor=1.5, begin="70%"),
)


class ThresholdPhases(pl.Callback):
    """Schedules the keep target, threshold and penalty weight in phases.

    The threshold is written to the gates. Penalties read the keep target and the weight factor: a
    `GatePenalty(usage="target")` without a `target` follows the keep target, and every penalty on
    these gates is multiplied by the weight factor. A keep target that no penalty follows has no
    effect, and training warns about it.

    Args:
        phases: The phases in order (default: the paper's three phases, with values from the middle
            of the ranges it gives).
        transition: Length of the smooth transition between phases. With 0, values jump.
        buffer_keep: An intermediate keep target that avoids a collapse before the last phase (about
            0.30 in the paper). It is used if it lies between the keep targets of the last two
            phases. None disables it.
        buffer: How long the intermediate target is held.
        layers: Name patterns of the gates (default: all).

    | logged key | meaning |
    |---|---|
    | `gates/threshold` | θ, with the suffix `/<layer>` if `layers` is given |
    | `gates/keep_target` | keep target, with the same suffix |

    >>> ThresholdPhases().phases[-1].threshold
    0.75
    """

    @renamed(join="transition")
    @checked
    def __init__(
        self,
        phases: list[Phase] | None = None,
        transition: Duration = "10%",
        buffer_keep: float | None = 0.30,
        buffer: Duration = "5%",
        layers: list[str] | None = None,
    ) -> None:
        given = _PAPER if phases is None else phases
        self.phases = [as_dataclass("phases", phase, Phase) for phase in given]
        for name in ("keep", "threshold"):
            if 0 < sum(getattr(phase, name) is None for phase in self.phases) < len(self.phases):
                raise ValueError(f"Either all `phases` must set `{name}`, or none.")
        if buffer_keep is not None and not 0 <= buffer_keep <= 1:
            raise ValueError(f"`buffer_keep` must be in [0, 1], got {buffer_keep}.")
        check_duration("transition", transition)
        check_duration("buffer", buffer)
        self.transition = transition
        self.buffer_keep = buffer_keep
        self.buffer = buffer
        self.layers = layers
        self._gates: dict[str, GateLike] = {}

    @property
    def writes(self) -> set[str]:
        """What this callback sets on its gates."""
        given = [name for name in ("keep", "threshold") if _values(self.phases, name)]
        return {"factor", *given}

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._gates = gate_layers(pl_module, self.layers)
        check_single_writer(self, trainer, pl_module)
        check_step_counting(self, trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._value_at = self._resolve(Clock.from_trainer(trainer))
        keep_settings_live(pl_module, trainer)
        warn_of_risks(self, trainer, pl_module)

    def _resolve(self, clock: Clock) -> dict[Quantity, ValueAt]:
        """Return what the phases set, as functions of the step."""
        starts = [clock.steps(phase.begin, "begin") for phase in self.phases]
        if starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
            raise ValueError(
                "`phases` must begin in order, with the first at step 0, got steps "
                f"{', '.join(map(str, starts))}."
            )
        width = clock.steps(self.transition, "transition")
        factors = [phase.weight_factor for phase in self.phases]
        found: dict[Quantity, ValueAt] = {"factor": JoinedPhases(factors, starts, width)}
        if thresholds := _values(self.phases, "threshold"):
            found["threshold"] = JoinedPhases(thresholds, starts, width)
        if keeps := _values(self.phases, "keep"):
            starts, stop = list(starts), self.buffer_keep
            if stop is not None and len(keeps) > 1 and keeps[-1] < stop < keeps[-2]:
                keeps.insert(-1, stop)
                starts.append(starts[-1] + width + clock.steps(self.buffer, "buffer"))
            found["keep"] = JoinedPhases(keeps, starts, width)
        return found

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return the curves of the keep target, threshold and weight factor, as far as set."""
        gates = tuple(gate_layers(pl_module, self.layers))
        labels: dict[Quantity, str] = {"keep": "keep target", "threshold": "θ"}
        if any(phase.weight_factor != 1 for phase in self.phases):
            labels["factor"] = "λ factor"
        found = self._resolve(clock)
        return [Curve(q, label, found[q], gates) for q, label in labels.items() if q in found]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        values = {name: at(trainer.global_step) for name, at in self._value_at.items()}
        threshold, keep = values.get("threshold"), values.get("keep")
        for gate in self._gates.values():
            shared = shared_state(trainer, gate)
            shared.phase_factor = values["factor"]
            if keep is not None:
                shared.keep = keep
            if threshold is not None and shared.threshold != threshold:
                set_threshold(gate, shared, threshold)
        for suffix in [""] if self.layers is None else [f"/{name}" for name in self._gates]:
            if threshold is not None:
                log_step(pl_module, {f"gates/threshold{suffix}": threshold})
            if keep is not None:
                log_step(pl_module, {f"gates/keep_target{suffix}": keep})


def _values(phases: list[Phase], name: Literal["keep", "threshold"]) -> list[float]:
    """Return the values of a field, or an empty list if the phases do not set it."""
    values = [getattr(phase, name) for phase in phases]
    return [value for value in values if value is not None]
