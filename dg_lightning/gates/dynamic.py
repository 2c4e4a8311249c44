"""Input-dependent gates: a GateNet reads the layer before (section 3.1 of the paper)."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from dg_lightning.gates.base import Gate, GateOptions, at_least_float32
from dg_lightning.gates.wide import wide_linear

__all__ = ["DynamicGate"]


class DynamicGate(Gate):
    """A small network, the GateNet, reads the layer's input and decides for every sample anew.

    Every unit starts at its initial open rate for every input: the last weight starts at 0.

    Args:
        in_features: Width of the layer before, which the GateNet reads.
        units: How many units the gate opens and closes.
        network: `linear` is one matrix, `low_rank` two with `rank` between them, `mlp` has `hidden`
            ReLU units.
        rank: Inner width of `low_rank`.
        hidden: Inner width of `mlp`.
        device: Where the parameters are made.
        dtype: Type of the parameters; never narrower than float32.
        **options: The arguments of `Gate`.

    >>> gate = DynamicGate(8, 4, network="low_rank", rank=2)
    >>> gate(torch.randn(3, 8)).shape
    torch.Size([3, 4])
    """

    input_dependent = True
    reads_half = True

    def __init__(
        self,
        in_features: int,
        units: int,
        *,
        network: Literal["linear", "low_rank", "mlp"] = "linear",
        rank: int = 32,
        hidden: int = 128,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(units, device=device, **options)
        self.in_features = in_features
        kind: dict[str, Any] = {"device": device, "dtype": at_least_float32(dtype)}
        layers: list[nn.Module]
        if network == "linear":
            layers = [nn.Linear(in_features, self.blocks, **kind)]
        elif min(rank, hidden) < 1:
            raise ValueError(f"`rank` and `hidden` must be at least 1, got {rank}, {hidden}.")
        elif network == "low_rank":
            first = nn.Linear(in_features, rank, bias=False, **kind)
            layers = [first, nn.Linear(rank, self.blocks, **kind)]
        elif network == "mlp":
            first = nn.Linear(in_features, hidden, **kind)
            layers = [first, nn.ReLU(), nn.Linear(hidden, self.blocks, **kind)]
        else:
            raise ValueError(f"`network` must be linear, low_rank or mlp, got {network!r}.")
        self.network = nn.Sequential(*layers)
        self.reset_parameters()

    @property
    def _maps(self) -> list[nn.Linear]:
        return [layer for layer in self.network if isinstance(layer, nn.Linear)]

    @override
    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for layer in self._maps:
            layer.reset_parameters()
        last = self._maps[-1]
        last.weight.zero_()
        last.bias.copy_(self.initial_logit())

    @override
    def logits(self, h: Tensor) -> Tensor:
        first, *later = self.network
        assert isinstance(first, nn.Linear)
        z = wide_linear(h, first)
        for layer in later:
            z = layer(z)
        return z

    @override
    def decision_macs(self, open_inputs: Tensor | None = None) -> Tensor:
        first, *later = self._maps
        fixed = sum(layer.in_features * layer.out_features for layer in later)
        inputs = torch.tensor(self.in_features) if open_inputs is None else open_inputs
        return inputs * first.out_features + fixed

    @override
    @torch.no_grad()
    def shift_bias(self, delta: float) -> None:
        self._maps[-1].bias.add_(delta)

    @override
    @torch.no_grad()
    def scale_logits(self, factor: float) -> None:
        for parameter in self._maps[-1].parameters():
            parameter.mul_(factor)

    @override
    def _revive_blocks(self, blocks: Tensor) -> None:
        last = self._maps[-1]
        last.weight[blocks] = 0.0
        last.bias[blocks] = self.initial_logit().to(last.bias.dtype)
