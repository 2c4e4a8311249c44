"""The compute ledger: multiply-accumulates (MACs) that were really needed, and the paper's proxies.

For one sample and one linear map with connection mask m, the executed MACs are the entries of m
whose input is open and whose output is open. An output counts as closed for its own product only
when its gate was known before it (`Feeds.skips_rows`). What it costs to decide is always added.
FLOPs are 2 x MACs. Only linear maps are counted, each as run once a sample (or once a position,
where a sample has several).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dg_lightning.protocol import GateLike, connection_mask, gate_layers, plain_name

# Modules whose weights are counted, or are not part of a product.
_COUNTED_OR_FREE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm)

__all__ = [
    "LinearMap",
    "executed_macs",
    "expected_macs",
    "inside_gates",
    "linear_maps",
    "needed_parameters",
    "uncounted_modules",
]


@dataclass(frozen=True)
class LinearMap:
    """A linear map of a net, with the gates on its two sides where they are known.

    Args:
        name: Its name in the net.
        linear: The map itself.
        input_gate: The gate that makes some of its inputs exactly zero.
        output_gate: The gate that closes some of its outputs.
        skips_rows: Whether closed outputs need not be computed.
    """

    name: str
    linear: nn.Linear
    input_gate: GateLike | None = None
    output_gate: GateLike | None = None
    skips_rows: bool = False

    @property
    def macs_dense(self) -> int:
        """MACs of the full matrix."""
        return self.linear.in_features * self.linear.out_features

    @property
    def connections(self) -> Tensor:
        """How many connections exist: 0-d, on the device of the mask."""
        mask = connection_mask(self.linear)
        return torch.tensor(self.macs_dense) if mask is None else mask.sum()


def linear_maps(module: nn.Module) -> list[LinearMap]:
    """List the linear maps of a module in order, without those that decide about gates.

    >>> from dg_lightning import GatedMLP
    >>> [m.name for m in linear_maps(GatedMLP(8, [4], 2, gate={"kind": "static"}))]
    ['hidden.0.linear', 'output']
    """
    gates = gate_layers(module, required=False).values()
    deciding = inside_gates(module)
    producers = {gate.feeds.producer: gate for gate in gates}
    readers = {reader: gate for gate in gates for reader in gate.feeds.consumers}
    maps = []
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear) and child not in deciding:
            after = producers.get(child)
            skips_rows = after is not None and after.feeds.skips_rows
            maps.append(LinearMap(plain_name(name), child, readers.get(child), after, skips_rows))
    return maps


def executed_macs(linear_map: LinearMap) -> Tensor:
    """Count the MACs of a map that the last forward pass needed: int64, 0-d or one per sample.

    0-d where every sample needed the same.
    """
    inputs = _is_open(linear_map.input_gate)
    outputs = _is_open(linear_map.output_gate) if linear_map.skips_rows else None
    linear, mask = linear_map.linear, connection_mask(linear_map.linear)
    if mask is None:
        return _open_count(inputs, linear.in_features) * _open_count(outputs, linear.out_features)
    # Row sums are whole numbers below 2^24 and so exact in float32; their sum may not be.
    rows = mask.to(linear.weight.device, torch.float32)
    if inputs is not None:
        with torch.autocast(rows.device.type, enabled=False):
            per_row = inputs.float() @ rows.T
    else:
        per_row = rows.sum(-1)
    per_row = per_row.round().long()
    return (per_row if outputs is None else per_row * outputs).sum(-1)


def expected_macs(linear_map: LinearMap) -> Tensor:
    """Return the same sum with p in place of g, as a share of the full matrix; never of means."""
    inputs = _unit_probability(linear_map.input_gate)
    outputs = _unit_probability(linear_map.output_gate) if linear_map.skips_rows else None
    linear, mask = linear_map.linear, connection_mask(linear_map.linear)
    if mask is None:
        one = torch.ones((), device=linear.weight.device)
        share_in = one if inputs is None else inputs.mean(-1)
        return share_in * (one if outputs is None else outputs.mean(-1))
    rows = mask.to(linear.weight.device, torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        per_row = rows.mean(-1) if inputs is None else inputs.float() @ rows.T / rows.shape[-1]
    return (per_row if outputs is None else per_row * outputs).mean(-1)


def decision_macs(gate: GateLike, maps: Sequence[LinearMap]) -> Tensor:
    """Count the MACs of a gate's own decision in the last forward pass, over its open inputs."""
    inputs = _is_open(_gate_before(gate, maps))
    return gate.decision_macs(None if inputs is None else inputs.sum(-1))


def expected_decision_macs(gate: GateLike, maps: Sequence[LinearMap]) -> Tensor:
    """Return the same with p in place of g, as a share of a decision over all inputs."""
    inputs = _unit_probability(_gate_before(gate, maps))
    expected = gate.decision_macs(None if inputs is None else inputs.sum(-1))
    return expected / max(int(gate.decision_macs()), 1)


def _gate_before(gate: GateLike, maps: Sequence[LinearMap]) -> GateLike | None:
    """Return the gate on the inputs of a gate's layer, which the GateNet reads too."""
    return next((m.input_gate for m in maps if m.output_gate is gate), None)


def needed_parameters(module: nn.Module) -> int:
    """Count the parameters that the net of the last forward pass needs when it is deployed.

    Connections that do not exist, and rows and columns that static gates close for good, can be
    taken out; what an input may still open cannot.

    >>> from dg_lightning import GatedMLP
    >>> mlp = GatedMLP(8, [4], 2, gate={"kind": "static"}).eval()
    >>> _ = mlp.hidden[0].gate.logit.data[:3].fill_(-1), mlp(torch.zeros(1, 8))
    >>> needed_parameters(mlp)  # 8 + 1 of the open unit, 2 x 1 + 2 of the output
    13
    """
    maps = linear_maps(module)
    static = [g for g in gate_layers(module, required=False).values() if not g.input_dependent]
    counted = {id(p) for m in maps for p in m.linear.parameters()}
    counted |= {id(p) for gate in static if isinstance(gate, nn.Module) for p in gate.parameters()}
    total = sum(p.numel() for p in module.parameters() if id(p) not in counted)
    for linear_map in maps:
        kept = torch.ones_like(linear_map.linear.weight, dtype=torch.bool)
        mask = connection_mask(linear_map.linear)
        if mask is not None:
            kept &= mask.to(kept.device)
        gate_out = linear_map.output_gate if linear_map.skips_rows else None
        inputs, outputs = (
            None if gate is None or gate.input_dependent else _is_open(gate)
            for gate in (linear_map.input_gate, gate_out)
        )
        if inputs is not None:
            kept &= inputs.to(kept.device)  # a Trainer moves a module back, not what it left
        if outputs is not None:
            kept &= outputs.unsqueeze(-1).to(kept.device)
        rows = linear_map.linear.out_features if outputs is None else int(outputs.sum())
        total += int(kept.sum()) + (rows if linear_map.linear.bias is not None else 0)
    return total


def uncounted_modules(module: nn.Module) -> list[str]:
    """Name the modules with weights that the ledger cannot count: neither linear nor a norm."""
    deciding = inside_gates(module)
    return [
        plain_name(name) or type(child).__name__
        for name, child in module.named_modules()
        if any(p.ndim > 1 for p in child.parameters(recurse=False))
        and not isinstance(child, _COUNTED_OR_FREE)
        and child not in deciding
    ]


def inside_gates(module: nn.Module) -> set[nn.Module]:
    """Return the modules that gates are made of."""
    gates = gate_layers(module, required=False).values()
    return {child for gate in gates if isinstance(gate, nn.Module) for child in gate.modules()}


def _is_open(gate: GateLike | None) -> Tensor | None:
    """Return which units the last forward pass had open, bool ``(..., units)``; None is all."""
    if gate is None:
        return None
    if gate.gate is None:
        raise RuntimeError(
            f"A gate of {gate.units} units took no part in a forward pass, which the ledger reads: "
            "run the whole net first."
        )
    is_open = gate.gate.detach() != 0
    return is_open if gate.block_size == 1 else is_open.repeat_interleave(gate.block_size, -1)


def _unit_probability(gate: GateLike | None) -> Tensor | None:
    if gate is None or gate.probability is None:
        return None
    return gate.probability.detach().repeat_interleave(gate.block_size, -1)


def _open_count(is_open: Tensor | None, width: int) -> Tensor:
    return torch.tensor(width) if is_open is None else is_open.sum(-1)
