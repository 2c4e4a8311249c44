"""A Triton kernel for the decision of gates with a floor: one launch in place of four."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["with_floor"]

_WIDEST = 8192
# To launch what is compiled already takes half the time of Triton's look at all arguments. In older
# versions, and in the interpreter, it goes differently.
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_LAUNCHES_DIRECTLY = _VERSION >= (3, 6) and not triton.knobs.runtime.interpret
_compiled: dict[Any, Any] = {}


@triton.jit
def _decide(p, threshold, hard, width, floor, WIDTH: tl.constexpr):
    """Open the units of a row that are above the threshold, and the `floor` largest."""
    unit = tl.arange(0, WIDTH)
    inside = unit < width
    here = tl.program_id(0).to(tl.int64) * width + unit
    value = tl.load(p + here, mask=inside, other=-1.0)
    # The bits of floats that are not negative have their order: the last one that is in is found
    # bit by bit, from the highest on. What lies outside of the row is negative.
    bits = value.to(tl.int32, bitcast=True)
    last = 0
    for place in range(31):
        higher = last | (1 << (30 - place))
        last = tl.where(tl.sum((bits >= higher).to(tl.int32)) >= floor, higher, last)
    above, tied = bits > last, bits == last
    missing = floor - tl.sum(above.to(tl.int32))
    forced = above | (tied & (tl.cumsum(tied.to(tl.int32)) <= missing))  # of equal ones the first
    is_open = (value > tl.load(threshold)) | forced
    tl.store(hard + here, is_open.to(tl.float32), mask=inside)


def with_floor(p: Tensor, threshold: Tensor, floor: int) -> Tensor | None:
    """Return 1 where p is above the threshold or among the `floor` largest of its row, else 0.

    Of equal ones the first win. None where the kernel does not do it: then torch must.
    """
    width = p.shape[-1]
    if p.dtype != torch.float32 or width > _WIDEST or not p.is_contiguous():
        return None
    hard = torch.empty_like(p)
    grid = (p.numel() // width, 1, 1)
    arguments = p, threshold, hard, width, floor, triton.next_power_of_2(width)
    with torch.cuda.device_of(p):  # where kernels are launched
        # What Triton has compiled holds for pointers that are aligned as those were.
        aligned = (p.data_ptr() | threshold.data_ptr() | hard.data_ptr()) % 16 == 0
        key = (width, floor, p.device, threshold.dtype)
        compiled = _compiled.get(key) if aligned else None
        if compiled is not None:
            compiled[grid](*arguments)
            return hard
        compiled = _decide[grid](*arguments, num_warps=4 if width <= 2048 else 8)
        if aligned and _LAUNCHES_DIRECTLY:
            _compiled[key] = compiled
    return hard
