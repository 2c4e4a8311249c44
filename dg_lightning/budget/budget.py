"""Compute budgets: how much gates use, and how to shift them so that a budget is met exactly.

Usage is measured as deployed: hard gates, with their floors, and with the cost of deciding.
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
    executed_macs,
    gate_before,
    linear_maps,
)
from dg_lightning.gates.protocol import GateLike, deployed_gate, floor_of, gate_layers, logit

Measure: TypeAlias = Literal["macs", "open_rate"]

_MOST_CANDIDATES = 4096
_FAR = 0.5  # of the target


@contextmanager
def _deployed(gates: Sequence[GateLike], shifts: Mapping[GateLike, float]) -> Iterator[None]:
    """Replace the gates of the last forward pass by the deployed ones, with shifted ``z / τ``."""
    before = [gate.gate for gate in gates]
    for gate in gates:
        gate.gate = deployed_gate(gate, shifts.get(gate, 0.0)).float()
    try:
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.gate = value


class GateBudget:
    """A budget for some gates: a share of their units, or of the MACs of linear maps.

    Args:
        gates: The gates that are penalised and shifted.
        all_gates: All gates of the module.
        maps: The linear maps whose MACs are counted.
        measure: `macs` is executed MACs and decisions over the dense MACs of the maps, `open_rate`
            open units over all units.
        budget: The share.
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
        """Return the share that the last forward pass used: 0-d, on the gates' device.

        `shift` asks what would have been used with shifted gates, see `shift`.
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
            # Counts that no gate changes are known on the host.
            known = sum(float(count) for count in counts if count.device != device)
            means = [_row_mean(count) for count in counts if count.device == device]
            return (torch.stack(means).sum() + known) / self.macs_dense

    def _deciding(self) -> list[GateLike]:
        """Return the gates whose decisions are part of the MACs."""
        own = [m.output_gate for m in self.maps]
        return [g for g in self.all_gates if g in self.gates.values() or g in own]

    def min_share(self) -> float:
        """Return the share that is used with every gate at its floor: the lowest budget."""
        if self.measure == "open_rate":
            floors = sum(floor_of(gate) * gate.block_size for gate in self.gates.values())
            return floors / sum(gate.units for gate in self.gates.values())
        total = 0.0
        for m in self.maps:
            rows, columns = m.output_gate if m.skips_rows else None, m.input_gate
            total += m.connections * _floor_share(rows) * _floor_share(columns)
        return (total + self.least_decisions() * self.macs_dense) / self.macs_dense

    def closes_all(self, used: float) -> bool:
        """Return True if a share is used with every gate closed."""
        has_floor = any(floor_of(gate) for gate in self.gates.values())
        return not has_floor and used <= self.min_share() + 1e-6  # rounding

    def least_decisions(self) -> float:
        """Return the share of the decisions alone, with every gate at its floor."""
        total = 0
        for gate in self._deciding():
            before = gate_before(gate, self.maps)
            inputs = None if before is None else torch.tensor(floor_of(before) * before.block_size)
            total += int(gate.decision_macs(inputs)) * decisions(gate)
        return total / self.macs_dense

    @property
    def device(self) -> torch.device:
        """The device of the gates."""
        return next(iter(self.gates.values())).threshold.device

    @property
    def resolution(self) -> float:
        """The share of the dearest block: a static net cannot meet its budget more exactly."""
        total = self.macs_dense
        if self.measure == "open_rate":
            total = sum(gate.units for gate in self.gates.values())
        return max(self._price(gate) for gate in self.gates.values()) / total

    @property
    def depends_on_input(self) -> bool:
        """Whether other inputs may use another share."""
        gates = self.all_gates if self.measure == "macs" else self.gates.values()
        return any(gate.input_dependent for gate in gates)

    def check_feasible(self, name: str) -> None:
        """Raise if gates at their floors use more than the budget."""
        if (min_share := self.min_share()) > self.budget:
            deciding = self.least_decisions() if self.measure == "macs" else 0.0
            raise ValueError(
                f"The budget {self.budget:.4g}{f' of {name}' if name else ''} cannot be met: "
                f"with every gate at its floor {min_share:.4g} is used, {deciding:.4g} of it by "
                "deciding; raise the budget, lower `min_open`, or make the GateNets smaller."
            )

    def usage(self, rates: Tensor) -> Tensor:
        """Return the usage that is penalised, from the mean p of each gate."""
        if self.prices is not None:
            return self.prices.usage(rates)
        if self.unit_shares.device != rates.device:  # a copy waits for the device
            self.unit_shares = self.unit_shares.to(rates.device)
        return (rates * self.unit_shares).sum()

    def update_prices(self) -> None:
        """Follow a change of connections."""
        if self.prices is not None:
            self.prices.update()

    @torch.no_grad()
    def shift_for(self, target: float) -> float:
        """Return the shift, see `shift`, with which at most `target` is used.

        0 if nothing has to change.
        """
        distances = [
            (logit(gate.threshold) - logit(gate.probability.flatten())) / price
            for gate, price in self._shifts(1.0).items()
            if gate.probability is not None and price > 0
        ]
        needed = torch.cat(distances).unique()  # the shift that opens each unit
        if len(needed) > _MOST_CANDIDATES:  # millions, if each token of a text decides
            chosen = torch.arange(_MOST_CANDIDATES, device=needed.device) * (len(needed) - 1)
            needed = needed[chosen // (_MOST_CANDIDATES - 1)]
        needed = needed.cpu()
        halfway = (needed[1:] + needed[:-1]) / 2  # between two units nothing changes
        shifts = [float(needed[0]) - 1, *halfway.tolist(), float(needed[-1]) + 1]
        low, high = 0, len(shifts) - 1
        while low < high:  # the largest shift that does not use too much
            middle = (low + high + 1) // 2
            if self.used(shifts[middle]) <= target:
                low = middle
            else:
                high = middle - 1
        # Units with equal p open together: if that misses by far, take the nearer side.
        nearest = min(shifts[low : low + 2], key=lambda shift: abs(self.used(shift) - target))
        misses = self.used(shifts[low]) < (1 - _FAR) * target
        chosen = nearest if misses else shifts[low]
        impossible = self.used(shifts[0]) > target  # even with all closed
        return 0.0 if impossible or self.used(chosen) == self.used() else chosen

    def shift(self, amount: float) -> None:
        """Add to every ``z / τ``: `amount` to those of the dearest units, less to cheaper ones.

        Shifts are in proportion to what a unit costs, as the gradient of the penalty is. Within a
        gate all are equal, so units open in the learned order.
        """
        for gate, by in self._shifts(amount).items():
            gate.shift_bias(by * float(gate.temperature))

    def _shifts(self, amount: float) -> dict[GateLike, float]:
        """Return the shift of each gate's ``z / τ``."""
        prices = {gate: self._price(gate) for gate in self.gates.values()}
        highest = max(prices.values())
        return {gate: amount * price / highest for gate, price in prices.items()}

    def _price(self, gate: GateLike) -> float:
        """Return what a block of a gate costs: its units, or their connections."""
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
    """Refuse settings that make no sense: shares, gates named twice, the range of λ."""
    for share in budget.values() if isinstance(budget, Mapping) else [budget]:
        if not 0 < share <= 1:
            raise ValueError(f"`budget` must be in (0, 1], got {share}.")
    if isinstance(budget, Mapping) and layers is not None:
        raise ValueError("`layers` goes with a single budget; a dict names its gates itself.")
    if not 0 < initial_weight <= max_weight < math.inf:
        raise ValueError(
            "`initial_weight` must be above 0 and at most `max_weight`, got "
            f"{initial_weight} and {max_weight}."
        )


def usage_by_budget(budgets: Sequence[GateBudget], rates: Tensor) -> Tensor:
    """Return the usage that is penalised, one for each budget, from the mean p of all its gates."""
    parts = rates.split([len(budget.gates) for budget in budgets])
    return torch.stack([b.usage(part) for b, part in zip(budgets, parts, strict=True)])


def gate_budgets(
    module: nn.Module, shares: Mapping[str, float], layers: Sequence[str] | None, measure: Measure
) -> dict[str, GateBudget]:
    """Return a budget for each group of gates, by name pattern.

    The pattern "" means `layers`, and the MACs of the whole module.
    """
    everything, maps = gate_layers(module), linear_maps(module)
    budgets: dict[str, GateBudget] = {}
    for pattern, share in shares.items():
        gates = gate_layers(module, [pattern] if pattern else layers)
        for name, gate in gates.items():
            if any(name in budget.gates for budget in budgets.values()):
                raise ValueError(f"Two patterns of `budget` name the gate {name}: let one do.")
            if getattr(gate, "k", None) is not None:
                raise ValueError(
                    f"{name} has a fixed number of open gates (`policy: top_k`), which no penalty "
                    "changes: set its `k`, or another policy."
                )
        modules = [gate for gate in gates.values() if isinstance(gate, nn.Module)]
        if not any(p.requires_grad for gate in modules for p in gate.parameters()):
            raise ValueError(
                f"The gates {', '.join(gates)} have no parameter to train, and cannot be brought "
                "to a budget: let them require gradients."
            )
        if measure == "macs" and (unknown := gates_without_macs(gates, maps)):
            raise ValueError(
                f"No linear map of {', '.join(unknown)} is known, so its MACs cannot be held: "
                "declare it in `feeds` of the gate, or set `measure='open_rate'`."
            )
        before = [m for m in maps if not pattern or m.output_gate in gates.values()]
        own = before or [m for m in maps if m.input_gate in gates.values()]
        budgets[pattern] = GateBudget(gates, list(everything.values()), own, measure, share)
    return budgets


def _row_mean(count: Tensor) -> Tensor:
    return count.double().mean() if count.numel() else count.double().sum()


def _floor_share(gate: GateLike | None) -> float:
    return 1.0 if gate is None else floor_of(gate) * gate.block_size / gate.units
