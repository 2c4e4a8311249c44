"""The compute ledger: executed and expected multiply-accumulates (MACs) of linear maps.

For one sample and one linear map with connection mask m, the executed MACs are the entries of m
whose input and output are both open. A closed output saves its own product only if its gate is
known beforehand (`Feeds.skips_rows`). The cost of the gate's decision is always added. FLOPs are
2 x MACs. Only linear maps are counted, each as run once per sample (or per position of a sequence).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dg_lightning.gates.protocol import (
    GateLike,
    connection_mask,
    count_connections,
    gate_layers,
    plain_name,
)

# Modules whose weights are counted, or take part in no product.
_COUNTED_OR_FREE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm)

__all__ = [
    "LinearMap",
    "executed_macs",
    "expected_macs",
    "gate_submodules",
    "linear_maps",
    "needed_parameters",
    "uncounted_modules",
]


@dataclass(frozen=True)
class LinearMap:
    """A linear map of a network, with the gates on its inputs and outputs.

    Args:
        name: Name of the module.
        linear: The module.
        input_gate: The gate that sets some of its inputs to exactly zero, if known.
        output_gate: The gate that closes some of its outputs, if known.
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
    def connections(self) -> int:
        """Number of existing connections."""
        return count_connections(self.linear)


def linear_maps(module: nn.Module) -> list[LinearMap]:
    """Return the linear maps of a module in order, excluding those inside gates.

    >>> from dg_lightning import GatedMLP
    >>> [m.name for m in linear_maps(GatedMLP(8, [4], 2, gate={"kind": "static"}))]
    ['hidden.0.linear', 'output']
    """
    gates = gate_layers(module, required=False).values()
    in_gates = gate_submodules(module)
    producers = {gate.feeds.producer: gate for gate in gates}
    consumers = {linear: gate for gate in gates for linear in gate.feeds.consumers}
    maps = []
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear) and child not in in_gates:
            gate_in, gate_out = consumers.get(child), producers.get(child)
            skips_rows = gate_out is not None and gate_out.feeds.skips_rows
            maps.append(LinearMap(plain_name(name), child, gate_in, gate_out, skips_rows))
    return maps


def executed_macs(linear_map: LinearMap) -> Tensor:
    """Return the MACs of a map in the last forward pass, int64.

    One entry per sample, or 0-d if all samples have the same.
    """
    inputs = _is_open(linear_map.input_gate)
    outputs = _is_open(linear_map.output_gate) if linear_map.skips_rows else None
    linear, mask = linear_map.linear, connection_mask(linear_map.linear)
    if mask is None:
        return _open_count(inputs, linear.in_features) * _open_count(outputs, linear.out_features)
    # Row sums are integers below 2^24 and thus exact in float32; their total may not be.
    rows = mask.to(linear.weight.device, torch.float32)
    if inputs is not None:
        with torch.autocast(rows.device.type, enabled=False):
            per_row = inputs.float() @ rows.T
    else:
        per_row = rows.sum(-1)
    per_row = per_row.round().long()
    return (per_row if outputs is None else per_row * outputs).sum(-1)


def expected_macs(linear_map: LinearMap) -> Tensor:
    """Return `executed_macs` with p instead of g, as a fraction of the dense MACs, per sample."""
    inputs = _unit_probability(linear_map.input_gate)
    outputs = _unit_probability(linear_map.output_gate) if linear_map.skips_rows else None
    linear, mask = linear_map.linear, connection_mask(linear_map.linear)
    if mask is None:
        one = torch.ones((), device=linear.weight.device)
        open_in = one if inputs is None else inputs.mean(-1)
        return open_in * (one if outputs is None else outputs.mean(-1))
    rows = mask.to(linear.weight.device, torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        per_row = rows.mean(-1) if inputs is None else inputs.float() @ rows.T / rows.shape[-1]
    return (per_row if outputs is None else per_row * outputs).mean(-1)


def decision_macs(gate: GateLike, maps: Sequence[LinearMap]) -> Tensor:
    """Return the MACs of a gate's decision in the last forward pass, over its open inputs."""
    inputs = _is_open(_gate_before(gate, maps))
    return gate.decision_macs(None if inputs is None else inputs.sum(-1))


def expected_decision_macs(gate: GateLike, maps: Sequence[LinearMap]) -> Tensor:
    """Return `decision_macs` with p instead of g, as a fraction of a decision over all inputs."""
    inputs = _unit_probability(_gate_before(gate, maps))
    expected = gate.decision_macs(None if inputs is None else inputs.sum(-1))
    return expected / max(int(gate.decision_macs()), 1)


def _gate_before(gate: GateLike, maps: Sequence[LinearMap]) -> GateLike | None:
    """Return the gate on the inputs of a gate's layer, which are also the GateNet's inputs."""
    return next((m.input_gate for m in maps if m.output_gate is gate), None)


def needed_parameters(module: nn.Module) -> int:
    """Count the parameters that the network needs in deployment, given its last forward pass.

    Missing connections, and rows and columns closed by static gates, can be removed; units behind
    input-dependent gates cannot.

    >>> from dg_lightning import GatedMLP
    >>> mlp = GatedMLP(8, [4], 2, gate={"kind": "static"}).eval()
    >>> _ = mlp.hidden[0].gate.logit.data[:3].fill_(-1), mlp(torch.zeros(1, 8))
    >>> needed_parameters(mlp)  # 8 + 1 for the open unit, 2 x 1 + 2 for the output
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
            kept &= inputs.to(kept.device)  # a Trainer moves modules back, not recorded gates
        if outputs is not None:
            kept &= outputs.unsqueeze(-1).to(kept.device)
        rows = linear_map.linear.out_features if outputs is None else int(outputs.sum())
        total += int(kept.sum()) + (rows if linear_map.linear.bias is not None else 0)
    return total


def uncounted_modules(module: nn.Module) -> list[str]:
    """Return the names of modules with weights that the ledger cannot count."""
    in_gates = gate_submodules(module)
    return [
        plain_name(name) or type(child).__name__
        for name, child in module.named_modules()
        if any(p.ndim > 1 for p in child.parameters(recurse=False))
        and not isinstance(child, _COUNTED_OR_FREE)
        and child not in in_gates
    ]


def gate_submodules(module: nn.Module) -> set[nn.Module]:
    """Return all gates of a module and their submodules."""
    gates = gate_layers(module, required=False).values()
    return {child for gate in gates if isinstance(gate, nn.Module) for child in gate.modules()}


def _is_open(gate: GateLike | None) -> Tensor | None:
    """Return the open units of the last forward pass, bool ``(..., units)``; None means all."""
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
