"""How often the units at the two ends of a connection were open: the fused method's correction.

A closed gate starves the weights into and out of its unit: their gradient is the mean over all
samples, of which only those count that had both ends open.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dg_lightning.compute import LinearMap, linear_maps
from dg_lightning.protocol import GateLike

__all__ = ["OpenRates"]


class OpenRates:
    """Open rates of the units around each linear map, summed over the micro-batches of a step.

    Args:
        module: The module.
        layers: The layers that matter.
    """

    def __init__(self, module: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        wanted = set(layers.values())
        self.maps = [m for m in linear_maps(module) if m.linear in wanted and _gated(m)]
        self._step: int | None = None
        self._seen = 0
        self._sums: dict[nn.Module, tuple[Tensor | None, Tensor | None]] = {}

    @torch.no_grad()
    def see(self, step: int) -> None:
        """Take the gates of the last forward pass, one of those that this step is made of."""
        if step != self._step:
            self._step, self._seen, self._sums = step, 0, {}
        self._seen += 1
        for m in self.maps:
            ends = _open_rate(m.output_gate), _open_rate(m.input_gate)
            before = self._sums.get(m.linear, (None, None))
            self._sums[m.linear] = (_added(before[0], ends[0]), _added(before[1], ends[1]))

    def rates(self) -> Tensor | None:
        """Return all rates as one vector, for a mean over processes."""
        parts = [end for ends in self._sums.values() for end in ends if end is not None]
        return torch.cat(parts) / self._seen if parts else None

    def by_layer(self, rates: Tensor | None) -> dict[nn.Module, Tensor]:
        """Return the share of samples that had both ends open, ``(out, in)`` or broadcastable."""
        found: dict[nn.Module, Tensor] = {}
        for linear, ends in self._sums.items():
            assert rates is not None
            sizes = [0 if end is None else len(end) for end in ends]
            outputs, inputs, rates = rates.split([*sizes, len(rates) - sum(sizes)])
            share = inputs if ends[0] is None else outputs.unsqueeze(-1)
            found[linear] = share * inputs if ends[0] is not None and ends[1] is not None else share
        return found


def _gated(m: LinearMap) -> bool:
    return m.input_gate is not None or m.output_gate is not None


def _open_rate(gate: GateLike | None) -> Tensor | None:
    """Return the share of samples that had each unit open."""
    if gate is None or gate.gate is None:
        return None
    is_open = (gate.gate.detach() != 0).float()
    per_block = is_open.flatten(0, -2).mean(0) if is_open.ndim > 1 else is_open
    return per_block.repeat_interleave(gate.block_size)


def _added(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    return now if before is None else before if now is None else before + now
