"""Usage terms that penalise open gates when added to a loss (section 3.3 of the paper).

The rate of a gate is the mean of p or of g over the global batch. The mean of g has the gradient
of p.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from dg_lightning.arguments import renamed
from dg_lightning.compute.macs import LinearMap, calls_per_sample
from dg_lightning.gates.protocol import GateLike, connection_mask

Usage: TypeAlias = Literal["open_rate", "expected_macs", "target", "hinge_below", "hinge_above"]


@renamed(of="rate")
def penalty(
    gates: Mapping[str, GateLike],
    usage: Usage = "open_rate",
    *,
    rate: Literal["p", "g"] = "p",
    targets: Tensor | None = None,
    power: int = 2,
    layer_weights: Tensor | None = None,
    unit_shares: Mapping[str, Tensor] | None = None,
    prices: "MacsCost | None" = None,
) -> Tensor:
    """Return the usage of gates in the last forward pass, as a term to add to a loss.

    Args:
        gates: The gates, keyed by name, as returned by `gate_layers`.
        usage: The kind of usage. See `usage_term`.
        rate: Whether to average `p` or the hard `g`.
        targets: The target rate of each gate, for `target` and the hinges.
        power: The exponent of the hinges, 1 or 2.
        layer_weights: A weight for each gate.
        unit_shares: Weights for the blocks in each gate, keyed by gate name. They sum to 1 for each
            gate.
        prices: The MAC costs, for `expected_macs`.

    >>> from dg_lightning import GatedMLP, gate_layers
    >>> net = GatedMLP(8, [4], 2, gate={"kind": "static", "initial_open_rate": 0.8})
    >>> loss = net(torch.randn(3, 8)).square().mean()
    >>> term = penalty(gate_layers(net))
    >>> (loss + 0.1 * term).backward()
    >>> round(term.item(), 3)
    0.8
    """
    rates = mean_rates(gates, rate, unit_shares)
    if torch.is_grad_enabled() and (blind := _without_graph(gates, rate)):
        raise RuntimeError(
            f"A penalty on {blind[0]} would have no gradient, because it ran without gradients: "
            "use `use_reentrant=False` for activation checkpointing, or compute the penalty under "
            "`no_grad`."
        )
    return usage_term(
        usage, rates, targets=targets, power=power, layer_weights=layer_weights, prices=prices
    )


def _without_graph(gates: Mapping[str, GateLike], rate: Literal["p", "g"]) -> list[str]:
    """Return the names of trainable gates whose last pass recorded no graph."""
    found = []
    for name, gate in gates.items():
        value = gate.probability if rate == "p" else gate.gate
        can_train = isinstance(gate, nn.Module) and any(p.requires_grad for p in gate.parameters())
        found += [name] if can_train and value is not None and not value.requires_grad else []
    return found


def mean_rates(
    gates: Mapping[str, GateLike],
    rate: Literal["p", "g"] = "p",
    unit_shares: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the mean p or g of each gate in the last forward pass, as a ``(gates,)`` tensor.

    `unit_shares` contains weights for the blocks in each gate, which sum to 1 for each gate.

    Raises:
        RuntimeError: If a gate has not run yet.
    """
    means = []
    for name, gate in gates.items():
        value = gate.probability if rate == "p" else gate.gate
        if value is None:
            raise RuntimeError(
                f"Gate {name!r} has no probability: it did not run in the last forward pass."
            )
        means.append(mean_rate(value, None if unit_shares is None else unit_shares.get(name)))
    return torch.stack(means)


def mean_rate(value: Tensor, unit_shares: Tensor | None = None) -> Tensor:
    """Return the mean p or g of one gate as a 0-d tensor."""
    by_row = value if unit_shares is None else (value * unit_shares).sum(-1)
    return by_row.mean() if by_row.numel() else by_row.sum()  # a batch may contain no tokens


def usage_term(
    usage: Usage,
    rates: Tensor,
    *,
    targets: Tensor | None = None,
    power: int = 2,
    layer_weights: Tensor | None = None,
    prices: "MacsCost | None" = None,
) -> Tensor:
    """Return the usage of gates with the given rates.

    Args:
        usage: `open_rate` is the sum of the rates. `target` is the sum of their squared distances
            to `targets`. `hinge_below` and `hinge_above` sum how far rates are below or above
            `targets`, raised to `power`. `expected_macs` is the share of MACs. See `MacsCost`.
        rates: The rate of each gate.
        targets: The target rate of each gate, for `target` and the hinges.
        power: The exponent of the hinges, 1 or 2.
        layer_weights: A weight for each gate. With `expected_macs` it scales only the gradient.
        prices: The MAC costs, for `expected_macs`.

    >>> rates = torch.tensor([0.5, 0.25])
    >>> usage_term("open_rate", rates).item()
    0.75
    >>> usage_term("hinge_above", rates, targets=torch.tensor([0.25, 0.5]), power=1).item()
    0.25
    """
    if usage == "expected_macs":
        assert prices is not None
        return prices.usage(
            rates if layer_weights is None else scale_gradient(rates, layer_weights)
        )
    if usage == "open_rate":
        terms = rates
    else:
        assert targets is not None
        if usage == "target":
            terms = (rates - targets).square()
        else:
            excess = (targets - rates if usage == "hinge_below" else rates - targets).relu()
            terms = excess.square() if power == 2 else excess
    return terms.sum() if layer_weights is None else (terms * layer_weights).sum()


def scale_gradient(values: Tensor, factors: Tensor | float) -> Tensor:
    """Return unchanged values whose gradient is multiplied by `factors`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_gradient(x, torch.tensor([1.0, 3.0])).sum().backward()
    >>> x.grad.tolist()
    [1.0, 3.0]
    """
    return values.detach() + factors * (values - values.detach())


class MacsCost:
    """Expected MACs in a module's linear layers, as a function of the gate rates.

    The cost is the sum over linear layers of ``connections * mean p_in * mean p_out``, as a share
    of the dense MACs. Unlike `open_rate`, this cost reflects that closing a unit saves both its
    row and its column.

    Args:
        gates: The gates, in the same order as the rates. All other gates count as open.
        maps: The linear layers whose MACs are counted.
    """

    def __init__(self, gates: Sequence[GateLike], maps: Sequence[LinearMap]) -> None:
        self.maps = maps
        self.macs_dense = sum(m.macs_dense for m in maps)
        always_open = len(gates)  # index of the constant rate 1 that `usage` appends

        def index(gate: GateLike | None) -> int:
            return next((i for i, other in enumerate(gates) if other is gate), always_open)

        self._outputs = torch.tensor([index(m.output_gate if m.skips_rows else None) for m in maps])
        self._inputs = torch.tensor([index(m.input_gate) for m in maps])
        self._connections: list[int] = []
        self._shares = torch.zeros(len(maps))

    def update(self) -> None:
        """Update connection counts in place, because captured steps read the tensor."""
        connections = [m.connections for m in self.maps]
        if connections != self._connections:
            self._connections = connections
            shares = torch.tensor(connections, dtype=torch.float64) / self.macs_dense
            self._shares.copy_(shares)

    def usage(self, rates: Tensor) -> Tensor:
        """Return the expected MACs as a share of the dense MACs."""
        if (self._shares.device, self._shares.dtype) != (rates.device, rates.dtype):
            self._outputs = self._outputs.to(rates.device)
            self._inputs = self._inputs.to(rates.device)
            self._shares, self._connections = self._shares.to(rates), []
        self.update()
        rates = torch.cat([rates, rates.new_ones(1)])
        return (self._shares * rates[self._outputs] * rates[self._inputs]).sum()


def gates_without_macs(gates: Mapping[str, GateLike], maps: Sequence[LinearMap]) -> list[str]:
    """Return the names of gates that save no MACs, so `expected_macs` cannot penalise them."""
    priced = [m.input_gate for m in maps] + [m.output_gate for m in maps if m.skips_rows]
    return [name for name, gate in gates.items() if not any(gate is other for other in priced)]


def unit_costs_by_connections(gate: GateLike, maps: Sequence[LinearMap]) -> list[float]:
    """Count the connections saved by closing each block of a gate."""
    costs = torch.zeros(gate.units // gate.block_size)
    blocks = torch.arange(len(costs))
    for linear_map in maps:
        weight, mask = linear_map.linear.weight, connection_mask(linear_map.linear)
        exists = torch.ones_like(weight, device="cpu") if mask is None else mask.float().cpu()
        entries = linear_map.matrix(exists).sum(-1) * calls_per_sample(linear_map.linear)
        ends = linear_map.expand_to_units(lambda other: blocks if other is gate else None)
        for end, per_unit in zip(ends, (entries.sum(1), entries.sum(0)), strict=True):
            if end is not None:
                costs.index_add_(0, end, per_unit)
    per_block: list[float] = costs.tolist()
    return per_block
