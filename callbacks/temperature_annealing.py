"""Anneal the temperature of gates (section 4.1 of the paper: high at first, then gently lower)."""

from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from dg_lightning.averaging import keep_settings_live
from dg_lightning.log_steps import forget_logged, log_of_step, logs_now, steps_done
from dg_lightning.plan import Curve, warn_of_risks
from dg_lightning.protocol import GateLike, gate_layers, start_open_at
from dg_lightning.schedules import Clock, Duration, Schedule, Shape, Stairs
from dg_lightning.slots import set_temperature, slots_of
from dg_lightning.step_hooks import only_used_hooks

from ._agreement import refuse_two_writers

__all__ = ["TemperatureAnnealing"]


@only_used_hooks
class TemperatureAnnealing(pl.Callback):
    """Sets the temperature τ of every gate from a schedule, before optimizer steps.

    A way of 2,000 steps or more is gone in stairs, a thousand at least. τ is part of the gate, so a
    checkpoint is deployed with the τ of its step. Where the schedule starts at another τ than the
    gates were built with, their logits are scaled along once, so that every unit starts with the p
    that it was given.

    Args:
        start: τ at `begin` and before.
        end: τ from `until` on.
        shape: The way between them.
        begin: When it sets out.
        until: When it arrives.
        staircase: `epoch` holds τ through each epoch.
        layers: Name patterns of the gates; all when None.

    | logged key | meaning |
    |---|---|
    | `gates/temperature` | τ; with `/<layer>` behind it for the gates that `layers` names |

    >>> TemperatureAnnealing(start=2.0, end=1.0, until=0.7).schedule.end
    1.0
    """

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
        if min(start, end) <= 0:
            raise ValueError(f"A temperature must be above 0, got {start} and {end}.")
        self.schedule = Schedule(start, end, shape, begin, until, staircase=staircase)
        self.layers = layers
        self._gates: dict[str, GateLike] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._gates = gate_layers(pl_module, self.layers)
            refuse_two_writers(self, trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        clock = Clock.of(trainer)
        self._value_at = self.schedule.resolve(clock)
        way = clock.steps(self.schedule.until) - clock.steps(self.schedule.begin)
        jumps = self.schedule.staircase is not None or self.schedule.shape == "step"
        self._stairs = Stairs(0 if jumps else way)
        self._slots = [(gate, slots_of(trainer, gate)) for gate in self._gates.values()]
        keep_settings_live(pl_module, trainer)
        warn_of_risks(self, trainer, pl_module)
        if trainer.global_step == 0:
            for gate in self._gates.values():
                start_open_at(gate, self._value_at(0))

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return what this callback sets over the steps."""
        gates = tuple(gate_layers(pl_module, self.layers))
        return [Curve("temperature", "τ", self.schedule.resolve(clock), gates)]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        forget_logged(trainer)
        stair = self._stairs.new_at(steps_done(trainer, pl_module))
        if stair is not None:
            self._value = self._value_at(stair)
            for gate, slots in self._slots:
                if slots.temperature != self._value:
                    set_temperature(gate, slots, self._value)
        if logs_now(trainer):
            suffixes = [""] if self.layers is None else [f"/{name}" for name in self._gates]
            for suffix in suffixes:
                log_of_step(pl_module, f"gates/temperature{suffix}", self._value)
