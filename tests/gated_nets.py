"""Nets with random gates and norms, for the tests of the runtime."""

from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning import GatedMLP
from dg_lightning.runtime.engines import FeedForward


def randomised(net: GatedMLP, seed: int = 0) -> Any:
    """Give gates and norms a state that training could have left, and return it in evaluation."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: Tensor, low: float, high: float) -> None:
        values = torch.rand(tensor.shape, generator=generator) * (high - low) + low
        tensor.data.copy_(values)

    for module in net.modules():
        state: Any = module
        if isinstance(module, nn.BatchNorm1d):
            fill(state.running_mean, -1, 1)
            fill(state.running_var, 0.5, 2)
        if isinstance(module, (nn.BatchNorm1d, nn.LayerNorm)):
            fill(state.weight, -2, 2)
            fill(state.bias, -1, 1)
        if hasattr(module, "logit"):
            fill(state.logit, -2, 2)
        if hasattr(module, "network"):
            fill(state.network[-1].weight, -1, 1)
            fill(state.network[-1].bias, -1, 1)
    return net.eval()


def feed_forward(
    inputs: int,
    blocks: int,
    block: int,
    outputs: int,
    activation: nn.Module,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    device: str = "cpu",
    scaled: bool = False,
    glu: bool = False,
) -> FeedForward:
    """Make a gated feed-forward with random weights."""
    made: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device}
    first, second = (
        nn.Linear(inputs, blocks * block, **made),
        nn.Linear(blocks * block, outputs, **made),
    )
    other = nn.Linear(inputs, blocks * block, **made) if glu else None
    return FeedForward.from_linears(first, activation, second, block, other, scaled)


def random_gate(
    samples: int, blocks: int, rate: float, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Open some blocks, of several the first for nobody and the second for all."""
    gate = (torch.rand(samples, blocks) < rate).to(dtype)
    if blocks > 2:
        gate[:, 0], gate[:, 1] = 0, 1
    return gate
