"""Static and dynamic gates, and the plain settings they are built from."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from dg_lightning.gates.base import Gate, GateOptions, at_least_float32


class StaticGate(Gate):
    """Static gate with one learnable logit per unit, shared by all inputs.

    Args:
        units: Number of gated units.
        device: Device of the parameters.
        dtype: Dtype of the parameters, which is at least float32.
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
    def shift_bias(self, delta: float | Tensor) -> None:
        self.logit.add_(delta)

    @override
    @torch.no_grad()
    def scale_logits(self, factor: float) -> None:
        self.logit.mul_(factor)

    @override
    def _revive_blocks(self, blocks: Tensor) -> None:
        self.logit[blocks] = self.initial_logit().to(self.logit.dtype)


_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Whether torch.mm has `out_dtype`, for a float32 product of bfloat16 factors.
_HAS_WIDE_PRODUCTS = _VERSION >= (2, 8) and torch.version.hip is None


def wide_linear(h: Tensor, linear: nn.Linear) -> Tensor:
    """Return ``W h + b`` in the precision of the weights (float32 or wider).

    A gate reads many inputs and makes few decisions, so it is memory-bound. A float32 copy of `h`
    would have to be written first and is twice as large to read, so it is avoided if possible.
    """
    if h.dtype == linear.weight.dtype:
        same: Tensor = linear(h)
        return same
    splits = _HAS_WIDE_PRODUCTS and h.is_cuda and h.dtype == torch.bfloat16
    if splits and linear.weight.dtype == torch.float32 and not torch.compiler.is_compiling():
        product: Tensor = _SplitProduct.apply(h.flatten(0, -2), linear.weight)  # type: ignore[no-untyped-call]
        z: Tensor = product.unflatten(0, h.shape[:-1])
        return z if linear.bias is None else z + linear.bias
    wide: Tensor = linear(h.to(torch.promote_types(h.dtype, linear.weight.dtype)))
    return wide


class _SplitProduct(torch.autograd.Function):
    """Computes ``x Wᵀ`` with W split into a sum of two bfloat16 matrices (16 mantissa bits)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _add_halves(torch.mm(x, _split(weight).t(), out_dtype=torch.float32), dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = gradient.to(x.dtype) @ weight.to(x.dtype)
        if ctx.needs_input_grad[1]:
            split = _split(gradient.t().contiguous())
            weight_grad = _add_halves(torch.mm(split, x, out_dtype=torch.float32), dim=0)
        return x_grad, weight_grad


def _split(wide: Tensor) -> Tensor:
    """Stack a matrix rounded to bfloat16 and its rounding error."""
    rounded = wide.to(torch.bfloat16)
    return torch.cat([rounded, (wide - rounded).to(torch.bfloat16)])


def _add_halves(stacked: Tensor, dim: int) -> Tensor:
    first, second = stacked.chunk(2, dim)
    return first + second


class DynamicGate(Gate):
    """Input-dependent gate, in which a small network, the GateNet, decides for each sample.

    By default, the last weight matrix is initialised to 0, so units start at their initial open
    rate for any input. For per-token gates in a Transformer, set `initial_spread`, because gates
    that start identical tend to close together.

    Args:
        in_features: Number of inputs of the GateNet, which reads the layer's inputs.
        units: Number of gated units.
        network: `linear` is one matrix, `low_rank` is a product of two matrices with inner width
            `rank`, and `mlp` has one hidden layer of `hidden` ReLU units.
        rank: Inner width of `low_rank`.
        hidden: Number of hidden units of `mlp`.
        initial_spread: Standard deviation of the initial ``logit / τ``, assuming that the inputs of
            the last linear layer have variance 1.
        device: Device of the parameters.
        dtype: Dtype of the parameters, which is at least float32.
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
        self.initial_spread = initial_spread
        super().__init__(units, device=device, **options)
        self.in_features = in_features
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
    def shift_bias(self, delta: float | Tensor) -> None:
        self._maps[-1].bias.add_(delta)

    @override
    @torch.no_grad()
    def scale_logits(self, factor: float) -> None:
        for parameter in self._maps[-1].parameters():
            parameter.mul_(factor)

    @override
    def _revive_blocks(self, blocks: Tensor) -> None:
        last = self._maps[-1]
        last.weight[blocks] = 0.0  # random values would differ between ranks
        last.bias[blocks] = self.initial_logit().to(last.bias.dtype)


class GateSettings(GateOptions, total=False):
    """Plain settings for a layer's gate, with its kind and options."""

    kind: Literal["static", "dynamic"]
    network: Literal["linear", "low_rank", "mlp"]
    rank: int
    hidden: int
    initial_spread: float


def make_gate(
    settings: GateSettings,
    in_features: int,
    units: int,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> Gate:
    """Build a gate from its settings, for a layer with `units` units.

    >>> make_gate({"kind": "static", "threshold": 0.6}, in_features=8, units=4)
    StaticGate(units=4, policy=threshold)
    """
    check_gate_settings("gate", settings)
    options: dict[str, Any] = dict(settings)
    kind = options.pop("kind", "static")
    if kind == "static":
        return StaticGate(units, device=device, dtype=dtype, **options)
    return DynamicGate(in_features, units, device=device, dtype=dtype, **options)


def check_gate_settings(name: str, settings: Any) -> None:
    """Validate gate settings that were passed as the argument `name`."""
    if not isinstance(settings, Mapping) or not settings:
        raise ValueError(
            f"`{name}` must be gate settings such as {{'kind': 'static'}}, got {settings!r}."
        )
    options = dict(settings)
    kind = options.pop("kind", "static")
    if kind not in ("static", "dynamic"):
        raise ValueError(f"`kind` in `{name}` must be static or dynamic, got {kind!r}.")
    known = set(GateOptions.__annotations__)
    if kind == "dynamic":
        known |= {"network", "rank", "hidden", "initial_spread"}
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"A {kind} gate (`{name}`) has no setting {unknown[0]!r}. Choose from "
            f"{', '.join(sorted(known))}."
        )
