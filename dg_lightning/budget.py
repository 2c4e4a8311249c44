"""Compute budgets: what gates use of one, what to press on, and how to land on it exactly.

Everything is measured on the gates as they are deployed: hard, with their floors, and with what
deciding costs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from dg_lightning.compute import LinearMap, decision_macs, executed_macs, linear_maps
from dg_lightning.deployed import deployed_gate, floor_of, logit, read_off
from dg_lightning.penalties import MacsPrices, mean_rates, without_a_price
from dg_lightning.protocol import GateLike, connection_mask, gate_layers
from dg_lightning.recorded import Recorded

__all__ = ["GateBudget", "Measure", "gate_budgets"]

Measure: TypeAlias = Literal["macs", "open_rate"]

_MOST_CANDIDATES = 4096
_FAR = 0.5  # of the target


@contextmanager
def _deployed(gates: Sequence[GateLike], shifts: Mapping[GateLike, float]) -> Iterator[None]:
    """Let gates show their deployed decision as the one of the last forward pass."""
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
        gates: The gates that are pressed on and shifted.
        all_gates: All gates of the module.
        maps: The linear maps that the MACs are counted of.
        measure: `macs` counts executed MACs and decisions, over the dense MACs of the maps;
            `open_rate` open units over all units.
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
        self.prices = MacsPrices(list(gates.values()), maps) if measure == "macs" else None
        self._recorded = Recorded()

    @torch.no_grad()
    def used(self, shift: float = 0.0) -> Tensor:
        """Return the share that the last forward pass used: 0-d, on the gates' device."""
        gates = list(self.gates.values())
        concerned = gates if self.measure == "open_rate" else self.all_gates
        with _deployed(concerned, dict.fromkeys(gates, shift)):
            if self.measure == "open_rate":
                opened = [_row_mean(gate.gate.sum(-1)) * gate.block_size for gate in gates]  # type: ignore[union-attr]
                return torch.stack(opened).sum() / sum(gate.units for gate in gates)
            device = gates[0].threshold.device
            counts = [executed_macs(m) for m in self.maps]
            counts += [decision_macs(gate, self.maps) for gate in self._deciding()]
            # What no gate changes is known on the host, and need not be sent.
            known = sum(float(count) for count in counts if count.device != device)
            means = [_row_mean(count) for count in counts if count.device == device]
            return (torch.stack(means).sum() + known) / self.macs_dense

    @torch.no_grad()
    def measured(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the share that was used, the mean p of each gate, and the share that they mean.

        Written over by the next measurement.
        """
        masks = [connection_mask(m.linear) for m in self.maps]
        reads = [*self.reads(), *(mask for mask in masks if mask is not None)]
        return read_off(self.all_gates, self._measured, self._recorded, reads)

    def _measured(self) -> tuple[Tensor, Tensor, Tensor]:
        used, rates = self.used(), mean_rates(self.gates)
        return used, rates, self.usage(rates)

    def _deciding(self) -> list[GateLike]:
        """Return the gates whose decisions are part of the MACs."""
        own = [m.output_gate for m in self.maps]
        return [g for g in self.all_gates if g in self.gates.values() or g in own]

    def least(self) -> float:
        """Return the share that is used when every gate is at its floor: no budget can be lower."""
        if self.measure == "open_rate":
            floors = sum(floor_of(gate) * gate.block_size for gate in self.gates.values())
            return floors / sum(gate.units for gate in self.gates.values())
        total = 0.0
        for m in self.maps:
            rows, columns = m.output_gate if m.skips_rows else None, m.input_gate
            total += int(m.connections) * _floor_share(rows) * _floor_share(columns)
        return (total + self.least_decisions() * self.macs_dense) / self.macs_dense

    def least_decisions(self) -> float:
        """Return the share that deciding takes alone, with every gate at its floor."""
        total = 0
        for gate in self._deciding():
            before = next((m.input_gate for m in self.maps if m.output_gate is gate), None)
            inputs = None if before is None else torch.tensor(floor_of(before) * before.block_size)
            total += int(gate.decision_macs(inputs))
        return total / self.macs_dense

    def refuse_if_impossible(self, name: str) -> None:
        """Raise if gates at their floors use more than the budget."""
        if (least := self.least()) > self.budget:
            deciding = self.least_decisions() if self.measure == "macs" else 0.0
            raise ValueError(
                f"The budget {self.budget:.4g}{f' of {name}' if name else ''} cannot be met: "
                f"with every gate at its floor {least:.4g} is used, {deciding:.4g} of it by "
                "deciding; raise the budget, lower `min_open`, or make the GateNets smaller."
            )

    def usage(self, rates: Tensor) -> Tensor:
        """Return what is pressed on, from the mean p of each gate."""
        return self.prices.usage(rates) if self.prices else (rates * self._units(rates)).sum()

    def usage_gradient(self, rates: Tensor, weight: Tensor) -> Tensor:
        """Return its derivative by each rate, times a weight."""
        if self.prices is not None:
            return self.prices.gradient(rates, weight)
        return self._units(rates) * weight

    def reads(self) -> list[Tensor]:
        """Return the tensors that `usage_gradient` reads, as they are now."""
        if self.prices is None:
            return [self.unit_shares]
        self.prices.refresh()
        return [self.prices.form]

    def _units(self, like: Tensor) -> Tensor:
        """Return each gate's share of all units."""
        if self.unit_shares.device != like.device:
            self.unit_shares = self.unit_shares.to(like.device)
        return self.unit_shares

    @torch.no_grad()
    def shift_for(self, target: float) -> float:
        """Return what to add to every ``z / τ``, so that `target` is used and not more.

        Shifted alike, gates open in the order that was learned. 0 where nothing has to change.
        """
        distances = [
            logit(gate.threshold) - logit(gate.probability.flatten())
            for gate in self.gates.values()
            if gate.probability is not None
        ]
        needed = torch.cat(distances).cpu().unique()  # the shift that opens each unit
        if len(needed) > _MOST_CANDIDATES:
            needed = needed[torch.linspace(0, len(needed) - 1, _MOST_CANDIDATES).long()]
        halfway = (needed[1:] + needed[:-1]) / 2  # between two units nothing changes
        shifts = [float(needed[0]) - 1, *halfway.tolist(), float(needed[-1]) + 1]
        low, high = 0, len(shifts) - 1
        while low < high:  # the last shift that does not use too much
            middle = (low + high + 1) // 2
            if self.used(shifts[middle]) <= target:
                low = middle
            else:
                high = middle - 1
        # Units with the same p open together: where that is far off, the nearer side is taken.
        nearest = min(shifts[low : low + 2], key=lambda shift: abs(self.used(shift) - target))
        misses = self.used(shifts[low]) < (1 - _FAR) * target
        chosen = nearest if misses else shifts[low]
        impossible = self.used(shifts[0]) > target  # closing all would not do, and would kill
        return 0.0 if impossible or self.used(chosen) == self.used() else chosen

    def shift(self, amount: float) -> None:
        """Add to every ``z / τ``."""
        for gate in self.gates.values():
            gate.shift_bias(amount * float(gate.temperature))


def gate_budgets(
    module: nn.Module, shares: Mapping[str, float], layers: Sequence[str] | None, measure: Measure
) -> dict[str, GateBudget]:
    """Make a budget for each group of gates, by its name pattern.

    The pattern "" stands for `layers`, and its MACs for those of the whole module.
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
        if measure == "macs" and (unknown := without_a_price(gates, maps)):
            raise ValueError(
                f"No linear map of {', '.join(unknown)} is known, so its MACs cannot be held: "
                "declare it in `feeds` of the gate, or set `measure='open_rate'`."
            )
        before = [m for m in maps if not pattern or m.output_gate in gates.values()]
        own = before or [m for m in maps if m.input_gate in gates.values()]
        budgets[pattern] = GateBudget(gates, list(everything.values()), own, measure, share)
    return budgets


def _row_mean(count: Tensor) -> Tensor:
    return count.double().mean()


def _floor_share(gate: GateLike | None) -> float:
    return 1.0 if gate is None else floor_of(gate) * gate.block_size / gate.units
