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
        gates = {m.linear: (m.output_gate, m.input_gate) for m in maps}
        self.gates = {linear: ends for linear, ends in gates.items() if ends != (None, None)}
        self._step: int | None = None
        self._rates: dict[nn.Module, tuple[list[Tensor], list[Tensor]]] = {}

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Add the last forward pass to a step; another step starts afresh."""
        if step != self._step:
            self._step, self._rates = step, {linear: ([], []) for linear in self.gates}
        for linear, gates in self.gates.items():
            for rates, gate in zip(self._rates[linear], gates, strict=True):
                if gate is not None and gate.gate is not None:
                    rates.append(_open_rate(gate))

    def shares(self, mean: Callable[[Tensor], Tensor]) -> dict[nn.Module, Tensor]:
        """Return the share of samples with both ends open, ``(out, in)``; `mean` is over ranks."""
        found: dict[nn.Module, Tensor] = {}
        for linear, (outputs, inputs) in self._rates.items():
            if outputs:
                found[linear] = mean(torch.stack(outputs).mean(0)).unsqueeze(-1)
            if inputs:
                share = mean(torch.stack(inputs).mean(0))
                found[linear] = found[linear] * share if outputs else share
        return found


def _open_rate(gate: GateLike) -> Tensor:
    assert gate.gate is not None
    is_open = (gate.gate.detach() != 0).float()
    per_block = is_open.flatten(0, -2).mean(0) if is_open.ndim > 1 else is_open
    return per_block.repeat_interleave(gate.block_size)
