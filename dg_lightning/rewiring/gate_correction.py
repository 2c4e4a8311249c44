"""The fused method's correction: how often the units at both ends of a connection were open.

A closed gate starves the weights into and out of its unit: only samples with both ends open
contribute to their gradient, which is a mean over all samples.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dg_lightning.compute.macs import linear_maps
from dg_lightning.gates.protocol import GateLike

__all__ = ["OpenRates"]


class OpenRates:
    """Open rates of the units around each linear map, over the micro-batches of a step.

    Args:
        module: The module.
        layers: The layers to track, of which those without gates are left out.
    """

    def __init__(self, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        wanted = set(layers)
        maps = [m for m in linear_maps(module) if m.linear in wanted]
        self.gates = {m.linear: m for m in maps if m.is_gated}
        self._step: int | None = None
        self._sums: dict[nn.Module, tuple[Tensor, int]] = {}  # of shares, over micro-batches

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Add the last forward pass to a step; another step starts afresh."""
        if step != self._step:
            self._step, self._sums = step, {}
        for linear, linear_map in self.gates.items():
            outputs, inputs = linear_map.ends(_is_open, every_output=True)
            if outputs is not None or inputs is not None:
                kernel = (None,) * (linear.weight.ndim - 2)
                share, (total, count) = _share(outputs, inputs), self._sums.get(linear, (0.0, 0))
                self._sums[linear] = (share[..., *kernel] + total, count + 1)

    def shares(self, mean: Callable[[Tensor], Tensor]) -> dict[nn.Module, Tensor]:
        """Return the share of samples with both ends open, which broadcasts to a layer's weight.

        `mean` is over ranks.
        """
        return {linear: mean(total / count) for linear, (total, count) in self._sums.items()}


def _share(outputs: Tensor | None, inputs: Tensor | None) -> Tensor:
    """Return the share of samples with both ends open, from ``(samples, units)`` of each."""
    if outputs is None:
        assert inputs is not None
        return inputs.mean(0)
    if inputs is None:
        return outputs.mean(0).unsqueeze(-1)
    if min(len(outputs), len(inputs)) == 1 or len(outputs) != len(inputs):
        # One end is the same for all samples, or rows are not the same samples.
        return outputs.mean(0).unsqueeze(-1) * inputs.mean(0)
    return outputs.T @ inputs / len(inputs)


def _is_open(gate: GateLike) -> Tensor | None:
    if gate.gate is None:
        return None
    is_open = (gate.gate.detach() != 0).float()
    return is_open.flatten(0, -2) if is_open.ndim > 1 else is_open.unsqueeze(0)
