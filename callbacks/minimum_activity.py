"""Keep a minimum number of gates open (section 4.1 (4) of the paper)."""

from functools import cached_property
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.collapse import GateStatistics, unit_rates
from dg_lightning.gates.base import check_count
from dg_lightning.gates.protocol import (
    GateLike,
    gate_layers,
    init_recorded_gates,
    values_by_pattern,
)
from dg_lightning.gates.state import shared_state
from dg_lightning.schedules.schedule import Clock, Duration, check_duration
from dg_lightning.training.averaging import keep_settings_live

from ._shared import DeferredStateCallback, check_step_counting, mean_over_ranks, state_key

_CHECKS = 10  # number of checks before a unit counts as dead


class MinimumActivity(DeferredStateCallback):
    """Keeps a minimum number of gates open and revives dead units.

    The minimum is a floor that is part of the gate and its checkpoint, so it also applies in
    deployment. Every sample opens at least that many units, starting with the largest p.

    Args:
        min_open: The floor, for all gates or by name pattern. It is either a share of a layer's
            gates, such as "5%" (r_min in the paper, 5 to 10%), or a count (the paper's forced
            top-k). None keeps the floors that gates already have.
        revive_after: How long a unit of a GateNet may stay closed for all samples before it is
            reset to its initial open rate (default: forever).
        revive_until: When to stop reviving units, so that gates can settle.
        layers: Name patterns of the gates (default: all).

    >>> MinimumActivity(min_open="5%").min_open
    '5%'
    """

    @checked
    def __init__(
        self,
        min_open: int | float | str | dict[str, int | float | str] | None = "5%",
        revive_after: Duration | None = None,
        revive_until: Duration = "75%",
        layers: list[str] | None = None,
    ) -> None:
        for floor in min_open.values() if isinstance(min_open, dict) else [min_open]:
            if floor is not None:
                check_count("min_open", floor)
        if revive_after is not None:
            check_duration("revive_after", revive_after)
        check_duration("revive_until", revive_until)
        self.min_open = min_open
        self.revive_after = revive_after
        self.revive_until = revive_until
        self.layers = layers
        self.revived = 0
        self._gates: dict[str, GateLike] = {}
        self._seen_at = 0
        self._statistics = GateStatistics([])

    @cached_property  # Lightning reads it in every hook of every step
    @override
    def state_key(self) -> str:
        return state_key(self, layers=self.layers)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._gates = gate_layers(pl_module, self.layers)
        self._set_floors()
        self._watched = {n: gate for n, gate in self._gates.items() if gate.input_dependent}
        if self.revive_after is not None and not self._watched:
            raise ValueError(
                "`revive_after` is for GateNets, but there are none: leave it out. Closed static "
                "gates still get a gradient that can reopen them."
            )
        self._statistics = GateStatistics(list(self._watched.values()), _CHECKS)

    def _set_floors(self) -> None:
        if isinstance(self.min_open, dict):
            floors = values_by_pattern("min_open", self.min_open, self._gates, None)
        else:
            floors = [self.min_open] * len(self._gates)
        for gate, floor in zip(self._gates.values(), floors, strict=True):
            if floor is not None:
                gate.set_min_open(floor)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        keep_settings_live(pl_module, trainer)
        if self.revive_after is not None:
            init_recorded_gates(self._watched.values())
            check_step_counting(self, trainer, pl_module)
            clock = Clock.from_trainer(trainer)
            self._interval = max(1, clock.steps(self.revive_after, "revive_after") // _CHECKS)
            self._until = clock.steps(self.revive_until, "revive_until")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        step = trainer.global_step
        if self.revive_after is None or step == self._seen_at or step > self._until:
            return
        if step // self._interval == self._seen_at // self._interval:
            return
        self._seen_at = step
        gates = list(self._watched.values())
        figures = self._statistics.check(mean_over_ranks(trainer, unit_rates(gates)))
        if not self._statistics.filled:
            return
        for index, (name, gate) in enumerate(self._watched.items()):
            if figures[index].dead and not shared_state(trainer, gate).frozen:
                dead = self._statistics.dead_units(index, gate.block_size)
                gate.revive(dead)
                self.revived += int(dead.sum())
                rank_zero_info(
                    f"MinimumActivity at step {step}, {name}: revived {int(dead.sum())} units that "
                    "no sample had opened."
                )
        self._statistics = GateStatistics(gates, _CHECKS)

    @override
    def current_state(self) -> dict[str, Any]:
        return {
            "revived": self.revived,
            "seen_at": self._seen_at,
            "statistics": self._statistics.state_dict(),
        }

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self.revived = state["revived"]
        self._seen_at = state["seen_at"]
        self._statistics.load_state_dict(state["statistics"])
