"""Usage terms: what a penalty on gate usage adds to the loss (section 3.3 of the paper).

Pure functions of a rate of each gate over the (global) batch: its mean p, or its mean g, whose
gradient is the one of p.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from dg_lightning.compute import LinearMap
from dg_lightning.protocol import GateLike, connection_mask

__all__ = [
    "MacsPrices",
    "Usage",
    "mean_rate",
    "mean_rates",
    "unit_costs_by_connections",
    "usage_gradient",
    "usage_term",
    "without_a_price",
]

Usage: TypeAlias = Literal["linear", "expected_macs", "target", "hinge_below", "hinge_above"]


def mean_rates(
    gates: Mapping[str, GateLike],
    of: Literal["p", "g"] = "p",
    unit_shares: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the mean p or g of each gate in its last forward pass: ``(gates,)``.

    With `unit_shares`, one number a block that sum to 1, a gate's mean is weighted by them.

    Raises:
        RuntimeError: If a gate has not run yet.
    """
    means = []
    for name, gate in gates.items():
        value = gate.probability if of == "p" else gate.gate
        if value is None:
            raise RuntimeError(
                f"Gate {name!r} has no probability: it took no part in the last forward pass."
            )
        means.append(mean_rate(value, None if unit_shares is None else unit_shares.get(name)))
    return torch.stack(means)


def mean_rate(value: Tensor, unit_shares: Tensor | None = None) -> Tensor:
    """Return the mean of p or g of one gate: 0-d."""
    return value.mean() if unit_shares is None else (value * unit_shares).sum(-1).mean()


def usage_term(
    usage: Usage,
    rates: Tensor,
    *,
    targets: Tensor | None = None,
    power: int = 2,
    layer_weights: Tensor | None = None,
    prices: "MacsPrices | None" = None,
) -> Tensor:
    """Return the usage of gates with these rates.

    Args:
        usage: `linear` is the sum of the rates; `target` of their squared distances to `targets`;
            `hinge_below` and `hinge_above` of what they lack to `targets` or have above them, to
            the given power; `expected_macs` the share of MACs, see `MacsPrices`.
        rates: A rate for each gate.
        targets: A rate for each gate.
        power: Of the hinges.
        layer_weights: How hard to press on each gate; `expected_macs` has it in the gradient only.
        prices: Of `expected_macs`.

    >>> rates = torch.tensor([0.5, 0.25])
    >>> usage_term("linear", rates).item()
    0.75
    >>> usage_term("hinge_above", rates, targets=torch.tensor([0.25, 0.5]), power=1).item()
    0.25
    """
    if usage == "expected_macs":
        assert prices is not None
        return prices.usage(rates)
    if usage == "linear":
        terms = rates
    else:
        assert targets is not None
        if usage == "target":
            terms = (rates - targets).square()
        else:
            excess = (targets - rates if usage == "hinge_below" else rates - targets).relu()
            terms = excess.square() if power == 2 else excess
    return terms.sum() if layer_weights is None else (terms * layer_weights).sum()


def usage_gradient(
    usage: Usage,
    rates: Tensor,
    *,
    targets: Tensor | None = None,
    power: int = 2,
    layer_weights: Tensor | None = None,
    prices: "MacsPrices | None" = None,
) -> Tensor:
    """Return the derivative of `usage_term` by each rate: ``(gates,)``.

    By hand and not by autograd: on a GPU every small operation in the step costs its launch.

    >>> usage_gradient("target", torch.tensor([0.5, 0.25]), targets=torch.tensor([0.25, 0.25]))
    tensor([0.5000, 0.0000])
    """
    if usage == "expected_macs":
        assert prices is not None
        gradient = prices.gradient(rates)
    elif usage == "linear":
        gradient = torch.ones_like(rates)
    else:
        assert targets is not None
        if usage == "target":
            gradient = 2 * (rates - targets)
        else:
            sign = -1 if usage == "hinge_below" else 1
            excess = (sign * (rates - targets)).relu()
            gradient = 2 * sign * excess if power == 2 else sign * (excess > 0).to(rates.dtype)
    return gradient if layer_weights is None else gradient * layer_weights


class MacsPrices:
    """What the linear maps of a module cost, as a function of the rates of its gates.

    The sum over linear maps of ``connections * mean p_in * mean p_out``, as a share of the dense
    MACs. Unlike the linear term it knows what a unit costs: closing one saves its row and its
    column. With x the rates and a 1 behind them, it is the quadratic form ``xᵀ S x``.

    Args:
        gates: The gates, in the order of their rates; all others count as open.
        maps: The linear maps.
    """

    def __init__(self, gates: Sequence[GateLike], maps: Sequence[LinearMap]) -> None:
        self.gates = gates
        self.maps = maps
        self._counted = self._masks()
        self.form = self._form()

    def _form(self) -> Tensor:
        """Return S + Sᵀ: ``(gates + 1, gates + 1)``."""
        always_open = len(self.gates)

        def index(gate: GateLike | None) -> int:
            return next((i for i, other in enumerate(self.gates) if other is gate), always_open)

        form = torch.zeros(always_open + 1, always_open + 1)
        dense = sum(m.macs_dense for m in self.maps)
        for m in self.maps:
            row, column = index(m.output_gate if m.skips_rows else None), index(m.input_gate)
            share = float(m.connections) / dense
            form[row, column] += share
            form[column, row] += share
        return form

    def _masks(self) -> list[tuple[nn.Linear, Tensor | None, int]]:
        """Return the layers with their masks, and how often each was changed."""
        masks = [(m.linear, connection_mask(m.linear)) for m in self.maps]
        return [(layer, mask, 0 if mask is None else mask._version) for layer, mask in masks]

    def _rewired(self) -> bool:
        for layer, mask, version in self._counted:
            now = connection_mask(layer)
            if now is not mask or (now is not None and now._version != version):
                return True
        return False

    def refresh(self) -> None:
        """Count the connections anew where they have changed; the form stays where it is."""
        if self._rewired():
            self._counted = self._masks()
            self.form.copy_(self._form())

    def _on(self, rates: Tensor) -> Tensor:
        self.refresh()
        if self.form.device != rates.device or self.form.dtype != rates.dtype:
            self.form = self.form.to(rates.device, rates.dtype)
        return self.form

    def usage(self, rates: Tensor) -> Tensor:
        """Return the share of the dense MACs to expect."""
        form = self._on(rates)
        x = torch.cat([rates, torch.ones_like(rates[:1])])
        return (x * (form * x).sum(-1)).sum() / 2

    def gradient(self, rates: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the derivative of the share by each rate, times a weight."""
        form = self._on(rates)
        # No product of matrices: the library of a GPU takes longer to set one up.
        gradient = (form[:-1, :-1] * rates).sum(-1) + form[:-1, -1]
        return gradient if weight is None else gradient * weight


def without_a_price(gates: Mapping[str, GateLike], maps: Sequence[LinearMap]) -> list[str]:
    """Name the gates that no linear map depends on, which `expected_macs_usage` cannot press on."""
    priced = [m.input_gate for m in maps] + [m.output_gate for m in maps if m.skips_rows]
    return [name for name, gate in gates.items() if not any(gate is other for other in priced)]


def unit_costs_by_connections(gate: GateLike, maps: Sequence[LinearMap]) -> list[float]:
    """Count the connections that each block of a gate saves when it closes."""
    costs = torch.zeros(gate.units)
    for linear_map in maps:
        linear = linear_map.linear
        mask = connection_mask(linear)
        if linear_map.output_gate is gate and linear_map.skips_rows:
            costs += linear.in_features if mask is None else mask.sum(1).cpu()
        if linear_map.input_gate is gate:
            costs += linear.out_features if mask is None else mask.sum(0).cpu()
    per_block: list[float] = costs.reshape(-1, gate.block_size).sum(-1).tolist()
    return per_block
