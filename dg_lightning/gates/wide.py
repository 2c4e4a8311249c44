"""Products in float32 of inputs in half precision, without a copy of the inputs in float32."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["wide_linear"]

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Products of half precision with a float32 result.
_HAS_WIDE_PRODUCTS = _VERSION >= (2, 8) and torch.version.hip is None


def wide_linear(h: Tensor, linear: nn.Linear) -> Tensor:
    """Return ``W h + b`` in the precision of the weights, which are float32 or wider.

    A gate reads all inputs to make few decisions, so its time is that of reading them; in float32
    they are twice as many bytes, and a copy must be written first.
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
    """``x Wᵀ``, W as the sum of two bfloat16 matrices: 16 bits of its mantissa."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _halves(torch.mm(x, _split(weight).t(), out_dtype=torch.float32), dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = gradient.to(x.dtype) @ weight.to(x.dtype)
        if ctx.needs_input_grad[1]:
            split = _split(gradient.t().contiguous())
            of_weight = _halves(torch.mm(split, x, out_dtype=torch.float32), dim=0)
        return of_x, of_weight


def _split(wide: Tensor) -> Tensor:
    """Stack a matrix rounded to bfloat16 and what the rounding left."""
    rounded = wide.to(torch.bfloat16)
    return torch.cat([rounded, (wide - rounded).to(torch.bfloat16)])


def _halves(stacked: Tensor, dim: int) -> Tensor:
    first, second = stacked.chunk(2, dim)
    return first + second
