"""The three phases of section 4.1 of the paper: stabilise, reduce, compress."""

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from dg_lightning.averaging import keep_settings_live
from dg_lightning.log_steps import forget_logged, log_of_step, logs_now, steps_done
from dg_lightning.plan import Curve, warn_of_risks
from dg_lightning.protocol import GateLike, gate_layers
from dg_lightning.schedules import Clock, Duration, Phase, Stairs, ValueAt, check_duration, joined
from dg_lightning.slots import set_threshold, slots_of
from dg_lightning.step_hooks import only_used_hooks

from ._agreement import refuse_two_writers

__all__ = ["ThresholdPhases"]


_PAPER = (
    Phase(keep=0.90, threshold=0.55, weight_factor=0.0),
    Phase(keep=0.55, threshold=0.65, weight_factor=1.0, begin=0.3),
    Phase(keep=0.25, threshold=0.75, weight_factor=1.5, begin=0.7),
)


@only_used_hooks
class ThresholdPhases(pl.Callback):
    """Leads keep target, threshold and penalty weight through phases, joined without a shock.

    The threshold is written to the gates. Keep target and factor are left for the penalties: a
    `GatePenalty(usage="target")` without a target of its own follows the keep target, and every
    penalty on these gates is multiplied by the factor. A join of 2,000 steps or more is gone in
    stairs, a thousand at least.

    Args:
        phases: The phases in order; the paper's three, with its middle values, when None.
        join: How long one phase takes to turn into the next; 0 jumps.
        buffer_keep: A keep target to stop at before the last phase's, where that is lower (the
            paper: about 0.30, when a collapse threatens); null for none.
        buffer: How long to stay there.
        layers: Name patterns of the gates; all when None.

    | logged key | meaning |
    |---|---|
    | `gates/threshold` | θ; with `/<layer>` behind it for the gates that `layers` names |
    | `gates/keep_target` | the keep target, likewise |

    >>> ThresholdPhases().phases[-1].threshold
    0.75
    """

    def __init__(
        self,
        phases: list[Phase] | None = None,
        join: Duration = 0.1,
        buffer_keep: float | None = 0.30,
        buffer: Duration = 0.05,
        layers: list[str] | None = None,
    ) -> None:
        given = list(_PAPER) if phases is None else phases
        self.phases = [Phase(**phase) if isinstance(phase, dict) else phase for phase in given]
        if not self.phases:
            raise ValueError("`phases` must have at least one phase, got none.")
        if buffer_keep is not None and not 0 <= buffer_keep <= 1:
            raise ValueError(f"`buffer_keep` must be in [0, 1], got {buffer_keep}.")
        check_duration("join", join)
        check_duration("buffer", buffer)
        self.join = join
        self.buffer_keep = buffer_keep
        self.buffer = buffer
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
        self._keep_at, self._threshold_at, self._factor_at = self._resolve(clock)
        self._stairs = Stairs(clock.steps(self.join))
        self._slots = [(gate, slots_of(trainer, gate)) for gate in self._gates.values()]
        keep_settings_live(pl_module, trainer)
        warn_of_risks(self, trainer, pl_module)

    def _resolve(self, clock: Clock) -> tuple[ValueAt, ValueAt, ValueAt]:
        """Return keep target, threshold and factor as functions of the step."""
        starts = [clock.steps(phase.begin) for phase in self.phases]
        if starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
            raise ValueError(
                "Phases must begin one after the other, the first at step 0, got steps "
                f"{', '.join(map(str, starts))}."
            )
        width = clock.steps(self.join)
        keeps, keep_starts = [phase.keep for phase in self.phases], list(starts)
        stop = self.buffer_keep
        if stop is not None and len(keeps) > 1 and keeps[-1] < stop < keeps[-2]:
            keeps.insert(-1, stop)
            keep_starts.append(starts[-1] + width + clock.steps(self.buffer))
        return (
            joined(keeps, keep_starts, width),
            joined([phase.threshold for phase in self.phases], starts, width),
            joined([phase.weight_factor for phase in self.phases], starts, width),
        )

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return what this callback sets over the steps."""
        gates = tuple(gate_layers(pl_module, self.layers))
        keep, threshold, factor = self._resolve(clock)
        return [
            Curve("keep", "keep target", keep, gates),
            Curve("threshold", "θ", threshold, gates),
            Curve("factor", "λ factor", factor, gates),
        ]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        forget_logged(trainer)
        stair = self._stairs.new_at(steps_done(trainer, pl_module))
        if stair is not None:
            self._keep, self._threshold = self._keep_at(stair), self._threshold_at(stair)
            for gate, slots in self._slots:
                slots.keep, slots.phase_factor = self._keep, self._factor_at(stair)
                if slots.threshold != self._threshold:
                    set_threshold(gate, slots, self._threshold)
        if logs_now(trainer):
            suffixes = [""] if self.layers is None else [f"/{name}" for name in self._gates]
            for suffix in suffixes:
                log_of_step(pl_module, f"gates/threshold{suffix}", self._threshold)
                log_of_step(pl_module, f"gates/keep_target{suffix}", self._keep)
