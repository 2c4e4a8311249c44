"""Freeze gates that depend on the input, by how often they are open."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.gates import DynamicGate, StaticGate, gate_layers
from dg_lightning.gates.policies import top_k_mask
from dg_lightning.layers import GatedFeedForward, GatedLinear, GatedMLP
from dg_lightning.surgery.recording import arguments_of


@torch.no_grad()
def freeze_gates(model: nn.Module, batches: Iterable[Any], min_usage: float = 0.05) -> nn.Module:
    """Return a copy of a model with the dynamic gates of our own layers frozen to static ones.

    This changes the model's outputs, but often only slightly, because many dynamic gates learn to
    make the same decision for every input. Then `compact` removes the units that stay closed.

    Args:
        model: The model. It is not changed.
        batches: Inputs without labels, to measure how often each block is open.
        min_usage: Blocks that are open for at least this share of the samples stay open, and the
            others are closed. If a gate's floor or k needs more, the most used ones stay open, too.

    Raises:
        ValueError: If a gate cannot be frozen, or did not run on `batches`.

    >>> from dg_lightning import GatedMLP
    >>> mlp = GatedMLP(8, [16], 2, gate={"kind": "dynamic"})
    >>> type(freeze_gates(mlp, [torch.randn(32, 8)]).hidden[0].gate).__name__
    'StaticGate'
    """
    if not 0 < min_usage <= 1:
        raise ValueError(f"`min_usage` must be in (0, 1], got {min_usage}.")
    if isinstance(batches, Tensor):
        raise ValueError("`batches` must be a list of inputs, got a tensor: pass `[x]`.")
    frozen = copy.deepcopy(model).eval()
    for module in frozen.modules():
        if isinstance(module, GatedFeedForward | GatedMLP):
            module.skip = None
    layers = freezable_layers(frozen)
    opened = dict.fromkeys(layers, torch.zeros(()))
    rows = dict.fromkeys(layers, 0)

    def count(name: str, gate: DynamicGate, *_: Any) -> None:
        assert gate.gate is not None
        is_open = gate.gate.reshape(-1, gate.blocks) != 0
        opened[name] = opened[name] + is_open.sum(0).cpu()
        rows[name] += len(is_open)

    hooks = [
        layer.gate.register_forward_hook(partial(count, name)) for name, layer in layers.items()
    ]
    for batch in batches:
        args, kwargs = arguments_of(frozen, batch)
        frozen(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    if unseen := [name for name, number in rows.items() if not number]:
        raise ValueError(f"{unseen[0]} did not run on `batches`: pass inputs that use every gate.")
    for name, layer in layers.items():
        gate: DynamicGate = layer.gate
        usage = opened[name] / rows[name]
        min_open = max(gate._floor, gate.k or 0, 1)
        is_kept = (usage >= min_usage) | top_k_mask(usage, min_open)
        device = gate.threshold.device
        static = StaticGate(gate.units, block_size=gate.block_size, device=device)
        static.feeds = gate.feeds
        static.logit.copy_(torch.where(is_kept, 1.0, -1.0))
        layer.gate = static.requires_grad_(False).eval()
    return frozen


def freezable_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers whose gates depend on the input, by the name of the gate.

    Raises:
        ValueError: If such a gate cannot be frozen.
    """
    layers = [m for m in model.modules() if isinstance(m, GatedLinear | GatedFeedForward)]
    owners = {layer.gate: layer for layer in layers}
    found = {}
    for name, gate in gate_layers(model, required=False).items():
        if not gate.input_dependent:
            continue
        if not isinstance(gate, DynamicGate) or gate not in owners:
            raise ValueError(
                f"{name} cannot be frozen, only gates on hidden units of our own layers: leave it."
            )
        if gate.scale is not None:
            raise ValueError(f"{name} scales units by p, which a frozen gate cannot do: leave it.")
        found[name] = owners[gate]
    return found
