"""Gate statistics over a training run. Each check reads them from the device once."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dg_lightning.gates.protocol import GateLike, deployed_gate


class GateFigures(NamedTuple):
    """Statistics of one gate at one check. `GateState` describes the fields."""

    p: float
    g: float
    threshold: float
    temperature: float
    unit_spread: float
    sample_spread: float
    dead: float
    always_on: float
    flips: float


@torch.no_grad()
def open_shares(gates: Sequence[GateLike]) -> Tensor:
    """Return the share of samples that open each block, as one vector for all gates."""
    opened = [deployed_gate(gate).float() for gate in gates]
    return torch.cat([g.reshape(-1, g.shape[-1]).mean(0) if g.ndim > 1 else g for g in opened])


@torch.no_grad()
def unit_rates(gates: Sequence[GateLike]) -> Tensor:
    """Return the rates of all gates in the last forward pass as one vector.

    The vector contains the share of samples that open each block, the mean p of each block and, for
    each gate, the spread of p across samples, the threshold and the temperature. A single vector
    can be averaged over ranks in one operation.
    """
    opened, means, settings = open_shares(gates), [], []
    for gate in gates:
        p = gate.probability
        assert p is not None
        rows = p.detach().float()
        spread = rows.new_zeros(())  # all samples share one p
        if rows.ndim > 1:
            rows = rows.reshape(-1, p.shape[-1])
            spread, rows = rows.std(0, correction=0).mean(), rows.mean(0)
        means.append(rows)
        settings += [spread, gate.threshold.float(), gate.temperature.float()]
    return torch.cat([opened, *means, torch.stack(settings)])


class GateStatistics:
    """Statistics of gates over several checks: dead units, always-on units and flips.

    Args:
        gates: The gates.
        window: Number of checks before a unit can count as dead or always on.
    """

    def __init__(self, gates: Sequence[GateLike], window: int = 5) -> None:
        self.sizes = [gate.units // gate.block_size for gate in gates]
        self.window = window
        self.checks = 0
        self.previous: Tensor | None = None  # open shares one step before a check
        # The largest and smallest open shares in the previous and the current window.
        self.extremes: list[Any] = []
        self.dead = np.zeros(sum(self.sizes), bool)
        self._device = torch.device("cpu")

    def record_previous(self, rates: Tensor) -> None:
        """Record the `open_shares` from the step before a check, so that flips can be counted."""
        self.previous = rates

    @torch.no_grad()
    def check(self, rates: Tensor) -> list[GateFigures]:
        """Add a vector of `unit_rates` and return the statistics of every gate.

        This uses numpy, which is much faster than torch for many operations on few numbers.
        """
        blocks, self._device = sum(self.sizes), rates.device
        opened, p, settings = np.split(rates.cpu().numpy(), [blocks, 2 * blocks])
        highest, lowest = self._update_extremes(opened)
        previous = opened if self.previous is None else self.previous.cpu().numpy()
        self.previous = None
        self.dead = highest == 0
        columns = [p, opened, self.dead, lowest == 1, np.abs(opened - previous)]
        ends = list(accumulate(self.sizes))
        figures = []
        for size, end, row in zip(self.sizes, ends, settings.reshape(-1, 3).tolist(), strict=True):
            parts = [column[end - size : end] for column in columns]
            mean_p, g, dead, always_on, flips = [float(part.mean()) for part in parts]
            spread, threshold, temperature = row
            unit_spread = float(parts[0].std())
            rest = (unit_spread, spread, dead, always_on, flips)
            figures.append(GateFigures(mean_p, g, threshold, temperature, *rest))
        return figures

    def dead_units(self, index: int, block_size: int) -> Tensor:
        """Return a bool mask of the units of a gate that were dead at the last check."""
        end = sum(self.sizes[: index + 1])
        dead = self.dead[end - self.sizes[index] : end].repeat(block_size)
        return torch.from_numpy(dead).to(self._device)

    @property
    def filled(self) -> bool:
        """Whether a whole window of checks has been recorded."""
        return self.checks >= self.window

    def _update_extremes(self, opened: Any) -> tuple[Any, Any]:
        """Return the largest and smallest open share over the previous and current windows."""
        if self.checks % self.window == 0:
            self.extremes = [*self.extremes[-1:], np.stack([opened, opened])]
        else:
            highest, lowest = self.extremes[-1]
            updated = [np.maximum(highest, opened), np.minimum(lowest, opened)]
            self.extremes = [*self.extremes[:-1], np.stack(updated)]
        self.checks += 1
        windows = np.stack(self.extremes)
        return windows[:, 0].max(0), windows[:, 1].min(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {
            "checks": self.checks,
            "previous": None if self.previous is None else self.previous.clone(),
            "extremes": [torch.from_numpy(extreme).clone() for extreme in self.extremes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self.checks = state["checks"]
        self.previous = state["previous"]
        self.extremes = [extreme.cpu().numpy() for extreme in state["extremes"]]
