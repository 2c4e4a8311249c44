"""Statistics of gates over a training: rates on the device, read by the host once a check."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dg_lightning.deployed import deployed_gate
from dg_lightning.protocol import GateLike

__all__ = ["GateFigures", "GateStatistics", "open_shares", "unit_rates"]


class GateFigures(NamedTuple):
    """The figures of one gate at one check; `GateState` says what they mean."""

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
    """Return the share of samples that open each block, of all gates in one vector."""
    opened = [deployed_gate(gate).float() for gate in gates]
    return torch.cat([g.reshape(-1, g.shape[-1]).mean(0) if g.ndim > 1 else g for g in opened])


@torch.no_grad()
def unit_rates(gates: Sequence[GateLike]) -> Tensor:
    """Return the last forward pass of all gates in one vector, which ranks may average.

    First the share of samples that open each block, then the mean p of each block, then for each
    gate the spread of p over samples, its threshold and its temperature.
    """
    opened, means, settings = open_shares(gates), [], []
    for gate in gates:
        p = gate.probability
        assert p is not None
        rows = p.detach().float()
        spread = rows.new_zeros(())  # of samples that share one p
        if rows.ndim > 1:
            rows = rows.reshape(-1, p.shape[-1])
            spread, rows = rows.std(0, correction=0).mean(), rows.mean(0)
        means.append(rows)
        settings += [spread, gate.threshold.float(), gate.temperature.float()]
    return torch.cat([opened, *means, torch.stack(settings)])


class GateStatistics:
    """What gates do over several checks: dead units, units that are always on, flips.

    Args:
        gates: The gates.
        window: Checks that a unit is watched for, before it counts as dead or always on.
    """

    def __init__(self, gates: Sequence[GateLike], window: int = 5) -> None:
        self.sizes = [gate.units // gate.block_size for gate in gates]
        self.window = window
        self.checks = 0
        self.previous: Tensor | None = None  # (blocks of all gates,), one step before a check
        # Largest and smallest share of samples, of the window that is filled and of the last one.
        self.extremes: list[Any] = []
        self.dead = np.zeros(sum(self.sizes), bool)
        self._device = torch.device("cpu")

    def before(self, rates: Tensor) -> None:
        """Note the `open_shares` of the step before a check, which flips are counted from."""
        self.previous = rates

    @torch.no_grad()
    def check(self, rates: Tensor) -> list[GateFigures]:
        """Take in a vector of `unit_rates` and return the figures of every gate.

        It is read at once: what follows are many operations on a few numbers, for which numpy takes
        a fraction of the time of torch.
        """
        blocks, self._device = sum(self.sizes), rates.device
        opened, p, settings = np.split(rates.cpu().numpy(), [blocks, 2 * blocks])
        highest, lowest = self._watch(opened)
        before = opened if self.previous is None else self.previous.cpu().numpy()
        self.previous = None
        self.dead = highest == 0
        columns = [p, opened, self.dead, lowest == 1, np.abs(opened - before)]
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
        """Return which units of a gate were dead at the last check: bool."""
        end = sum(self.sizes[: index + 1])
        dead = self.dead[end - self.sizes[index] : end].repeat(block_size)
        return torch.from_numpy(dead).to(self._device)

    @property
    def filled(self) -> bool:
        """Whether a whole window has been watched."""
        return self.checks >= self.window

    def _watch(self, opened: Any) -> tuple[Any, Any]:
        """Return the largest and the smallest share of samples, over this window and the last."""
        if self.checks % self.window == 0:
            self.extremes = [*self.extremes[-1:], np.stack([opened, opened])]
        else:
            highest, lowest = self.extremes[-1]
            now = [np.maximum(highest, opened), np.minimum(lowest, opened)]
            self.extremes = [*self.extremes[:-1], np.stack(now)]
        self.checks += 1
        both = np.stack(self.extremes)
        return both[:, 0].max(0), both[:, 1].min(0)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""
        return {
            "checks": self.checks,
            "previous": None if self.previous is None else self.previous.clone(),
            "extremes": [torch.from_numpy(extreme).clone() for extreme in self.extremes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.checks = state["checks"]
        self.previous = state["previous"]
        self.extremes = [extreme.cpu().numpy() for extreme in state["extremes"]]
