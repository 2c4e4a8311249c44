"""Compaction: a net without the units that are never needed, in plain layers of torch.

A unit goes where its static gate is closed, where nobody reads it, or where it reads nothing (what
it says then, always the same, is added to the bias of the next layer). Batch norms go into the
weights beside them. The net itself is left as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.layers import GatedMLP
from dg_lightning.runtime.compact_layers import Inputs, Layer, Steps

__all__ = ["Compact", "compact"]


@dataclass
class Compact:
    """A compact net.

    Args:
        net: The net, of plain layers.
        steps: Its recipe: see `plain.build`.
        units: Inputs and units of each layer, before and after.
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
    """Make a compact net of a `GatedMLP`.

    Args:
        net: The net.
        usage: How often each block of a gate that depends on the input is open, by the name of its
            hidden layer, on data of the user's choice.
        min_usage: Blocks that are open less often than this are removed.
        selects_inputs: Whether inputs that nothing reads are left out at the start; else their
            weights are 0, which is faster where selecting takes longer than multiplying.
        multiple: Widths are rounded up to a multiple of this, by units that nobody reads.

    Raises:
        TypeError: If the net is not a `GatedMLP`.

    >>> mlp = GatedMLP(8, [4], 2, gate={"kind": "static"})
    >>> _ = mlp.hidden[0].gate.logit.data[:3].fill_(-1)
    >>> compact(mlp).units
    {'hidden.0': (4, 1)}
    """
    if not isinstance(net, GatedMLP):
        raise TypeError(
            f"Only a GatedMLP can be made compact, got a {type(net).__name__}: of its layers it is "
            "known who reads whom."
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
    _silence([*stack, output])
    steps = Steps()
    inputs.emit(steps, selects_inputs, multiple)
    for layer, after in pairwise([*stack, output]):
        layer.emit(steps, after, multiple)
    steps.add("linear", output.own.state(), **output.own.sizes())
    return Compact(steps.net(net.output.weight), steps.steps, steps.units, steps.notes)


def _silence(stack: list[Layer]) -> None:
    """Find, from both ends, the units that do nothing; what they say moves into the next bias."""
    pairs = list(pairwise(stack))
    for layer, after in reversed(pairs):
        for reader in after.readers:
            reader.weight[:, layer.gone] = 0
        read = torch.stack([(reader.weight != 0).any(0) for reader in after.readers]).any(0)
        layer.gone |= ~read
        if layer.norm is None:
            layer.own.weight[layer.gone] = 0
    for layer, after in pairs:
        # A gate that depends on the input lets a constant through for some inputs only.
        if layer.decision or layer.norm is not None:
            continue
        constant = ~(layer.own.weight != 0).any(1) & ~layer.gone
        said = layer.activation(layer.own.bias) * constant
        for reader in after.readers:
            reader.bias = reader.bias + reader.weight @ said
            reader.weight[:, constant] = 0
        layer.gone |= constant
