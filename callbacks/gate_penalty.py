"""Penalise gate usage in the loss of any LightningModule (section 3.3 of the paper)."""

from collections.abc import Hashable
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from dg_lightning.arguments import checked, renamed
from dg_lightning.budget import (
    MacsCost,
    Usage,
    gates_without_macs,
    unit_costs_by_connections,
    usage_term,
)
from dg_lightning.compute import linear_maps
from dg_lightning.gates import gate_layers, values_by_pattern
from dg_lightning.schedules import (
    Clock,
    Curve,
    Schedule,
    ValueAt,
    as_schedule,
    warn_of_risks,
)
from dg_lightning.training import DeviceScalars, log_step

from ._penalty_term import Penalty, PenaltyTerm


class GatePenalty(Penalty):
    """Adds ``weight * usage`` to the loss, once per forward pass.

    It acts in `on_before_backward`, so the module need not know about gates. Only the gradient
    changes, not the value of the loss. In mixed precision, the penalty is scaled like the loss.
    With automatic gradient accumulation, it is averaged over micro-batches. Rates are averaged over
    all ranks.

    A gate records only its last forward pass. If a step runs the net several times, only the last
    run is penalised. A gate that does not run in a batch is not penalised. In manual optimization,
    the penalty is added to the loss that `manual_backward` receives. If you scale that loss, scale
    `weight` too.

    Args:
        weight: λ, the weight of the usage term. It is a number or a schedule over optimizer steps.
            For example, ``{start: 0, end: 0.02, begin: 3 epochs}`` stays at 0 for three epochs and
            then rises linearly.
        usage: `open_rate` is the mean p of a gate, summed over gates. This is the paper's term, but
            the paper leaves out a gate on the input (see `layers`). `expected_macs` is the expected
            share of the MACs in all linear layers of the module. `target` is the squared distance
            between each gate's rate and the `target` argument. `hinge_below` and `hinge_above`
            measure how far the rate lies below or above `target`.
        rate: Whether rates are means of `p` or of the hard `g`, which has the same gradient as p.
        target: The rate that `target` and the hinges aim at, for all gates or by name pattern
            (default: the keep target of `ThresholdPhases`).
        power: Exponent of the hinges, 1 or 2.
        layers: Name patterns of the gates to penalise, such as ``"*hidden.*"`` (default: all).
        layer_weights: Factors on the weight, by name pattern. The factor is 1 for all other gates.
        unit_costs: Cost of each unit, to weight the means of p or g: a list for each name pattern,
            or `connections`, the number of connections that closing a unit saves.
        name: Suffix of the logged keys, to distinguish several penalties in one Trainer.

    Raises:
        ValueError: If the module has no gate, a pattern matches no gate, `expected_macs` finds no
            linear layer for a gate, or a target is missing.

    | logged key | meaning |
    |---|---|
    | `gates/penalty` | the usage term, before it is weighted |
    | `gates/penalty_weight` | λ times the factors from phases and rescues, averaged over gates |

    >>> GatePenalty(weight=0.1, usage="expected_macs").usage
    'expected_macs'
    """

    @renamed(of="rate")
    @checked
    def __init__(
        self,
        weight: float | Schedule,
        usage: Usage = "open_rate",
        rate: Literal["p", "g"] = "p",
        target: float | dict[str, float] | None = None,
        power: Literal[1, 2] = 2,
        layers: list[str] | None = None,
        layer_weights: dict[str, float] | None = None,
        unit_costs: Literal["connections"] | dict[str, list[float]] | None = None,
        name: str | None = None,
    ) -> None:
        self.weight = as_schedule("weight", weight)
        for value in (self.weight.start, self.weight.end, self.weight.before or 0.0):
            if value < 0:
                raise ValueError(f"`weight` must be at least 0, got {value}.")
        if power != 2 and not usage.startswith("hinge"):
            raise ValueError(f"`power` is not used with `usage={usage!r}`: leave it out.")
        if target is not None and usage in ("open_rate", "expected_macs"):
            raise ValueError(f"`target` is not used with `usage={usage!r}`: leave it out.")
        for wanted in target.values() if isinstance(target, dict) else [target]:
            if wanted is not None and not 0 <= wanted <= 1:
                raise ValueError(f"`target` must be in [0, 1], got {wanted}.")
        for pattern, factor in (layer_weights or {}).items():
            if factor < 0:
                raise ValueError(
                    f"`layer_weights` must be at least 0, got {factor} for {pattern!r}."
                )
        for pattern, costs in unit_costs.items() if isinstance(unit_costs, dict) else ():
            if min(costs) < 0:
                raise ValueError(
                    f"`unit_costs` must be at least 0, got {min(costs)} for {pattern!r}."
                )
        if unit_costs is not None and usage == "expected_macs":
            raise ValueError("`expected_macs` sets its own unit costs: leave `unit_costs` out.")
        self.usage: Usage = usage
        self.rate: Literal["p", "g"] = rate
        self.target = target
        self.power = power
        self.layers = layers
        self.layer_weights = dict(layer_weights or {})
        self.unit_costs = unit_costs
        self.name = name
        self.term = PenaltyTerm({})
        self._weight, self._targets = DeviceScalars(), DeviceScalars()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gates = gate_layers(pl_module, self.layers)
        maps = linear_maps(pl_module)
        if self.usage == "expected_macs" and (unknown := gates_without_macs(gates, maps)):
            raise ValueError(
                f"`usage='expected_macs'` found no linear layer for {', '.join(unknown)}: "
                "declare the layer in the gate's `feeds`, or use `usage='open_rate'`."
            )
        self._prices = None
        if self.usage == "expected_macs":
            self._prices = MacsCost(list(gates.values()), maps)
        costs: dict[str, list[float]] = {}
        if self.unit_costs == "connections":
            costs = {n: unit_costs_by_connections(gate, maps) for n, gate in gates.items()}
        elif self.unit_costs is not None:
            given = values_by_pattern("unit_costs", self.unit_costs, gates, None)
            costs = {n: c for n, c in zip(gates, given, strict=True) if c is not None}
        for name, values in costs.items():
            blocks = gates[name].units // gates[name].block_size
            if len(values) != blocks or min(values) < 0 or sum(values) <= 0:
                raise ValueError(
                    f"`unit_costs` of {name} must be {blocks} numbers, at least 0 and not all 0, "
                    f"got {len(values)} numbers from {min(values)} to {max(values)}."
                )
        self.term = PenaltyTerm(gates, self.rate, costs)
        layer_weights = values_by_pattern("layer_weights", self.layer_weights, gates, 1.0)
        self._layer_weights = DeviceScalars(layer_weights)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._weight_at: ValueAt = self.weight.resolve(Clock.from_trainer(trainer))
        warn_of_risks(self, trainer, pl_module)

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return the curves of the weight, and of the targets that are set."""
        gates = gate_layers(pl_module, self.layers)
        suffix, weight = "" if self.name is None else f" {self.name}", self.weight.resolve(clock)
        targets: list[float | None] = [None] * len(gates)
        if isinstance(self.target, dict):
            targets = values_by_pattern("target", self.target, gates, None)
        elif self.target is not None:
            targets = [float(self.target)] * len(gates)
        of_target: dict[float | None, list[str]] = {}
        for name, target in zip(gates, targets, strict=True):
            of_target.setdefault(target, []).append(name)
        curves = []
        follows = self.usage not in ("open_rate", "expected_macs")
        for target, names in of_target.items():
            reads: tuple[str, ...] = ("factor",)
            if follows and target is None:
                reads = ("factor", "keep" if self.rate == "p" else "keep of g")
            curves.append(Curve("weight", f"λ{suffix}", weight, tuple(names), reads))
            if target is not None and self.rate == "p":
                constant = as_schedule("target", target).resolve(clock)
                curves.append(Curve("target", f"target{suffix}", constant, tuple(names)))
        return curves

    @override
    def prepare_step(self, trainer: pl.Trainer) -> Hashable:
        weight, shared = self._weight_at(trainer.global_step), self.term.shared(trainer)
        self._mean_weight = weight * sum(state.factor for state in shared) / len(shared)
        self._weight.set([weight])
        self._targets.set(self._target_rates(trainer))
        if self._prices is not None:
            self._prices.update()
        if self.usage != "hinge_below":  # this usage never closes gates
            for state in shared:
                state.penalty_begun = state.penalty_begun or weight * state.factor > 0
        return self.term.prepare(trainer)

    @override
    def add_penalty(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        # `open_rate` is linear, so its gradient does not depend on other processes.
        rates = self.term.rates(trainer, pl_module, loss, over_ranks=self.usage != "open_rate")
        if rates is None:
            return
        usage = usage_term(
            self.usage,
            rates,
            targets=self._targets.on(rates),
            power=self.power,
            layer_weights=self._layer_weights.on(rates) if self.layer_weights else None,
            prices=self._prices,
        )
        self.term.add(trainer, pl_module, loss, self._weight.on(rates)[0] * usage)
        self.term.record_usage(usage)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        if self.term.usage is not None:
            suffix = "" if self.name is None else f"/{self.name}"
            log_step(pl_module, {f"gates/penalty{suffix}": self.term.usage})
            log_step(pl_module, {f"gates/penalty_weight{suffix}": self._mean_weight})

    def _target_rates(self, trainer: Any) -> list[float]:
        """Return the target rate of each gate."""
        if self.usage in ("open_rate", "expected_macs"):
            return []
        gates = self.term.gates
        if isinstance(self.target, float | int):
            return [float(self.target)] * len(gates)
        phases = [state.keep for state in self.term.shared(trainer)]
        given = values_by_pattern("target", self.target or {}, gates, None)
        both = [keep if own is None else own for own, keep in zip(given, phases, strict=True)]
        if missing := [name for name, value in zip(gates, both, strict=True) if value is None]:
            raise ValueError(
                f"`usage={self.usage!r}` needs a `target` for {', '.join(missing)}: set one, or "
                "add ThresholdPhases, which sets keep targets."
            )
        return [value for value in both if value is not None]
