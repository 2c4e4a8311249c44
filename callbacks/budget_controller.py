"""Hold a compute budget with a controller that adjusts the weight of a penalty."""

from collections.abc import Hashable, Iterable
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from dg_lightning.arguments import checked, renamed
from dg_lightning.budget import (
    FrozenGates,
    Measure,
    Method,
    Multiplier,
    Regulator,
    Timetable,
    check_budget,
    gate_budgets,
    gate_loads,
    usage_by_budget,
)
from dg_lightning.gates import GateLike, gate_layers, init_recorded_gates
from dg_lightning.schedules import (
    Clock,
    Curve,
    Duration,
    Quantity,
    Schedule,
    check_duration,
    warn_of_risks,
)
from dg_lightning.training import (
    DeviceScalars,
    copy_gates_to_averages,
    is_due,
    is_replayed,
    log_step,
)
from dg_lightning.training.checkpoint import warn_unfinished_epoch
from dg_lightning.training.module import GatedModule

from ._penalty_term import Penalty, PenaltyTerm
from ._shared import DeferredStateCallback, mean_over_ranks, state_key


class BudgetController(DeferredStateCallback, Penalty):
    """Brings gates to a budget of open units or MACs and keeps them there.

    Like `GatePenalty`, it penalises expected usage. A controller adjusts the penalty weight λ to
    the measured usage of the hard gates, including the cost of GateNets. The allowed share falls
    from the usage at `begin` to the budget at `until`. At `freeze_at`, the gates are frozen and
    then land on the budget: over several steps, their logits are shifted in proportion to unit
    costs until the budget is used but not exceeded. Units in a gate keep the order they learned.
    After `freeze_at`, only the other weights are trained.

    The budget is measured on validation inputs, if there are any. If training batches use a
    different share, the target is corrected by the ratio after every validation. The frozen gates
    are also copied to weight averages (EMA, SWA).

    Args:
        budget: The allowed share of the dense MACs or of all units, in (0, 1]. A dict sets one
            share for each group of gates, by name pattern
            (`{"hidden.0.*": 0.3, "hidden.1.*": 0.2}`).
        measure: `macs` or `open_rate`. MACs are counted over all linear layers in the module or,
            with groups, over the layers behind a group's gates.
        method: `pi` is a proportional-integral controller on log λ. `dual` is ascent on the
            Lagrangian. `shift` uses no penalty and instead shifts logits up or down until the
            allowed share is used. Use `shift` for gates that scale (`scale: probability`). Their
            closed units get no gradient from the loss, so units that a penalty closed would not
            reopen. `balance` moves the bias of every block after each pass until the allowed share
            of tokens opens it, without a loss term (arXiv:2408.15664), so no block dies and all
            are used alike. It needs `measure="open_rate"` and gates that depend on the input.
            Start gates at the budget with `initial_open_rate`, and apart with `initial_spread`.
            With `policy: top_k`, each token opens exactly the budget, and only loads are balanced.
        begin: When the penalty begins.
        until: When the budget should be reached.
        freeze_at: When the gates are frozen.
        every_n_steps: Optimizer steps between measurements (default: 1/200 of the training run).
        initial_weight: The initial λ.
        max_weight: The largest λ.
        layers: Name patterns of the gates to penalise if there is a single budget (default: all).
        name: Suffix of the logged keys, to distinguish several penalties in one Trainer.

    Raises:
        ValueError: If the budget is below what the model uses with all gates at their floors,
            including GateNets and ungated layers, or if another penalty acts on the same gates.

    | logged key | meaning |
    |---|---|
    | `gates/penalty` | penalised usage, with the suffix `/<pattern>` for several budgets |
    | `gates/penalty_weight` | λ, with the same suffix |
    | `gates/load_spread/<gate>` | standard deviation of block loads over their mean (`balance`) |
    | `gates/budget_used`, `gates/budget_allowed` | used and allowed shares, with the same suffix |

    >>> BudgetController(budget=0.25).measure
    'macs'
    """

    @renamed(landing="freeze_at")
    @checked
    def __init__(
        self,
        budget: float | dict[str, float],
        measure: Measure = "macs",
        method: Method = "pi",
        begin: Duration = "5%",
        until: Duration = "30%",
        freeze_at: Duration = "40%",
        every_n_steps: int | None = None,
        initial_weight: float = 0.1,
        max_weight: float = 100.0,
        layers: list[str] | None = None,
        name: str | None = None,
    ) -> None:
        check_budget(budget, layers, initial_weight, max_weight)
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {every_n_steps}.")
        if method == "balance" and measure != "open_rate":
            raise ValueError(
                f"`method='balance'` needs `measure='open_rate'`, got {measure!r}: it sets the "
                "share of tokens that open each block."
            )
        for argument, when in (("begin", begin), ("until", until), ("freeze_at", freeze_at)):
            check_duration(argument, when)
        self.budget = dict(budget) if isinstance(budget, dict) else budget
        self.measure, self.method = measure, method
        self.begin, self.until, self.freeze_at = begin, until, freeze_at
        self.initial_weight, self.max_weight = initial_weight, max_weight
        self.every_n_steps, self.layers, self.name = every_n_steps, layers, name
        self.term = PenaltyTerm({})
        self._reset()

    def _reset(self) -> None:
        self._regulators: dict[str, Regulator] = {}
        self._measured_at = 0
        self._penalizes = False  # whether the penalty acts in the current step
        self._target = DeviceScalars([0.0])  # allowed shares, for the method `balance`
        self.frozen = False  # whether the gates have stopped learning
        self._held: FrozenGates | None = None  # parameters of the frozen gates

    @cached_property  # Lightning reads it in every hook of every step
    @override
    def state_key(self) -> str:
        return state_key(self, layers=self.layers, name=self.name)

    @property
    def _groups(self) -> dict[str, float]:
        """The budget of each group of gates. A single budget is one group named ''."""
        return self.budget if isinstance(self.budget, dict) else {"": self.budget}

    @property
    def landed(self) -> bool:
        """Whether the gates have been shifted onto their budget."""
        return any(regulator.landing.landed for regulator in self._regulators.values())

    @property
    def reached(self) -> float | dict[str, float]:
        """The share that deployed gates used when last measured, by pattern for several budgets."""
        shares = {name: regulator.reached for name, regulator in self._regulators.items()}
        return shares if isinstance(self.budget, dict) else shares.get("", 0.0)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        everything = gate_layers(pl_module)
        known = self.term.gates.values()
        if trainer.global_step == 0 or not all(gate in everything.values() for gate in known):
            self._reset()
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        unfreezes = any(isinstance(callback, BaseFinetuning) for callback in callbacks)
        budgets = gate_budgets(
            pl_module,
            self._groups,
            self.layers,
            self.measure,
            trained_later=unfreezes,
            balance=self.method == "balance",
        )
        gates: dict[str, GateLike] = {}
        fixed = [n for b in budgets.values() for n, g in b.gates.items() if not g.input_dependent]
        if self.method == "balance" and fixed:
            raise ValueError(
                f"`method='balance'` needs gates that depend on the input, got {fixed[0]}: use "
                "another method, or `kind: dynamic`."
            )
        for name, budget in budgets.items():
            multiplier = Multiplier(self.method, self.initial_weight, self.max_weight)
            regulator = self._regulators.setdefault(name, Regulator(name, budget, multiplier))
            regulator.budget = regulator.landing.budget = budget
            gates |= budget.gates
        self.term = PenaltyTerm(gates)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The validation that Lightning skips corrects the budget. Our modules warn for all.
        if trainer.state.fn == "fit" and not isinstance(pl_module, GatedModule):
            warn_unfinished_epoch(trainer, checkpoint)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        for regulator in self._regulators.values():
            regulator.budget.check_feasible(regulator.name)
            regulator.warn_if_too_sparse()
        times = self.begin, self.until, self.freeze_at, self.every_n_steps
        self._times = Timetable.resolve(Clock.from_trainer(trainer), *times)
        warn_of_risks(self, trainer, pl_module)
        init_recorded_gates(self.term.gates.values())
        for shared in self.term.shared(trainer):
            shared.controlled = True
        if self.frozen:
            self._freeze(trainer, pl_module)

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return the curve of each allowed share, assuming full usage at `begin`."""
        curves = []
        freezes_at = clock.steps(self.freeze_at, "freeze_at")
        reads: tuple[Quantity, ...] = ("factor",) if self.has_term else ()
        for pattern, share in self._groups.items():
            gates = tuple(gate_layers(pl_module, [pattern] if pattern else self.layers))
            allowed = Schedule(1.0, share, "exponential", self.begin, self.until).resolve(clock)
            label = f"allowed {self.measure} {pattern}".strip()
            curves.append(Curve("budget", label, allowed, gates, reads, freezes_at))
        return curves

    def checkpoint_risks(self, callbacks: Iterable[Any], clock: Clock) -> list[str]:
        """Return a warning if a checkpoint may be kept from before the gates meet the budget."""
        landed = Timetable.resolve(clock, self.begin, self.until, self.freeze_at, None).landed
        chosen = [c for c in callbacks if isinstance(c, ModelCheckpoint) and c.monitor]
        return [
            f"ModelCheckpoint(monitor={other.monitor!r}) may keep a checkpoint from before step "
            f"{landed}, when the gates meet their budget: test the last checkpoint (`save_last: "
            "true`) instead, or check the MACs of the chosen one."
            for other in chosen
            if other.save_top_k
        ]

    @override
    def prepare_step(self, trainer: pl.Trainer) -> Hashable:
        begun = trainer.global_step >= self._times.begin and self.has_term
        for shared in self.term.shared(trainer):
            shared.penalty_begun = bool(shared.penalty_begun) or (begun and shared.factor > 0)
        self._penalizes = begun and self._held is None
        for regulator in self._regulators.values():
            regulator.budget.update_prices()
            if self._penalizes and regulator.start is None:
                return None  # measure once before the penalty starts
        if self._balances(trainer):
            if any(regulator.start is None for regulator in self._regulators.values()):
                return None
            progress = self._times.progress_at(trainer.global_step)
            self._target.set([r.target_load(progress) for r in self._regulators.values()])
        return self._penalizes, self._balances(trainer), self.term.prepare(trainer)

    @property
    def has_term(self) -> bool:
        """Whether a penalty is added to the loss."""
        return self.method in ("pi", "dual")

    def _balances(self, trainer: pl.Trainer) -> bool:
        """Return True if this step moves the biases of blocks."""
        begun = self.method == "balance" and trainer.global_step >= self._times.begin
        return begun and self._held is None

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_after_backward(trainer, pl_module)
        if self._balances(trainer) and not is_replayed(pl_module):
            mean = partial(mean_over_ranks, trainer)
            passes = trainer.accumulate_grad_batches
            for regulator in self._regulators.values():
                regulator.begin(mean)
            self.prepare_step(trainer)
            for index, regulator in enumerate(self._regulators.values()):
                target = self._target.on(next(iter(regulator.budget.gates.values())).threshold)
                regulator.balance(target[index], passes, mean)

    @override
    def add_penalty(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if not self._penalizes:
            return
        for regulator in self._regulators.values():
            regulator.begin(partial(mean_over_ranks, trainer))
        rates = self.term.rates(trainer, pl_module, loss)
        if rates is not None:
            usage = self._usage(rates)
            pairs = zip(self._regulators.values(), usage, strict=True)
            term = torch.stack([regulator.penalty(used) for regulator, used in pairs]).sum()
            self.term.add(trainer, pl_module, loss, term)
            self.term.record_usage(usage)

    def _usage(self, rates: Tensor) -> Tensor:
        return usage_by_budget([r.budget for r in self._regulators.values()], rates)

    def _log_penalty(self, pl_module: Any) -> None:
        if any(is_due(pl_module.trainer, self._key(name, "penalty")) for name in self._regulators):
            penalised = self.term.usage if self._penalizes else None
            if penalised is None:  # no penalised pass on this rank yet
                penalised = self._usage(self.term.last_rates())
            usages = mean_over_ranks(pl_module.trainer, penalised.double())
            for usage, (name, regulator) in zip(usages, self._regulators.items(), strict=True):
                weight = regulator.multiplier.value if self._penalizes else 0.0
                self._log(pl_module, name, penalty=usage, penalty_weight=weight)

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
        self._log_penalty(pl_module)
        if self._held is not None:
            self._held.hold()
        step, times = trainer.global_step, self._times
        lands = not self.landed and step >= (times.landed if self.frozen else times.freeze_at)
        due = step // times.interval > self._measured_at // times.interval
        is_new = step > self._measured_at and (due or lands)
        if is_new:
            self._measured_at = step
            self._measure(trainer, pl_module, step)
        for name, regulator in self._regulators.items():
            if regulator.used is None:  # callbacks may monitor the keys from the first batch on
                regulator.measure(partial(mean_over_ranks, trainer))
                is_new = True
            allowed = regulator.allowed(self._times.progress_at(self._measured_at))
            self._log(pl_module, name, is_new, budget_used=regulator.used, budget_allowed=allowed)
        if self.method == "balance" and is_new:
            for name, gate in self.term.gates.items():
                loads = mean_over_ranks(trainer, gate_loads(gate))
                spread = loads.std(correction=0) / loads.mean()
                log_step(pl_module, {f"gates/load_spread/{name}": spread}, always=True)

    def _measure(self, trainer: Any, pl_module: pl.LightningModule, step: int) -> None:
        """Measure the usage, then adjust λ or shift logits onto the budget."""
        mean = partial(mean_over_ranks, trainer)
        for regulator in self._regulators.values():
            used = regulator.measure(mean)
            if self._held is not None:
                regulator.land(used, self._times.landing_progress(step), mean)
            elif self._times.begin <= step < self._times.freeze_at:
                regulator.control(used, self._times.progress_at(step), mean, self._times.interval)
        if step >= self._times.freeze_at:
            self._freeze(trainer, pl_module)

    def _freeze(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Freeze the gates and copy them to the weight averages."""
        self.frozen = True
        self._held = FrozenGates(self.term.gates.values())
        for shared in self.term.shared(trainer):
            shared.frozen = True
        copy_gates_to_averages(pl_module, trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for regulator in self._validated(trainer):
            regulator.start_validation()

    @override
    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        for regulator in self._validated(trainer):
            regulator.add_validation_batch()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for regulator in self._validated(trainer):
            regulator.end_validation(partial(mean_over_ranks, trainer))
        if self.frozen and self._validated(trainer):
            self._freeze(trainer, pl_module)

    def _validated(self, trainer: pl.Trainer) -> list[Regulator]:
        """Return the regulators that validation updates, if training has taken a step."""
        fits = trainer.state.fn == "fit" and not trainer.sanity_checking
        return list(self._regulators.values()) if fits and trainer.global_step else []

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for regulator in self._regulators.values():
            regulator.report(rehearsal=trainer.fast_dev_run)  # type: ignore[attr-defined]

    @override
    def current_state(self) -> dict[str, Any]:
        return {
            "measured_at": self._measured_at,
            "frozen": self.frozen,
            "budgets": {name: r.state_dict() for name, r in self._regulators.items()},
        }

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._measured_at, self.frozen = state["measured_at"], state["frozen"]
        for regulator in self._regulators.values():
            regulator.load_from(state)
