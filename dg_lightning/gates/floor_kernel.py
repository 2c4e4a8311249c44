"""A Triton kernel for the decision of gates with a floor: one launch in place of six."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from dg_lightning.kernel_launch import INTERPRETED, Launch

__all__ = ["decided_with_floor"]

_WIDEST = 8192
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _decide(z, temperature, threshold, p, hard, width, floor, WIDTH: tl.constexpr):
    """Open the units of a row that are above the threshold, and the `floor` largest."""
    unit = tl.arange(0, WIDTH)
    inside = unit < width
    here = tl.program_id(0).to(tl.int64) * width + unit
    scaled = tl.div_rn(tl.load(z + here, mask=inside, other=0.0), tl.load(temperature))
    # Triton's own exponential is less exact than torch's; the interpreter has no other.
    power = tl.exp(-scaled) if _INTERPRETED else libdevice.exp(-scaled)
    value = tl.div_rn(1.0, 1.0 + power)
    tl.store(p + here, value, mask=inside)
    # The bits of floats that are not negative have their order: the last one that is in is found
    # bit by bit, from the highest on. What lies outside of the row is negative.
    bits = tl.where(inside, value.to(tl.int32, bitcast=True), -1)
    last = 0
    for place in range(31):
        higher = last | (1 << (30 - place))
        last = tl.where(tl.sum((bits >= higher).to(tl.int32)) >= floor, higher, last)
    above, tied = bits > last, bits == last
    missing = floor - tl.sum(above.to(tl.int32))
    forced = above | (tied & (tl.cumsum(tied.to(tl.int32)) <= missing))  # of equal ones the first
    is_open = (value > tl.load(threshold)) | forced
    tl.store(hard + here, is_open.to(tl.float32), mask=inside)


_launch, _launch_wide = Launch(_decide, num_warps=4), Launch(_decide, num_warps=8)


def decided_with_floor(
    z: Tensor, temperature: Tensor, threshold: Tensor, floor: int
) -> tuple[Tensor, Tensor] | None:
    """Return p, and 1 where it is above the threshold or among the `floor` largest of its row.

    Of equal ones the first win. None where the kernel does not do it: then torch must.
    """
    width, tensors = z.shape[-1], (z, temperature, threshold)
    if width > _WIDEST or any(tensor.dtype != torch.float32 for tensor in tensors):
        return None
    if not z.is_contiguous():
        return None
    p, hard = torch.empty_like(z), torch.empty_like(z)
    launch = _launch if width <= 2048 else _launch_wide
    numbers = width, floor, triton.next_power_of_2(width)
    launch(z.numel() // width, (*tensors, p, hard), numbers, numbers)
    return p, hard
