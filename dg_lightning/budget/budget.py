"""Compute budgets, which measure the share that gates use and shift gates to meet a target.

Usage is measured as in deployment, with hard gates and floors. It includes the cost of GateNets.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from dg_lightning.budget.penalty import MacsCost, gates_without_macs
from dg_lightning.compute.macs import (
    LinearMap,
    decision_macs,
    decisions,
    dense_decision_macs,
    executed_macs,
    gate_before,
    linear_maps,
)
from dg_lightning.gates.base import Gate
from dg_lightning.gates.protocol import GateLike, deployed_gate, floor_of, gate_layers, logit

Measure: TypeAlias = Literal["macs", "open_rate"]

_MAX_CANDIDATES = 4096
_SAME_SHARE = 1e-3  # relative difference up to which two shares are the same
_MAX_SHORTFALL = 0.5  # shortfall that counts as too large, as a share of the target


@contextmanager
def _deployed(gates: Sequence[GateLike], shifts: Mapping[GateLike, float]) -> Iterator[None]:
    """Temporarily replace recorded gates with deployed gates whose ``z / τ`` is shifted."""
    before = [gate.gate for gate in gates]
    for gate in gates:
        gate.gate = deployed_gate(gate, shifts.get(gate, 0.0)).float()
    try:
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.gate = value


class GateBudget:
    """A budget for a group of gates, as a share of their units or of the MACs in linear layers.

    Args:
        gates: The gates that are penalised and shifted.
        all_gates: All gates of the module.
        maps: The linear layers whose MACs are counted.
        measure: `macs` divides the executed MACs, including those of gate networks, by the dense
            MACs of the linear layers. `open_rate` divides the open units by all units.
        budget: The share that may be used.
    """

    def __init__(
        self,
        gates: Mapping[str, GateLike],
        all_gates: Sequence[GateLike],
        maps: Sequence[LinearMap],
        measure: Measure,
        budget: float,
    ) -> None:
        self.gates = gates
        self.all_gates = all_gates
        self.maps = maps
        self.measure = measure
        self.budget = budget
        self.macs_dense = sum(m.macs_dense for m in maps)
        units = torch.tensor([float(gate.units) for gate in gates.values()])
        self.unit_shares = units / units.sum()
        self.prices = MacsCost(list(gates.values()), maps) if measure == "macs" else None

    @torch.no_grad()
    def used(self, shift: float = 0.0) -> Tensor:
        """Return the share used in the last forward pass, as a 0-d tensor on the gates' device.

        With a nonzero `shift`, return the share that the pass would have used with shifted gates.
        """
        gates = list(self.gates.values())
        concerned = gates if self.measure == "open_rate" else self.all_gates
        with _deployed(concerned, self._shifts(shift)):
            if self.measure == "open_rate":
                opened = [_row_mean(gate.gate.sum(-1)) * gate.block_size for gate in gates]  # type: ignore[union-attr]
                return torch.stack(opened).sum() / sum(gate.units for gate in gates)
            device = self.device
            counts = [executed_macs(m) for m in self.maps]
            counts += [decision_macs(gate, self.maps) for gate in self._deciding()]
            # Counts that do not depend on gates are on the CPU, so reading them needs no sync.
            known = sum(float(count) for count in counts if count.device != device)
            means = [_row_mean(count) for count in counts if count.device == device]
            return (torch.stack(means).sum() + known) / self.macs_dense

    def _deciding(self) -> list[GateLike]:
        """Return the gates whose decisions are part of the counted MACs."""
        own = [m.output_gate for m in self.maps]
        return [g for g in self.all_gates if g in self.gates.values() or g in own]

    def min_share(self) -> float:
        """Return the lowest feasible budget, the share used with every gate at its floor."""
        if self.measure == "open_rate":
            floors = sum(floor_of(gate) * gate.block_size for gate in self.gates.values())
            return floors / sum(gate.units for gate in self.gates.values())
        total = 0.0
        for m in self.maps:
            rows, columns = m.output_gate if m.skips_rows else None, m.input_gate
            total += m.connections * _floor_share(rows) * _floor_share(columns)
        return (total + self.least_decisions() * self.macs_dense) / self.macs_dense

    def max_share(self) -> float:
        """Return the share used with every gate open, which missing connections lower."""
        if self.measure == "open_rate":
            return 1.0
        deciding = sum(dense_decision_macs(gate) for gate in self._deciding())
        return (sum(m.connections for m in self.maps) + deciding) / self.macs_dense

    def closes_all(self, used: float) -> bool:
        """Return True if `used` means that every gate is closed."""
        has_floor = any(floor_of(gate) for gate in self.gates.values())
        return not has_floor and used <= self.min_share() + 1e-6  # allow for rounding

    def least_decisions(self) -> float:
        """Return the share that gate networks alone use, with every gate at its floor."""
        total = 0
        for gate in self._deciding():
            before = gate_before(gate, self.maps)
            inputs = None if before is None else torch.tensor(floor_of(before) * before.block_size)
            total += int(gate.decision_macs(inputs)) * decisions(gate)
        return total / self.macs_dense

    @property
    def device(self) -> torch.device:
        """The device that the gates are on."""
        return next(iter(self.gates.values())).threshold.device

    @property
    def resolution(self) -> float:
        """The share that the most expensive block uses, which limits how exactly gates can land."""
        total = self.macs_dense
        if self.measure == "open_rate":
            total = sum(gate.units for gate in self.gates.values())
        return max(self._price(gate) for gate in self.gates.values()) / total

    @property
    def depends_on_input(self) -> bool:
        """Whether the used share depends on the input."""
        gates = self.all_gates if self.measure == "macs" else self.gates.values()
        return any(gate.input_dependent for gate in gates)

    def check_feasible(self, name: str) -> None:
        """Raise ValueError if gates at their floors use more than the budget."""
        if (min_share := self.min_share()) > self.budget * (1 + _SAME_SHARE):
            deciding = self.least_decisions() if self.measure == "macs" else 0.0
            raise ValueError(
                f"The budget {self.budget:.4g}{f' of {name}' if name else ''} cannot be met: "
                f"with every gate at its floor, usage is {min_share:.4g}, of which "
                f"{deciding:.4g} is for gate networks. Raise the budget, lower `min_open`, or use "
                "smaller GateNets."
            )

    def usage(self, rates: Tensor) -> Tensor:
        """Return the usage to penalise, given the mean p of each gate."""
        if self.prices is not None:
            return self.prices.usage(rates)
        if self.unit_shares.device != rates.device:  # copying forces a device sync
            self.unit_shares = self.unit_shares.to(rates.device)
        return (rates * self.unit_shares).sum()

    def update_prices(self) -> None:
        """Update MAC costs after connections have changed."""
        if self.prices is not None:
            self.prices.update()

    @torch.no_grad()
    def shift_for(self, target: float) -> float:
        """Return the amount to pass to `shift` so that at most `target` is used.

        Return 0 if nothing has to change.
        """
        distances = [
            (logit(gate.threshold) - logit(gate.probability.flatten())) / price
            for gate, price in self._shifts(1.0).items()
            if gate.probability is not None and price > 0
        ]
        needed = torch.cat(distances).unique()  # the shift that opens each unit
        if len(needed) > _MAX_CANDIDATES:  # with per-token gates there are millions
            chosen = torch.arange(_MAX_CANDIDATES, device=needed.device) * (len(needed) - 1)
            needed = needed[chosen // (_MAX_CANDIDATES - 1)]
        needed = needed.cpu()
        halfway = (needed[1:] + needed[:-1]) / 2  # usage only changes where a unit opens
        shifts = [float(needed[0]) - 1, *halfway.tolist(), float(needed[-1]) + 1]
        low, high = 0, len(shifts) - 1
        while low < high:  # find the largest shift within the target
            middle = (low + high + 1) // 2
            if self.used(shifts[middle]) <= target:
                low = middle
            else:
                high = middle - 1
        # Units with equal p open together. If the result is far below the target, choose the
        # neighbouring shift that is closer to it.
        nearest = min(shifts[low : low + 2], key=lambda shift: abs(self.used(shift) - target))
        misses = self.used(shifts[low]) < (1 - _MAX_SHORTFALL) * target
        chosen = nearest if misses else shifts[low]
        impossible = self.used(shifts[0]) > target  # even with all units closed
        return 0.0 if impossible or self.used(chosen) == self.used() else chosen

    def shift(self, amount: float) -> None:
        """Shift ``z / τ`` in proportion to the cost of each unit, by at most `amount`.

        The gradient of the penalty is also proportional to this cost. All units of a gate shift by
        the same amount, so they open in the learned order.
        """
        for gate, by in self._shifts(amount).items():
            gate.shift_bias(by * float(gate.temperature))

    def _shifts(self, amount: float) -> dict[GateLike, float]:
        """Return the shift to apply to ``z / τ`` for each gate."""
        prices = {gate: self._price(gate) for gate in self.gates.values()}
        highest = max(prices.values())
        return {gate: amount * price / highest for gate, price in prices.items()}

    def _price(self, gate: GateLike) -> float:
        """Return the cost of one block in a gate, as a number of units or of connections."""
        if self.measure == "open_rate":
            return float(gate.block_size)
        ends = [(m, m.input_gate, m.output_gate if m.skips_rows else None) for m in self.maps]
        connections = sum(m.connections for m, *gates in ends if gate in gates)
        return connections * gate.block_size / gate.units


def check_budget(
    budget: float | Mapping[str, float],
    layers: Sequence[str] | None,
    initial_weight: float,
    max_weight: float,
) -> None:
    """Validate budget shares, gate selection and the range of λ."""
    for share in budget.values() if isinstance(budget, Mapping) else [budget]:
        if not 0 < share <= 1:
            raise ValueError(f"`budget` must be in (0, 1], got {share}.")
    if isinstance(budget, Mapping) and layers is not None:
        raise ValueError(
            "`layers` needs a single `budget`, got a dict: its keys already select the gates."
        )
    if not 0 < initial_weight <= max_weight < math.inf:
        raise ValueError(
            "`initial_weight` must be above 0 and at most `max_weight`, got "
            f"{initial_weight} and {max_weight}."
        )


def usage_by_budget(budgets: Sequence[GateBudget], rates: Tensor) -> Tensor:
    """Return the usage to penalise for each budget, given the mean p of each gate in order."""
    parts = rates.split([len(budget.gates) for budget in budgets])
    return torch.stack([b.usage(part) for b, part in zip(budgets, parts, strict=True)])


def gate_budgets(
    module: nn.Module,
    shares: Mapping[str, float],
    layers: Sequence[str] | None,
    measure: Measure,
    trained_later: bool = False,
    balance: bool = False,
) -> dict[str, GateBudget]:
    """Create a budget for each group of gates, by name pattern.

    The pattern "" stands for the gates selected by `layers` and the MACs of the whole module. With
    `trained_later`, no gate needs to be trainable yet. With `balance`, gates may have a fixed
    number of open blocks, which must be the budget.

    Raises:
        ValueError: If a gate belongs to two groups, or if its usage cannot be measured or trained.
    """
    everything, maps = gate_layers(module), linear_maps(module)
    budgets: dict[str, GateBudget] = {}
    for pattern, share in shares.items():
        gates = gate_layers(module, [pattern] if pattern else layers)
        for name, gate in gates.items():
            if any(name in budget.gates for budget in budgets.values()):
                raise ValueError(
                    f"Two patterns in `budget` match the gate {name}: make the patterns disjoint."
                )
            if getattr(gate, "k", None) is not None:
                _check_top_k(name, gate, share, balance)
        modules = [gate for gate in gates.values() if isinstance(gate, nn.Module)]
        is_trained = any(p.requires_grad for gate in modules for p in gate.parameters())
        if not is_trained and not trained_later:
            raise ValueError(
                f"The gates {', '.join(gates)} have no trainable parameters, so they cannot be "
                "budgeted: set `requires_grad`."
            )
        if measure == "macs" and (unknown := gates_without_macs(gates, maps)):
            raise ValueError(
                f"No linear layer is known for {', '.join(unknown)}, so MACs cannot be budgeted: "
                "declare the layers in the gate's `feeds`, or set `measure='open_rate'`."
            )
        before = [m for m in maps if not pattern or m.output_gate in gates.values()]
        own = before or [m for m in maps if m.input_gate in gates.values()]
        budgets[pattern] = GateBudget(gates, list(everything.values()), own, measure, share)
    return budgets


def _check_top_k(name: str, gate: GateLike, budget: float, balance: bool) -> None:
    """Reject a gate whose number of open blocks is fixed, unless it is the budget."""
    if not isinstance(gate, Gate):
        raise ValueError(
            f"{name} is a router with a fixed number of experts, which no budget can change: "
            "exclude it with `layers`."
        )
    if not balance:
        raise ValueError(
            f"{name} has a fixed number of open gates (`policy: top_k`), which a penalty "
            "cannot change: set its `k`, use another policy, or balance loads (`method: balance`)."
        )
    share = floor_of(gate) / gate.blocks
    if not math.isclose(share, budget, rel_tol=_SAME_SHARE):
        raise ValueError(
            f"`budget` must be {share:.4g} for {name}, which always opens {floor_of(gate)} of "
            f"{gate.blocks} blocks (`policy: top_k`, `min_open`), got {budget:.4g}: change `k`, or "
            "give gates that open different shares budgets of their own, as a dict."
        )


def _row_mean(count: Tensor) -> Tensor:
    return count.double().mean() if count.numel() else count.double().sum()


def _floor_share(gate: GateLike | None) -> float:
    return 1.0 if gate is None else floor_of(gate) * gate.block_size / gate.units
