"""Anneal the temperature of gates (section 4.1 of the paper: high at first, then gently lower)."""

from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.gates import GateLike, gate_layers, set_temperature, shared_state
from dg_lightning.gates.protocol import set_initial_temperature
from dg_lightning.schedules import Clock, Curve, Duration, Schedule, Shape, warn_of_risks
from dg_lightning.training import keep_settings_live, log_step

from ._agreement import refuse_two_writers, refuse_uncounted_steps

__all__ = ["TemperatureAnnealing"]


class TemperatureAnnealing(pl.Callback):
    """Sets the temperature τ of every gate from a schedule, before optimizer steps.

    τ is part of the gate, so a checkpoint is deployed with the τ of its step. If the schedule
    starts at another τ than the gates were built with, their logits are scaled once, so that every
    unit starts with the p that it was given.

    Args:
        start: τ at `begin` and before.
        end: τ from `until` on.
        shape: The curve between them.
        begin: When τ begins to change.
        until: When τ reaches `end`.
        staircase: `epoch` holds τ constant within each epoch.
        layers: Name patterns of the gates; None for all.

    | logged key | meaning |
    |---|---|
    | `gates/temperature` | τ; with the suffix `/<layer>` if `layers` is given |

    >>> TemperatureAnnealing(start=2.0, end=1.0, until=0.7).schedule.end
    1.0
    """

    @checked
    def __init__(
        self,
        start: float = 2.0,
        end: float = 1.0,
        shape: Shape = "linear",
        begin: Duration = 0,
        until: Duration = 0.7,
        staircase: Literal["epoch"] | None = None,
        layers: list[str] | None = None,
    ) -> None:
        for name, value in (("start", start), ("end", end)):
            if value <= 0:
                raise ValueError(f"`{name}` must be above 0, got {value}.")
        self.schedule = Schedule(start, end, shape, begin, until, staircase=staircase)
        self.layers = layers
        self._gates: dict[str, GateLike] = {}

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._gates = gate_layers(pl_module, self.layers)
        refuse_two_writers(self, trainer, pl_module)
        refuse_uncounted_steps(self, trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._value_at = self.schedule.resolve(Clock.from_trainer(trainer))
        keep_settings_live(pl_module, trainer)
        warn_of_risks(self, trainer, pl_module)
        if trainer.global_step == 0:
            for gate in self._gates.values():
                set_initial_temperature(gate, self._value_at(0))

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return what this callback sets over the steps."""
        gates = tuple(gate_layers(pl_module, self.layers))
        return [Curve("temperature", "τ", self.schedule.resolve(clock), gates)]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        value = self._value_at(trainer.global_step)
        for gate in self._gates.values():
            shared = shared_state(trainer, gate)
            if shared.temperature != value:
                set_temperature(gate, shared, value)
        suffixes = [""] if self.layers is None else [f"/{name}" for name in self._gates]
        log_step(pl_module, {f"gates/temperature{suffix}": value for suffix in suffixes})
