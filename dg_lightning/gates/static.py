"""Static gates: learned structural dropout (section 3.1 of the paper)."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from dg_lightning.gates.base import Gate, GateOptions, at_least_float32

__all__ = ["StaticGate"]


class StaticGate(Gate):
    """Static gate: one learnable logit per unit, the same for every input.

    Args:
        units: Number of gated units.
        device: Device of the parameters.
        dtype: Dtype of the parameters; never narrower than float32.
        **options: Arguments of `Gate`.

    >>> gate = StaticGate(4, initial_open_rate=0.9)
    >>> gate(torch.zeros(2, 3)).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    input_dependent = False

    def __init__(
        self,
        units: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(units, device=device, **options)
        self.logit = nn.Parameter(
            torch.empty(self.blocks, device=device, dtype=at_least_float32(dtype))
        )
        self.reset_parameters()

    @override
    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.logit.copy_(self.initial_logit())

    @override
    def logits(self, h: Tensor) -> Tensor:
        return self.logit

    @override
    def decision_macs(self, open_inputs: Tensor | None = None) -> Tensor:
        return torch.tensor(0)

    @override
    @torch.no_grad()
    def shift_bias(self, delta: float) -> None:
        self.logit.add_(delta)

    @override
    @torch.no_grad()
    def scale_logits(self, factor: float) -> None:
        self.logit.mul_(factor)

    @override
    def _revive_blocks(self, blocks: Tensor) -> None:
        self.logit[blocks] = self.initial_logit().to(self.logit.dtype)
