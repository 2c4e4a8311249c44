"""Nets with gates that open a given share of their blocks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dg_lightning.compute.macs import decision_macs, executed_macs, linear_maps
from dg_lightning.gates.protocol import gate_layers
from dg_lightning.layers.mlp import GatedMLP


@torch.inference_mode()
def predicted_speed_up(net: GatedMLP, x: Tensor) -> float:
    """Return the ratio of dense MACs to executed MACs of a batch, gates included."""
    net(x)
    maps = linear_maps(net)
    needed = sum(float(executed_macs(m).double().mean()) for m in maps)
    gates = gate_layers(net, required=False).values()
    needed += sum(float(decision_macs(gate, maps).double().mean()) for gate in gates)
    return sum(m.macs_dense for m in maps) / max(needed, 1.0)


def random_net(
    widths: Sequence[int],
    open_rate: float,
    *,
    dynamic: bool,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> GatedMLP:
    """Create a net whose gates open a random subset of its blocks.

    Args:
        widths: Number of inputs, hidden widths, number of outputs.
        open_rate: Fraction of open blocks.
        dynamic: Whether the open blocks depend on the sample.
        block_size: Units that share a gate.
        device: Device of the net.
        dtype: Data type of the net.
    """
    if len(widths) < 3 or min(widths) < 1:
        raise ValueError(f"`shape` must be inputs, hidden widths and outputs, got {list(widths)}.")
    if not 0 < open_rate <= 1:
        raise ValueError(f"`open_rate` must be above 0 and at most 1, got {open_rate}.")
    gate_settings: Any = {"kind": "dynamic" if dynamic else "static", "block_size": block_size}
    options: Any = {"device": device, "dtype": dtype}
    net = GatedMLP(widths[0], list(widths[1:-1]), widths[-1], gate=gate_settings, **options)
    h = torch.randn(512, widths[0], **options)
    with torch.no_grad():
        for layer in net.eval().layers():
            gate: Any = layer.gate
            if dynamic:
                first = gate.network[0]
                first.weight.normal_(std=first.in_features**-0.5)
                logits = gate.logits(h)
                # Open the logits above this quantile for normal inputs.
                first.bias -= torch.quantile(logits.float().flatten()[:100_000], 1 - open_rate)
            else:
                count = max(round(open_rate * gate.blocks), 1)
                gate.logit.fill_(-1.0)
                gate.logit[torch.randperm(gate.blocks, device=device)[:count]] = 1.0
            h = layer(h)
    return net
