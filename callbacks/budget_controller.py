"""Hold a compute budget: the user names it, a controller finds the weight of the penalty."""

import math
from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from dg_lightning.averaging import copy_gates_to_averages
from dg_lightning.budget import GateBudget, Measure, gate_budgets
from dg_lightning.landing import FrozenGates, Landing
from dg_lightning.log_steps import log_of_step, logs_now, steps_done
from dg_lightning.multiplier import Multiplier
from dg_lightning.plan import Curve, warn_of_risks
from dg_lightning.protocol import gate_layers
from dg_lightning.schedules import Clock, Duration, Schedule, ValueAt, check_duration
from dg_lightning.step_hooks import only_used_hooks, use_hooks

from ._agreement import mean_over_ranks, refuse_two_penalties
from ._pressure import Pressure

__all__ = ["BudgetController"]

_MEASUREMENTS = 200  # over a training, where `every_n_steps` is not given
_MISSED = 0.05  # of the budget: further off, a landing has failed
_EARLY, _LATE = ["on_before_backward"], ["on_after_backward"]
_WORDS = {"macs": "of the dense MACs", "open_rate": "of the units open"}


@only_used_hooks
class BudgetController(pl.Callback):
    """Brings gates to a budget of open units or executed MACs, and keeps them there.

    It presses on expected usage as `GatePenalty` does, with a weight λ that a controller sets by
    what the hard gates really use, decisions included. The share that may be used falls from all to
    the budget between `begin` and `until`. At `landing` the gates are frozen: all logits of a
    budget are shifted alike, so that it is used and not more, while the order in which units open
    stays as learned; from then on only the weights of the net are trained.

    Args:
        budget: The share of the dense MACs or of all units, in (0, 1]; or one for each of several
            groups of gates, by name pattern (`{"hidden.0.*": 0.3, "hidden.1.*": 0.2}`).
        measure: `macs` (of the linear maps of the whole module; with groups, of the maps behind
            their gates) or `open_rate`.
        method: `pi`, a proportional-integral controller on log λ, or `dual`, ascent on the
            Lagrangian.
        begin: When it begins to press.
        until: When the budget is to be reached.
        landing: When the gates are frozen on it.
        every_n_steps: Optimizer steps between two measurements; 1/200 of the training when None.
        initial_weight: λ to start with.
        max_weight: The largest λ.
        layers: Name patterns of the gates to press on, for a single budget; all when None.
        name: Put behind the logged keys, to tell several penalties of one Trainer apart.

    Raises:
        ValueError: If the budget cannot be met because gates at their floors, GateNets and maps
            without gates use more, or if another penalty presses on the same gates.

    | logged key | meaning |
    |---|---|
    | `gates/penalty` | the usage that is pressed on; `/<pattern>` behind it with several budgets |
    | `gates/penalty_weight` | λ, likewise |
    | `gates/budget_used`, `gates/budget_allowed` | what hard gates use, and may use now, likewise |

    >>> BudgetController(budget=0.25).measure
    'macs'
    """

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
        if measure not in ("macs", "open_rate"):
            raise ValueError(f"`measure` must be macs or open_rate, got {measure!r}.")
        if method not in ("pi", "dual"):
            raise ValueError(f"`method` must be pi or dual, got {method!r}.")
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
        self.initial_weight = initial_weight
        self.max_weight = max_weight
        self.layers = layers
        self.name = name
        self.pressure = Pressure({})
        self._budgets: dict[str, GateBudget] = {}
        self._start_anew()

    def _start_anew(self) -> None:
        self._multipliers: dict[str, Multiplier] = {}
        self._landings: dict[str, Landing] = {}
        self._used: dict[str, Tensor] = {}
        self._measured_at = 0
        self._is_frozen = False
        self._frozen: FrozenGates | None = None

    @cached_property  # Lightning asks for it at every hook
    @override
    def state_key(self) -> str:
        return self._generate_state_key(layers=self.layers, name=self.name)

    @property
    def _groups(self) -> dict[str, float]:
        """The budget of each group of gates; one group without a name for a single budget."""
        return self.budget if isinstance(self.budget, dict) else {"": self.budget}

    @property
    def landed(self) -> bool:
        """Whether the gates stand still on their budget."""
        return any(landing.landed for landing in self._landings.values())

    @property
    def reached(self) -> dict[str, float]:
        """What hard gates used when they were last measured, by budget."""
        landed = {name: landing.used for name, landing in self._landings.items() if landing.landed}
        return {name: float(used) for name, used in self._used.items()} | landed

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        everything = gate_layers(pl_module)
        known = self.pressure.gates.values()
        if trainer.global_step == 0 or not all(gate in everything.values() for gate in known):
            self._start_anew()
        self._budgets = gate_budgets(pl_module, self._groups, self.layers, self.measure)
        for name, budget in self._budgets.items():
            multiplier = Multiplier(self.method, self.initial_weight, self.max_weight)
            self._multipliers.setdefault(name, multiplier)
            self._landings.setdefault(name, Landing(budget)).budget = budget
        pressed = {n: gate for budget in self._budgets.values() for n, gate in budget.gates.items()}
        self.pressure = Pressure(pressed)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        refuse_two_penalties(self, trainer)
        for name, budget in self._budgets.items():
            budget.refuse_if_impossible(name)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        clock = Clock.of(trainer)
        self._allowed_at = {name: self._allowed(b, clock) for name, b in self._budgets.items()}
        self._begin = clock.steps(self.begin)
        # Two steps are left for it: gates are frozen first and land one step later.
        self._landing = min(clock.steps(self.landing), max(clock.total_steps - 2, 0))
        self._interval = self.every_n_steps or max(1, clock.total_steps // _MEASUREMENTS)
        self.pressure.later = None
        use_hooks(self, [*_EARLY, *_LATE], [])
        warn_of_risks(self, trainer, pl_module)
        for slots in self.pressure.slots(trainer):
            slots.controlled = True
        if self._is_frozen:
            self._freeze(trainer, pl_module)

    def _allowed(self, budget: GateBudget, clock: Clock) -> ValueAt:
        """Return the share that may be used over the steps."""
        return Schedule(
            1.0, budget.budget, "exponential", begin=self.begin, until=self.until
        ).resolve(clock)

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return what this callback sets over the steps."""
        curves = []
        for pattern, share in self._groups.items():
            gates = tuple(gate_layers(pl_module, [pattern] if pattern else self.layers))
            allowed = Schedule(1.0, share, "exponential", begin=self.begin, until=self.until)
            label = f"allowed {self.measure} {pattern}".strip()
            curves.append(Curve("budget", label, allowed.resolve(clock), gates))
        return curves

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self.pressure.choose(trainer, pl_module, self, _EARLY, _LATE)
        if not self.pressure.later and self._presses(trainer, pl_module):
            rates = self.pressure.act(
                trainer, pl_module, loss, self._gradient_of, self._reads(loss.device)
            )
            if rates is not None and logs_now(trainer):
                self._log(pl_module, rates)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.pressure.later and self._presses(trainer, pl_module):
            rates = self.pressure.act_later(
                trainer,
                self._gradient_of,
                self._reads(pl_module.device),
                wants_rates=logs_now(trainer),
            )
            if rates is not None:
                self._log(pl_module, rates)

    def _presses(self, trainer: Any, pl_module: Any) -> bool:
        """Tell whether gates are pressed on now, and leave word of it."""
        begun = steps_done(trainer, pl_module) >= self._begin
        for slots in self.pressure.slots(trainer):
            slots.pressing = bool(slots.pressing) or (begun and slots.factor > 0)
        return begun and self._frozen is None

    def _gradient_of(self, rates: Tensor) -> Tensor:
        """Return the derivative of what is pressed on by the rate of each gate, times λ."""
        weights = {name: m.on(rates.device) for name, m in self._multipliers.items()}
        if len(weights) == 1:  # without the operations of parting and joining
            ((name, budget),) = self._budgets.items()
            return budget.usage_gradient(rates, weights[name])
        parts = zip(self._budgets.items(), self._by_budget(rates), strict=True)
        return torch.cat([b.usage_gradient(part, weights[name]) for (name, b), part in parts])

    def _reads(self, device: torch.device) -> list[Tensor]:
        """Return the tensors that it is computed from."""
        multipliers = [m.on(device) for m in self._multipliers.values()]
        return [*multipliers, *(t for budget in self._budgets.values() for t in budget.reads())]

    def _by_budget(self, rates: Tensor) -> tuple[Tensor, ...]:
        sizes = [len(budget.gates) for budget in self._budgets.values()]
        parts: tuple[Tensor, ...] = rates.split(sizes)
        return parts

    def _log(self, pl_module: pl.LightningModule, rates: Tensor) -> None:
        for (name, budget), part in zip(self._budgets.items(), self._by_budget(rates), strict=True):
            weight = self._multipliers[name].value
            log_of_step(pl_module, self._key("gates/penalty", name), budget.usage(part))
            log_of_step(pl_module, self._key("gates/penalty_weight", name), weight)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self.pressure.later:
            self.pressure.let_go()
        if self._frozen is not None:
            self._frozen.hold()
        step = steps_done(trainer, pl_module)
        # Gates are frozen first and land one step later: p is of before the optimizer's step.
        lands = not self.landed and step >= self._landing
        due = step // self._interval > self._measured_at // self._interval
        if step > self._measured_at and (due or lands):
            self._measured_at = step
            self._measure(trainer, pl_module, step)

    def _measure(self, trainer: Any, pl_module: pl.LightningModule, step: int) -> None:
        """See what is used, and act on it: move λ, or land."""
        for name, budget in self._budgets.items():
            used, rates, expected = budget.measured()
            used = mean_over_ranks(trainer, used.clone())
            allowed = self._allowed_at[name](step)
            log_of_step(pl_module, self._key("gates/budget_used", name), used)
            log_of_step(pl_module, self._key("gates/budget_allowed", name), allowed)
            self._used[name] = used
            if self._frozen is not None:
                landing = self._landings[name]
                shift = torch.tensor(landing.shift_after(used), device=used.device)
                landing.apply(float(mean_over_ranks(trainer, shift)))  # on all ranks alike
            elif self._begin <= step < self._landing:
                if trainer.world_size > 1:
                    expected = budget.usage(mean_over_ranks(trainer, rates))
                self._multipliers[name].update(used, expected, allowed)
        if self._is_frozen or step >= self._landing:
            self._freeze(trainer, pl_module)

    def _freeze(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Let nothing change the gates from now on, an average of weights included."""
        self._is_frozen = True
        self._frozen = FrozenGates(self.pressure.gates.values())
        for slots in self.pressure.slots(trainer):
            slots.frozen = True
        copy_gates_to_averages(pl_module, trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.pressure.forget()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.pressure.let_go()
        for name, used in self.reached.items():
            budget = self._budgets[name].budget
            state = "landed" if self.landed else "training ended before the landing"
            what = f"{_WORDS[self.measure]}{f' of {name}' if name else ''}"
            line = f"BudgetController: {used:.2%} {what} for a budget of {budget:.2%} ({state})."
            missed = self.landed and abs(used / budget - 1) > _MISSED
            if missed and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                rank_zero_warn(
                    f"{line} Many units have the same p and open together, or other gates use more "
                    "than is left: press longer (`begin`, `landing`), or raise the gates' learning "
                    "rate."
                )
            else:
                rank_zero_info(line)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "measured_at": self._measured_at,
            "frozen": self._is_frozen,
            "multipliers": {name: m.state_dict() for name, m in self._multipliers.items()},
            "landings": {name: landing.state_dict() for name, landing in self._landings.items()},
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._measured_at = state_dict["measured_at"]
        self._is_frozen = state_dict["frozen"]
        for own, saved in (
            (self._multipliers, state_dict["multipliers"]),
            (self._landings, state_dict["landings"]),
        ):
            for name in own.keys() & saved.keys():
                own[name].load_state_dict(saved[name])

    def _key(self, key: str, name: str) -> str:
        return "/".join(part for part in (key, self.name, name) if part)
