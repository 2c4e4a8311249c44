"""Detect collapsing gates, then warn, rescue or stop (section 4.1 of the paper)."""

from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from dg_lightning.arguments import as_dataclass, checked
from dg_lightning.collapse import (
    MODES,
    GateFigures,
    GateState,
    GateStatistics,
    Limits,
    Mode,
    Rescue,
    Verdict,
    diagnose,
    open_shares,
    unit_rates,
)
from dg_lightning.gates.protocol import GateLike, floor_of, gate_layers, init_recorded_gates
from dg_lightning.gates.state import shared_state
from dg_lightning.schedules.schedule import Clock
from dg_lightning.training.averaging import keep_settings_live
from dg_lightning.training.step_logging import log_step

from ._shared import DeferredStateCallback, check_step_counting, mean_over_ranks, state_key

_KEPT = 20  # number of recent states kept per gate


class CollapseDetector(DeferredStateCallback):
    """Monitors p and g of every gate and reports failures and their causes.

    Modes: `closed_by_threshold` (p high, g falls to 0), `closed_by_penalty` (p falls too),
    `phase_shock` (a collapse at a phase boundary), `all_open`, `identical_gates`, `flapping`, and
    for GateNets `input_independent`, `dead_units`, `always_on_units`. Nothing is reported before
    the gates begin to close.

    Args:
        action: `warn` only warns. `rescue` also reduces the penalty, lowers θ, raises τ, lifts
            biases or revives units, depending on the mode. It relaxes these measures once the gate
            has been healthy for a while. `stop` ends the training run on all ranks.
        every_n_steps: Optimizer steps between checks. The default is the Trainer's logging
            interval, at most 1/20 of the training run.
        limits: Limits within which a gate counts as healthy.
        modes: The modes to act on (default: all).
        layers: Name patterns of the gates (default: all).

    | logged key | meaning |
    |---|---|
    | `collapse/<mode>` | number of gates in this mode, logged after the mode first occurs |

    >>> CollapseDetector(action="rescue").action
    'rescue'
    """

    @checked
    def __init__(
        self,
        action: Literal["warn", "rescue", "stop"] = "warn",
        every_n_steps: int | None = None,
        limits: Limits | None = None,
        modes: list[Mode] | None = None,
        layers: list[str] | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 2:
            raise ValueError(f"`every_n_steps` must be at least 2, got {every_n_steps}.")
        self.action = action
        self.every_n_steps = every_n_steps
        self.limits = as_dataclass("limits", limits or {}, Limits)
        self.modes = MODES if modes is None else tuple(modes)
        self.layers = layers
        self._gates: dict[str, GateLike] = {}
        self._reset()

    def _reset(self) -> None:
        self.verdicts: list[dict[str, Any]] = []
        self._history: dict[str, list[GateState]] = {}
        self._showing: dict[str, str] = {}
        self._penalized_since: dict[str, int] = {}
        self._rescues: dict[str, Rescue] = {}
        self._counts: dict[str, float] = {}  # number of gates in each mode that has occurred
        self._checked_at = 0
        self._statistics = GateStatistics([])

    @property
    def watched_for_collapse(self) -> list[str]:
        """The names of the watched gates."""
        return list(self._gates)

    @cached_property  # Lightning reads it in every hook of every step
    @override
    def state_key(self) -> str:
        return state_key(self, layers=self.layers, modes=self.modes)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gates = gate_layers(pl_module, self.layers)
        if trainer.global_step == 0 or gates != self._gates:
            self._reset()
        self._gates = gates
        self._statistics = GateStatistics(list(self._gates.values()))
        for name in self._gates:
            self._history.setdefault(name, [])
            self._rescues.setdefault(name, Rescue())

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._total = Clock.from_trainer(trainer).total_steps
        interval = self.every_n_steps or trainer.log_every_n_steps or 50  # type: ignore[attr-defined]
        if self._total is not None:
            interval = min(interval, self._total // 20)
        self._interval = max(2, interval)
        keep_settings_live(pl_module, trainer)
        check_step_counting(self, trainer, pl_module)
        init_recorded_gates(self._gates.values())
        for name, gate in self._gates.items():
            self._rescues[name].restore(trainer, gate)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self._check(trainer, trainer.global_step)
        is_new = self._checked_at == trainer.global_step
        log_step(pl_module, self._counts, always=is_new)

    def _check(self, trainer: Any, step: int) -> None:
        """Collect statistics when a check is due, diagnose the gates and act."""
        # Flips are counted from one step to the next, so a check takes two steps.
        second = self._statistics.previous is not None
        due = (step + 1) // self._interval > (self._checked_at + 1) // self._interval
        if step == self._checked_at or not (second or due):
            return
        self._checked_at = step
        gates = list(self._gates.values())
        if not second:
            self._statistics.record_previous(mean_over_ranks(trainer, open_shares(gates)))
            return
        figures = self._statistics.check(mean_over_ranks(trainer, unit_rates(gates)))
        found: dict[str, Verdict] = {}
        for (name, gate), gate_figures in zip(self._gates.items(), figures, strict=True):
            history = self._history[name]
            history.append(self._state(trainer, name, gate, gate_figures))
            del history[:-_KEPT]
            frozen = shared_state(trainer, gate).frozen  # the gate no longer learns
            verdict = None if frozen else diagnose(history, self.limits)
            if verdict is not None and verdict.mode in self.modes:
                found[name] = verdict
        self._act(trainer, step, found)
        shown = [verdict.mode for verdict in found.values()]
        seen = dict.fromkeys(verdict["mode"] for verdict in self.verdicts)
        self._counts = {f"collapse/{mode}": float(shown.count(mode)) for mode in seen}

    def _state(self, trainer: Any, name: str, gate: GateLike, figures: GateFigures) -> GateState:
        """Combine the measured figures with the state of schedules and penalties."""
        shared = shared_state(trainer, gate)
        if shared.penalty_begun:
            self._penalized_since.setdefault(name, trainer.global_step)
        since = self._penalized_since.get(name, trainer.global_step)
        return GateState(
            trainer.global_step,
            **figures._asdict(),
            floor=floor_of(gate) * gate.block_size / gate.units,
            initial_p=gate.initial_open_rate,
            input_dependent=gate.input_dependent,
            begun=shared.penalty_begun is not False,  # None: no penalty, or a custom one
            fixed=getattr(gate, "k", None) is not None,
            controlled=shared.controlled,
            penalty_share=(trainer.global_step - since) / (self._total or trainer.global_step),
            keep=shared.keep,
            factor=shared.phase_factor,
        )

    def _act(self, trainer: Any, step: int, found: dict[str, Verdict]) -> None:
        for index, (name, gate) in enumerate(self._gates.items()):
            verdict = found.get(name)
            if verdict is not None and self._showing.get(name) != verdict.mode:
                rank_zero_warn(verdict.message(step, name))
                self.verdicts.append({"step": step, "layer": name, "mode": verdict.mode})
            if verdict is None:
                if len(self._history[name]) >= self.limits.patience:
                    self._showing.pop(name, None)
            else:
                self._showing[name] = verdict.mode
            if self.action == "rescue" and not shared_state(trainer, gate).frozen:
                dead = self._statistics.dead_units(index, gate.block_size)
                now = self._history[name][-1]
                done = self._rescues[name].apply(trainer, gate, now, verdict, dead)
                if done is not None:
                    rank_zero_info(f"CollapseDetector at step {step}, {name}: {done}.")
                if done is not None and not done.startswith("healthy"):
                    self._history[name].clear()  # earlier states no longer apply
        if self.action == "stop" and not trainer.fast_dev_run:
            stop = trainer.strategy.reduce_boolean_decision(bool(found), all=False)
            if stop:
                rank_zero_info(f"CollapseDetector stops training at step {step}.")
                trainer.should_stop = True

    @override
    def current_state(self) -> dict[str, Any]:
        return {
            "verdicts": list(self.verdicts),
            "history": {n: [state.as_dict() for state in h] for n, h in self._history.items()},
            "showing": dict(self._showing),
            "penalized_since": dict(self._penalized_since),
            "rescues": {name: rescue.as_dict() for name, rescue in self._rescues.items()},
            "checked_at": self._checked_at,
            "statistics": self._statistics.state_dict(),
        }

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self.verdicts = list(state["verdicts"])
        self._history |= {
            n: [GateState.from_dict(s) for s in h] for n, h in state["history"].items()
        }
        self._showing = dict(state["showing"])
        key = "penalized_since" if "penalized_since" in state else "pressed_since"  # version 0.2
        self._penalized_since = dict(state[key])
        self._rescues |= {name: Rescue(**r) for name, r in state["rescues"].items()}
        self._checked_at = state["checked_at"]
        self._statistics.load_state_dict(state["statistics"])
