"""Compaction: the net without units that are never needed, made of plain torch layers.

A unit is removed if its static gate is closed, if no weight reads it, or if it has no inputs (its
constant output is then added to the bias of the next layer). Batch norms are folded into adjacent
weights. The original net is not changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.layers.mlp import GatedMLP
from dg_lightning.runtime.compact_layers import Inputs, Layer, Recipe

__all__ = ["Compact", "compact"]


@dataclass
class Compact:
    """A compact net.

    Args:
        net: The net, made of plain layers.
        steps: Its recipe, see `plain.build`.
        units: Number of inputs and of units of each layer, before and after.
        notes: What could not be removed, and why.
    """

    net: nn.Sequential
    steps: list[dict[str, Any]]
    units: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@torch.no_grad()
def compact(
    net: nn.Module,
    *,
    usage: Mapping[str, Tensor] | None = None,
    min_usage: float = 0.0,
    selects_inputs: bool = True,
    multiple: int = 1,
) -> Compact:
    """Return a compact net with the same function as a `GatedMLP`.

    Args:
        net: The net.
        usage: Fraction of samples that open each block of a dynamic gate, by hidden layer name, see
            `usage_of`.
        min_usage: Blocks used less often are removed, which changes the function.
        selects_inputs: Whether to drop unread inputs before the first layer; otherwise their
            weights are 0, which is faster if selecting takes longer than multiplying.
        multiple: Round widths up to a multiple of this by keeping some idle units.

    Raises:
        TypeError: If the net is not a `GatedMLP`.

    >>> mlp = GatedMLP(8, [4], 2, gate={"kind": "static"})
    >>> _ = mlp.hidden[0].gate.logit.data[:3].fill_(-1)
    >>> compact(mlp).units
    {'hidden.0': (4, 1)}
    """
    if not isinstance(net, GatedMLP):
        raise TypeError(
            f"Only a GatedMLP can be made compact, got a {type(net).__name__}: for other nets, "
            "with gates of `add_gates`, there is `dg_lightning.surgery.compact`."
        )
    usage = usage or {}
    names = [f"hidden.{i}" for i, layer in enumerate(net.layers())]
    if unknown := sorted(set(usage) - set(names)):
        raise ValueError(f"`usage` names {unknown[0]!r}; there are {', '.join(names)}.")
    if not 0 <= min_usage <= 1 or (min_usage and not usage):
        raise ValueError(
            f"`min_usage` must be from 0 to 1, and goes with `usage` (see `usage_of`), got "
            f"{min_usage} and usage of {len(usage)} layers."
        )
    if multiple < 1:
        raise ValueError(f"`multiple` must be at least 1, got {multiple}.")
    stack = [
        Layer(f"hidden.{i}", layer, usage.get(f"hidden.{i}"), min_usage)
        for i, layer in enumerate(net.layers())
    ]
    output = Layer("output", net.output)
    inputs = Inputs(net, [*stack, output][0])
    _remove_idle_units([*stack, output])
    recipe = Recipe()
    inputs.emit(recipe, selects_inputs, multiple)
    for layer, after in pairwise([*stack, output]):
        layer.emit(recipe, after, multiple)
    recipe.add("linear", output.linear.state(), **output.linear.sizes())
    return Compact(recipe.build_net(net.output.weight), recipe.steps, recipe.units, recipe.notes)


def _remove_idle_units(stack: list[Layer]) -> None:
    """Mark units that are never read or constant; fold constants and gates into the next layer."""
    pairs = list(pairwise(stack))
    for layer, after in reversed(pairs):
        for reader in after.readers:
            reader.weight *= layer.value.to(reader.weight.dtype)
            reader.weight[:, layer.removed] = 0
        read = torch.stack([(reader.weight != 0).any(0) for reader in after.readers]).any(0)
        layer.removed |= ~read
        if layer.norm is None:
            layer.linear.weight[layer.removed] = 0
    for layer, after in pairs:
        # A dynamic gate passes a constant for some inputs only.
        if layer.gate_maps or layer.norm is not None:
            continue
        constant = ~(layer.linear.weight != 0).any(1) & ~layer.removed
        outputs = layer.activation(layer.linear.bias) * constant
        for reader in after.readers:
            reader.bias = reader.bias + reader.weight @ outputs
            reader.weight[:, constant] = 0
        layer.removed |= constant
