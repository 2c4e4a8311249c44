"""Hold a compute budget: a controller finds the weight of the penalty."""

import math
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.budget import (
    FrozenGates,
    GateBudget,
    Landing,
    Measure,
    Multiplier,
    gate_budgets,
)
from dg_lightning.gates import assume_open, gate_layers
from dg_lightning.schedules import (
    Clock,
    Curve,
    Duration,
    Schedule,
    ValueAt,
    check_duration,
    warn_of_risks,
)
from dg_lightning.training import copy_gates_to_averages, is_due, log_step

from ._agreement import mean_over_ranks, state_key
from ._penalty_term import Penalty, PenaltyTerm
from ._restored import Restored

__all__ = ["BudgetController"]

_MEASUREMENTS = 200  # over a training run, where `every_n_steps` is not given


class BudgetController(Restored, Penalty):
    """Brings gates to a budget of open units or executed MACs, and holds it.

    It penalises expected usage as `GatePenalty` does, with a weight λ that a controller adjusts by
    what the hard gates really use, decisions included. The allowed share falls from 1 to the budget
    between `begin` and `until`. At `landing` the gates are frozen: the logits of a budget are
    shifted by one amount, so that the budget is used and not exceeded, and units still open in the
    learned order. From then on only the other weights are trained. Averages of the weights (EMA,
    SWA) share the frozen gates; a GateNet that reads averaged features may use a percent or two
    more or less.

    Args:
        budget: The share of the dense MACs or of all units, in (0, 1]; or one for each group of
            gates, by name pattern (`{"hidden.0.*": 0.3, "hidden.1.*": 0.2}`).
        measure: `macs` (of the linear maps of the whole module; with groups, of the maps behind
            their gates) or `open_rate`.
        method: `pi`, a proportional-integral controller on log λ, or `dual`, ascent on the
            Lagrangian.
        begin: When the penalty begins.
        until: When the budget should be reached.
        landing: When the gates are frozen on it.
        every_n_steps: Optimizer steps between measurements; None for 1/200 of the training run.
        initial_weight: The initial λ.
        max_weight: The largest λ.
        layers: Name patterns of the gates to penalise, for a single budget; None for all.
        name: Suffix of the logged keys, to distinguish several penalties of one Trainer.

    Raises:
        ValueError: If the budget cannot be met because gates at their floors, GateNets and maps
            without gates use more, or if another penalty acts on the same gates.

    | logged key | meaning |
    |---|---|
    | `gates/penalty` | the penalised usage; with the suffix `/<pattern>` for several budgets |
    | `gates/penalty_weight` | λ, likewise |
    | `gates/budget_used`, `gates/budget_allowed` | what hard gates use, and may use, likewise |

    >>> BudgetController(budget=0.25).measure
    'macs'
    """

    @checked
    def __init__(
        self,
        budget: float | dict[str, float],
        measure: Measure = "macs",
        method: Literal["pi", "dual"] = "pi",
        begin: Duration = 0.05,
        until: Duration = 0.6,
        landing: Duration = 0.7,
        every_n_steps: int | None = None,
        initial_weight: float = 0.1,
        max_weight: float = 100.0,
        layers: list[str] | None = None,
        name: str | None = None,
    ) -> None:
        for share in budget.values() if isinstance(budget, dict) else [budget]:
            if not 0 < share <= 1:
                raise ValueError(f"`budget` must be in (0, 1], got {share}.")
        if isinstance(budget, dict) and layers is not None:
            raise ValueError("`layers` goes with a single budget; a dict names its gates itself.")
        if not 0 < initial_weight <= max_weight < math.inf:
            raise ValueError(
                "`initial_weight` must be above 0 and at most `max_weight`, got "
                f"{initial_weight} and {max_weight}."
            )
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {every_n_steps}.")
        for moment, duration in (("begin", begin), ("until", until), ("landing", landing)):
            check_duration(moment, duration)
        self.budget = dict(budget) if isinstance(budget, dict) else budget
        self.measure: Measure = measure
        self.method: Literal["pi", "dual"] = method
        self.begin, self.until, self.landing = begin, until, landing
        self.every_n_steps = every_n_steps
        self.initial_weight, self.max_weight = initial_weight, max_weight
        self.layers, self.name = layers, name
        self.term = PenaltyTerm({})
        self._budgets: dict[str, GateBudget] = {}
        self._reset()

    def _reset(self) -> None:
        self._multipliers: dict[str, Multiplier] = {}
        self._landings: dict[str, Landing] = {}
        self._used: dict[str, Tensor] = {}
        self._measured_at = 0
        self._is_frozen = False
        self._frozen: FrozenGates | None = None

    @property
    @override
    def state_key(self) -> str:
        return state_key(self, layers=self.layers, name=self.name)

    @property
    def _groups(self) -> dict[str, float]:
        """The budget of each group of gates; one group without a name for a single budget."""
        return self.budget if isinstance(self.budget, dict) else {"": self.budget}

    @property
    def landed(self) -> bool:
        """Whether the gates are frozen on their budget."""
        return any(landing.landed for landing in self._landings.values())

    @property
    def reached(self) -> dict[str, float]:
        """The last measured usage of hard gates, by budget."""
        landed = {name: landing.used for name, landing in self._landings.items() if landing.landed}
        return {name: float(used) for name, used in self._used.items()} | landed

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        everything = gate_layers(pl_module)
        known = self.term.gates.values()
        if trainer.global_step == 0 or not all(gate in everything.values() for gate in known):
            self._reset()
        self._budgets = gate_budgets(pl_module, self._groups, self.layers, self.measure)
        for name, budget in self._budgets.items():
            multiplier = Multiplier(self.method, self.initial_weight, self.max_weight)
            self._multipliers.setdefault(name, multiplier)
            self._landings.setdefault(name, Landing(budget)).budget = budget
        groups = [budget.gates for budget in self._budgets.values()]
        self.term = PenaltyTerm({name: gate for group in groups for name, gate in group.items()})

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        for name, budget in self._budgets.items():
            budget.refuse_if_impossible(name)
        clock = Clock.from_trainer(trainer)
        self._allowed_at = {n: self._allowed(share, clock) for n, share in self._groups.items()}
        self._begin = clock.steps(self.begin, "begin")
        self._landing = clock.steps(self.landing, "landing")
        length = clock.total_steps or self._landing
        self._interval = self.every_n_steps or max(1, length // _MEASUREMENTS)
        if clock.total_steps is not None:
            # Two steps are left for it: gates are frozen first and land one step later, because p
            # is of before the optimizer's step.
            self._landing = min(self._landing, max(clock.total_steps - 2, 0))
        warn_of_risks(self, trainer, pl_module)
        assume_open(self.term.gates.values())
        for shared in self.term.shared(trainer):
            shared.controlled = True
        if self._is_frozen:
            self._freeze(trainer, pl_module)

    def _allowed(self, share: float, clock: Clock) -> ValueAt:
        """Return the share that may be used over the steps, for one of the budgets."""
        return Schedule(1.0, share, "exponential", self.begin, self.until).resolve(clock)

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return what this callback sets over the steps."""
        curves = []
        for pattern, share in self._groups.items():
            gates = tuple(gate_layers(pl_module, [pattern] if pattern else self.layers))
            label = f"allowed {self.measure} {pattern}".strip()
            curves.append(Curve("budget", label, self._allowed(share, clock), gates))
        return curves

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        begun = trainer.global_step >= self._begin
        for shared in self.term.shared(trainer):
            shared.penalty_active = bool(shared.penalty_active) or (begun and shared.factor > 0)
        presses = begun and self._frozen is None
        if not (presses or any(is_due(trainer, self._key(n, "penalty")) for n in self._budgets)):
            return
        rates = self.term.rates(trainer, pl_module, loss, required=presses)
        if rates is None:
            return
        term = rates.new_zeros(())
        parts = rates.split([len(budget.gates) for budget in self._budgets.values()])
        for (name, budget), part in zip(self._budgets.items(), parts, strict=True):
            weight = self._multipliers[name].on(rates.device) if presses else 0.0
            usage = budget.usage(part)
            term = term + weight * usage
            self._log(pl_module, name, penalty=usage, penalty_weight=weight)
        if presses:
            self.term.add(trainer, pl_module, loss, term)

    def _key(self, name: str, of: str) -> str:
        return "/".join(part for part in ("gates", of, self.name, name) if part)

    def _log(self, pl_module: Any, name: str, always: bool = False, **values: Any) -> None:
        named = {self._key(name, of): value for of, value in values.items()}
        log_step(pl_module, named, always=always)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        if self._frozen is not None:
            self._frozen.hold()
        step = trainer.global_step
        lands = not self.landed and step >= self._landing
        due = step // self._interval > self._measured_at // self._interval
        is_new = step > self._measured_at and (due or lands)
        if is_new:
            self._measured_at = step
            self._measure(trainer, pl_module, step)
        elif not self._used:  # the first figures, for whoever monitors them
            for name, budget in self._budgets.items():
                self._used[name] = mean_over_ranks(trainer, budget.used())
            is_new = True
        for name, used in self._used.items():
            allowed = self._allowed_at[name](self._measured_at)
            self._log(pl_module, name, is_new, budget_used=used, budget_allowed=allowed)

    def _measure(self, trainer: Any, pl_module: pl.LightningModule, step: int) -> None:
        """Measure what is used, and act on it: move λ, or land."""
        for name, budget in self._budgets.items():
            used, rates, expected = budget.measured()
            self._used[name] = used = mean_over_ranks(trainer, used)
            if self._frozen is not None:
                landing = self._landings[name]
                shift = torch.tensor(landing.shift_after(used), device=used.device)
                landing.apply(float(mean_over_ranks(trainer, shift)))  # on all ranks alike
            elif self._begin <= step < self._landing:
                if trainer.world_size > 1:
                    expected = budget.usage(mean_over_ranks(trainer, rates))
                self._multipliers[name].update(used, expected, self._allowed_at[name](step))
        if self._is_frozen or step >= self._landing:
            self._freeze(trainer, pl_module)

    def _freeze(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Freeze the gates, in averages of the weights too."""
        self._is_frozen = True
        self._frozen = FrozenGates(self.term.gates.values())
        for shared in self.term.shared(trainer):
            shared.frozen = True
        copy_gates_to_averages(pl_module, trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, used in self.reached.items():
            line, missed = self._budgets[name].outcome(name, used, self.landed)
            warns = missed and not trainer.fast_dev_run  # type: ignore[attr-defined]
            (rank_zero_warn if warns else rank_zero_info)(f"BudgetController: {line}")

    @override
    def current_state(self) -> dict[str, Any]:
        return {
            "measured_at": self._measured_at,
            "frozen": self._is_frozen,
            "multipliers": {name: m.state_dict() for name, m in self._multipliers.items()},
            "landings": {name: landing.state_dict() for name, landing in self._landings.items()},
        }

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._measured_at = state["measured_at"]
        self._is_frozen = state["frozen"]
        for name in self._multipliers.keys() & state["multipliers"].keys():
            self._multipliers[name].load_state_dict(state["multipliers"][name])
            self._landings[name].load_state_dict(state["landings"][name])
