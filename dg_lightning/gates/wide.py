"""Float32 products of half-precision inputs, without a float32 copy of the inputs."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["wide_linear"]

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
# torch.mm with `out_dtype`.
_HAS_WIDE_PRODUCTS = _VERSION >= (2, 8) and torch.version.hip is None


def wide_linear(h: Tensor, linear: nn.Linear) -> Tensor:
    """Return ``W h + b`` in the precision of the weights, which are float32 or wider.

    A gate reads many inputs to make few decisions, so it is memory-bound; a float32 copy would have
    to be written first and doubles the bytes to read.
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
    """``x Wᵀ`` with W split into a sum of two bfloat16 matrices (16 mantissa bits)."""

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
