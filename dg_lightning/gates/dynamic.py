"""Input-dependent gates, computed by a GateNet (section 3.1 of the paper)."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from dg_lightning.gates.base import Gate, GateOptions, at_least_float32
from dg_lightning.gates.wide import wide_linear

__all__ = ["DynamicGate"]


class DynamicGate(Gate):
    """Input-dependent gate: a small network, the GateNet, decides per sample.

    By default the last weight is initialised to 0, so units start at their initial open rate for
    any input. Where tokens of a Transformer decide, let them differ from the start
    (`initial_spread`): gates that all start alike are closed alike.

    Args:
        in_features: Width of the GateNet's input, which is the layer's input.
        units: Number of gated units.
        network: `linear` is one matrix, `low_rank` a product of two with inner width `rank`, `mlp`
            has one hidden layer of `hidden` ReLU units.
        rank: Inner width of `low_rank`.
        hidden: Inner width of `mlp`.
        initial_spread: Standard deviation of the initial logits, over the temperature, for inputs
            of variance 1 to the last map.
        device: Device of the parameters.
        dtype: Dtype of the parameters; never narrower than float32.
        **options: Arguments of `Gate`.

    >>> gate = DynamicGate(8, 4, network="low_rank", rank=2)
    >>> gate(torch.randn(3, 8)).shape
    torch.Size([3, 4])
    """

    input_dependent = True
    accepts_half = True

    def __init__(
        self,
        in_features: int,
        units: int,
        *,
        network: Literal["linear", "low_rank", "mlp"] = "linear",
        rank: int = 32,
        hidden: int = 128,
        initial_spread: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        if not initial_spread >= 0:
            raise ValueError(f"`initial_spread` must be at least 0, got {initial_spread}.")
        super().__init__(units, device=device, **options)
        self.in_features = in_features
        self.initial_spread = initial_spread
        factory: dict[str, Any] = {"device": device, "dtype": at_least_float32(dtype)}
        layers: list[nn.Module]
        if network == "linear":
            layers = [nn.Linear(in_features, self.blocks, **factory)]
        elif min(rank, hidden) < 1:
            raise ValueError(f"`rank` and `hidden` must be at least 1, got {rank}, {hidden}.")
        elif network == "low_rank":
            first = nn.Linear(in_features, rank, bias=False, **factory)
            layers = [first, nn.Linear(rank, self.blocks, **factory)]
        elif network == "mlp":
            first = nn.Linear(in_features, hidden, **factory)
            layers = [first, nn.ReLU(), nn.Linear(hidden, self.blocks, **factory)]
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
        if self.initial_spread:
            std = self.initial_spread / math.sqrt(last.in_features)
            last.weight.normal_(std=std).mul_(self.temperature)
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
        last.weight[blocks] = 0.0  # nothing is drawn here: ranks would differ
        last.bias[blocks] = self.initial_logit().to(last.bias.dtype)
