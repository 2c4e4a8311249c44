"""Freeze gates that depend on the input, by how often they are open."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.gates import DynamicGate, StaticGate, gate_layers
from dg_lightning.gates.policies import top_k_mask
from dg_lightning.layers import GatedFeedForward, GatedLinear
from dg_lightning.surgery.recording import arguments_of


@torch.no_grad()
def freeze_gates(model: nn.Module, batches: Iterable[Any], min_usage: float = 0.05) -> nn.Module:
    """Return a copy of a model with the dynamic gates of our own layers frozen to static ones.

    This changes the model's outputs, but often only slightly, because many dynamic gates learn to
    make the same decision for every input. Then `compact` removes the units that stay closed.

    Args:
        model: The model. It is not changed.
        batches: Inputs, to measure how often each block is open.
        min_usage: Blocks that are open for at least this share of the samples stay open, and the
            others are closed. If a gate's floor or k needs more, the most used ones stay open, too.

    Raises:
        ValueError: If a gate cannot be frozen, or `batches` is empty.

    >>> from dg_lightning import GatedMLP
    >>> mlp = GatedMLP(8, [16], 2, gate={"kind": "dynamic"})
    >>> type(freeze_gates(mlp, [torch.randn(32, 8)]).hidden[0].gate).__name__
    'StaticGate'
    """
    if not 0 < min_usage <= 1:
        raise ValueError(f"`min_usage` must be in (0, 1], got {min_usage}.")
    frozen = copy.deepcopy(model).eval()
    layers = [m for m in frozen.modules() if isinstance(m, GatedLinear | GatedFeedForward)]
    owners = {layer.gate: layer for layer in layers}
    gates = {n: g for n, g in gate_layers(frozen, required=False).items() if g.input_dependent}
    for name, gate in gates.items():
        if not isinstance(gate, DynamicGate) or gate not in owners:
            raise ValueError(f"{name} cannot be frozen: only the hidden units of our own layers.")
        if gate.scale is not None:
            raise ValueError(f"{name} scales units by p, which a frozen gate cannot do: keep it.")
    opened = dict.fromkeys(gates, torch.zeros(()))
    rows = dict.fromkeys(gates, 0)
    for batch in batches:
        args, kwargs = arguments_of(frozen, batch)
        frozen(*args, **kwargs)
        for name, gate in gates.items():
            assert isinstance(gate.gate, Tensor)
            is_open = gate.gate.flatten(0, -2) != 0
            opened[name] = opened[name] + is_open.sum(0).cpu()
            rows[name] += len(is_open)
    if not all(rows.values()):
        raise ValueError("`batches` is empty: pass inputs to measure usage on.")
    for name, dynamic in gates.items():
        gate = dynamic  # checked to be a DynamicGate above
        assert isinstance(gate, DynamicGate)
        usage = opened[name] / rows[name]
        min_open = max(gate._floor, gate.k or 0, 1)
        is_kept = (usage >= min_usage) | top_k_mask(usage, min_open)
        device = gate.threshold.device
        static = StaticGate(gate.units, block_size=gate.block_size, device=device)
        static.feeds = gate.feeds
        static.logit.copy_(torch.where(is_kept, 1.0, -1.0))
        owners[gate].gate = static.requires_grad_(False).eval()
    return frozen
