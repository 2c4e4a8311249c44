"""A Triton kernel that masks the gradients of all layers: one launch in every step."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dg_lightning.kernel_launch import Launch

__all__ = ["masked_at_once"]

_BLOCK = 4096
_MOST = 1024  # programs: each goes over several blocks then


@triton.jit(do_not_specialize=["layers"])
def _mask(table, layers, BITS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Set gradients to 0 where the mask is; a row of the table is where both lie, and how many."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for layer in range(layers):
        gradients = tl.load(table + 3 * layer)
        masks = tl.load(table + 3 * layer + 1)
        size = tl.load(table + 3 * layer + 2)
        if ALIGNED:
            gradients = tl.multiple_of(gradients, 16)
            masks = tl.multiple_of(masks, 16)
        if BITS == 64:
            gradients = gradients.to(tl.pointer_type(tl.int64))
        elif BITS == 32:
            gradients = gradients.to(tl.pointer_type(tl.int32))
        else:
            gradients = gradients.to(tl.pointer_type(tl.int16))
        masks = masks.to(tl.pointer_type(tl.uint8))
        for at in range(first, size, tl.num_programs(0) * BLOCK):
            here = at + tl.arange(0, BLOCK)
            inside = here < size
            gone = tl.load(masks + here, mask=inside, other=1) == 0
            tl.store(gradients + here, 0, mask=gone)


_launch = Launch(_mask, num_warps=8)


def masked_at_once(
    gradients: Sequence[Tensor], masks: Sequence[Tensor]
) -> Callable[[], None] | None:
    """Set gradients to 0 where their mask is not set; return what does it again where they lie.

    None where the kernel does not do it: then torch must.

    Args:
        gradients: Gradients of one device and type.
        masks: A bool for each of their entries.
    """
    device, dtype = gradients[0].device, gradients[0].dtype
    table = []
    for gradient, mask in zip(gradients, masks, strict=True):
        alike = gradient.device == mask.device == device and gradient.dtype == dtype
        packed = gradient.is_contiguous() and mask.is_contiguous()
        if not alike or not packed or gradient.shape != mask.shape or gradient.is_complex():
            return None
        table.append([gradient.data_ptr(), mask.data_ptr(), mask.numel()])
    bits = 8 * dtype.itemsize
    if bits not in (16, 32, 64):
        return None
    aligned = not any(address % 16 for row in table for address in row[:2])
    blocks = sum(triton.cdiv(size, _BLOCK) for *_, size in table)
    # Nothing waits for the copy, which comes before the launch on the stream.
    on_host = torch.tensor(table, dtype=torch.int64, pin_memory=device.type == "cuda")
    constants = bits, aligned, _BLOCK
    on_device = on_host.to(device, non_blocking=True)
    numbers = len(table), *constants
    return _launch.repeatedly(min(blocks, _MOST), [on_device], numbers, constants)
