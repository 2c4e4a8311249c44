"""Penalty on gate usage, added to the loss of any LightningModule (section 3.3 of the paper)."""

import math
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from dg_lightning.compute import linear_maps
from dg_lightning.log_steps import log_of_step, logs_now, steps_done
from dg_lightning.penalties import (
    MacsPrices,
    Usage,
    unit_costs_by_connections,
    usage_gradient,
    usage_term,
    without_a_price,
)
from dg_lightning.plan import Curve, warn_of_risks
from dg_lightning.protocol import by_pattern, gate_layers
from dg_lightning.schedules import Clock, Schedule, ValueAt, as_schedule
from dg_lightning.slots import slots_of
from dg_lightning.step_hooks import only_used_hooks, use_hooks

from ._agreement import refuse_two_penalties
from ._pressure import Pressure

__all__ = ["GatePenalty"]

_EARLY, _LATE = ["on_before_backward", "on_train_batch_end"], ["on_after_backward"]


@only_used_hooks
class GatePenalty(pl.Callback):
    """Adds the gradient of ``weight * usage`` to the one of the loss, once for every forward pass.

    It acts in `on_before_backward`, or on static gates in `on_after_backward`, so that the module
    needs to know nothing of gates; the value of the loss stays the module's own. In mixed precision
    the penalty is scaled as the loss is; with automatic optimization and gradient accumulation it
    is averaged over the micro-batches; with several processes the rates are taken over all of them.

    A gate remembers its last forward pass only: where a step runs the net several times, the last
    one is penalised.

    Args:
        weight: λ, the weight of the usage term: a number, or a schedule of the optimizer step
            (``{start: 0, end: 0.02, begin: 3 epochs}``: a warmup at 0, then a linear ramp).
        usage: `linear` is the sum over gates of the mean p (the paper's term, which leaves a gate
            on the input out: see `layers`); `expected_macs` the share of the MACs of all linear
            maps of the module that the mean p let expect; `target` the squared distance of each
            gate's rate to `target`; `hinge_below` and `hinge_above` what it lacks to, or has above,
            `target`.
        of: Whether rates are of `p` or of the hard `g`, whose gradient is the one of p.
        target: The rate that `target` and the hinges mean, one for all gates or by name pattern;
            None takes the keep target that `ThresholdPhases` gives the gates.
        power: 1 or 2, of the hinges.
        layers: Name patterns of the gates to press on (``"*hidden.*"``); all when None.
        layer_weights: Multiples of the weight for single gates, by name pattern; 1 for the others.
        unit_costs: What each unit costs, for means of p or g that are weighted by it:
            `connections` counts what its closing saves, or a list by name pattern.
        name: Put behind the logged keys, to tell several penalties of one Trainer apart.

    Raises:
        ValueError: If the module has no gate, a pattern fits none, `expected_macs` does not know
            which linear map a gate belongs to, or a target is missing.

    | logged key | meaning |
    |---|---|
    | `gates/penalty` | the usage term, before the weight |
    | `gates/penalty_weight` | λ, with the factors of phases and rescues (mean over gates) |

    >>> GatePenalty(weight=0.1, usage="expected_macs").usage
    'expected_macs'
    """

    def __init__(
        self,
        weight: float | Schedule,
        usage: Usage = "linear",
        of: Literal["p", "g"] = "p",
        target: float | dict[str, float] | None = None,
        power: Literal[1, 2] = 2,
        layers: list[str] | None = None,
        layer_weights: dict[str, float] | None = None,
        unit_costs: Literal["connections"] | dict[str, list[float]] | None = None,
        name: str | None = None,
    ) -> None:
        self.weight = as_schedule("weight", weight)
        for value in (self.weight.start, self.weight.end, self.weight.before or 0.0):
            if not 0 <= value < math.inf:
                raise ValueError(f"`weight` must be at least 0 and finite, got {value}.")
        if usage not in get_args(Usage):
            raise ValueError(f"`usage` must be one of {get_args(Usage)}, got {usage!r}.")
        if of not in ("p", "g"):
            raise ValueError(f"`of` must be p or g, got {of!r}.")
        if power not in (1, 2):
            raise ValueError(f"`power` must be 1 or 2, got {power}.")
        if target is not None and usage in ("linear", "expected_macs"):
            raise ValueError(f"`target` has no meaning with `usage={usage!r}`: leave it out.")
        for rate in target.values() if isinstance(target, dict) else [target]:
            if rate is not None and not 0 <= rate <= 1:
                raise ValueError(f"`target` must be in [0, 1], got {rate}.")
        for pattern, factor in (layer_weights or {}).items():
            if not 0 <= factor < math.inf:
                raise ValueError(
                    f"`layer_weights` must be at least 0 and finite, got {factor} for {pattern!r}."
                )
        if unit_costs is not None and usage == "expected_macs":
            raise ValueError("`expected_macs` has its own prices: leave `unit_costs` out.")
        self.usage: Usage = usage
        self.of: Literal["p", "g"] = of
        self.target = target
        self.power = power
        self.layers = layers
        self.layer_weights = dict(layer_weights or {})
        self.unit_costs = unit_costs
        self.name = name
        self.pressure = Pressure({})
        self._kept_terms: dict[str, Any] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        gates = gate_layers(pl_module, self.layers)
        maps = linear_maps(pl_module)
        if self.usage == "expected_macs" and (unknown := without_a_price(gates, maps)):
            raise ValueError(
                f"`usage='expected_macs'` knows no linear map of {', '.join(unknown)}: "
                "declare it in `feeds` of the gate, or use `usage='linear'`."
            )
        self._prices = None
        if self.usage == "expected_macs":
            self._prices = MacsPrices(list(gates.values()), maps)
        self._layer_weights = list(by_pattern("layer_weights", self.layer_weights, gates, 1.0))
        costs: dict[str, list[float]] = {}
        if self.unit_costs == "connections":
            costs = {n: unit_costs_by_connections(gate, maps) for n, gate in gates.items()}
        elif self.unit_costs is not None:
            given = by_pattern("unit_costs", self.unit_costs, gates, None)
            costs = {n: c for n, c in zip(gates, given, strict=True) if c is not None}
        for name, values in costs.items():
            blocks = gates[name].units // gates[name].block_size
            if len(values) != blocks or min(values) < 0 or sum(values) <= 0:
                raise ValueError(
                    f"`unit_costs` of {name} must be {blocks} numbers, at least 0 and not all 0, "
                    f"got {len(values)} from {min(values)} to {max(values)}."
                )
        self.pressure = Pressure(gates, self.of, costs)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        refuse_two_penalties(self, trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._weight_at: ValueAt = self.weight.resolve(Clock.of(trainer))
        self.pressure.later = self._kept_terms = None
        use_hooks(self, [*_EARLY, *_LATE], [])
        warn_of_risks(self, trainer, pl_module)

    def plan(self, clock: Clock, pl_module: pl.LightningModule) -> list[Curve]:
        """Return what this callback sets over the steps."""
        gates = tuple(gate_layers(pl_module, self.layers))
        suffix = "" if self.name is None else f" {self.name}"
        curves = [Curve("weight", f"λ{suffix}", self.weight.resolve(clock), gates)]
        if isinstance(self.target, float | int) and self.of == "p":
            constant = as_schedule("target", self.target).resolve(clock)
            curves.append(Curve("keep", f"target{suffix}", constant, gates))
        return curves

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self.pressure.choose(trainer, pl_module, self, _EARLY, _LATE)
        if self.pressure.later:
            return
        weight, terms = self._weight(trainer, pl_module), self._terms(trainer, loss.device)
        rates = self.pressure.act(
            trainer,
            pl_module,
            loss,
            lambda rates: usage_gradient(self.usage, rates, **terms),
            self._tensors(terms),
            weight=weight,
            reduce=self.usage != "linear",  # whose gradient does not depend on other processes
        )
        if rates is not None and logs_now(trainer):
            self._log(trainer, pl_module, weight, usage_term(self.usage, rates, **terms))

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.pressure.later:
            return
        weight, terms = self._weight(trainer, pl_module), self._terms(trainer, pl_module.device)
        rates = self.pressure.act_later(
            trainer,
            lambda rates: usage_gradient(self.usage, rates, **terms),
            self._tensors(terms),
            weight=weight,
            wants_rates=logs_now(trainer),
        )
        if rates is not None:
            self._log(trainer, pl_module, weight, usage_term(self.usage, rates, **terms))

    def _weight(self, trainer: Any, pl_module: Any) -> float:
        """Return λ, and leave word if it presses."""
        weight = self._weight_at(steps_done(trainer, pl_module))
        if self.usage != "hinge_below":  # which closes nothing
            for slots in self.pressure.slots(trainer):
                if not slots.pressing:
                    slots.pressing = weight * slots.factor > 0
        return weight

    def _log(self, trainer: Any, pl_module: pl.LightningModule, weight: float, usage: Any) -> None:
        suffix = "" if self.name is None else f"/{self.name}"
        factors = [slots.factor for slots in self.pressure.slots(trainer)]
        log_of_step(pl_module, f"gates/penalty{suffix}", usage)
        log_of_step(
            pl_module, f"gates/penalty_weight{suffix}", weight * sum(factors) / len(factors)
        )

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

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.pressure.let_go()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.pressure.forget()

    def _terms(self, trainer: Any, device: torch.device) -> dict[str, Any]:
        """Return the arguments of the usage term, as they are now, on a device."""
        if self._prices is not None:
            self._prices.refresh()
        if self._kept_terms is not None:
            return self._kept_terms
        weights = None
        if self.layer_weights:
            weights = self.pressure.constant("layer weights", self._layer_weights, device)
        terms = {
            "targets": self._targets(trainer, device),
            "power": self.power,
            "layer_weights": weights,
            "prices": self._prices,
        }
        if terms["targets"] is None:  # nothing of it changes in a training
            self._kept_terms = terms
        return terms

    @staticmethod
    def _tensors(terms: dict[str, Any]) -> list[Tensor]:
        prices = terms["prices"]
        found = [terms["targets"], terms["layer_weights"], None if prices is None else prices.form]
        return [tensor for tensor in found if tensor is not None]

    def _targets(self, trainer: Any, device: torch.device) -> Tensor | None:
        """Return the rate that each gate is meant to have."""
        if self.usage in ("linear", "expected_macs"):
            return None
        gates = self.pressure.gates
        if isinstance(self.target, float | int):
            values = [float(self.target)] * len(gates)
        else:
            phases = [slots_of(trainer, gate).keep for gate in gates.values()]
            given = by_pattern("target", self.target or {}, gates, None)
            both = [keep if own is None else own for own, keep in zip(given, phases, strict=True)]
            values = [value for value in both if value is not None]
            if len(values) < len(both):
                missing = [name for name, value in zip(gates, both, strict=True) if value is None]
                raise ValueError(
                    f"`usage={self.usage!r}` needs a `target` for {', '.join(missing)}: give one, "
                    "or let ThresholdPhases set keep targets."
                )
        return self.pressure.constant("targets", values, device)
