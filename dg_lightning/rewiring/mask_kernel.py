"""A Triton kernel that masks the gradients of all layers: one launch in every step."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dg_lightning.kernel_launch import DIRECTLY, INTERPRETED, Launch

__all__ = ["masked_at_once"]

_BLOCK = 4096
_MOST = 1024  # programs: each goes over several blocks then


@triton.jit(do_not_specialize=["layers"])
def _mask(table, layers, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Set gradients to 0 where the mask is; a row of the table is where both lie, and how many.

    The blocks of all layers, one after the other, are dealt out to the programs in turn.
    """
    block = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    for layer in range(layers):
        gradients = tl.load(table + 3 * layer)
        masks = tl.load(table + 3 * layer + 1).to(tl.pointer_type(tl.uint8))
        size = tl.load(table + 3 * layer + 2)
        if BITS == 64:
            gradients = gradients.to(tl.pointer_type(tl.int64))
        elif BITS == 32:
            gradients = gradients.to(tl.pointer_type(tl.int32))
        else:
            gradients = gradients.to(tl.pointer_type(tl.int16))
        masks = tl.multiple_of(masks, 16)
        for at in range(block * BLOCK, size, programs * BLOCK):
            here = at + tl.arange(0, BLOCK)
            if at + BLOCK <= size:  # sixteen at a time, which a condition on each would prevent
                tl.store(gradients + here, 0, mask=tl.load(masks + here) == 0)
            else:
                gone = tl.load(masks + here, mask=here < size, other=1) == 0
                tl.store(gradients + here, 0, mask=gone)
        block = (block + programs - tl.cdiv(size, BLOCK) % programs) % programs


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
    if not (DIRECTLY or INTERPRETED):  # then a recording is faster
        return None
    device, dtype = gradients[0].device, gradients[0].dtype
    bits, table = 8 * dtype.itemsize, []
    for gradient, mask in zip(gradients, masks, strict=True):
        alike = gradient.device == mask.device == device and gradient.dtype == dtype
        packed = gradient.is_contiguous() and mask.is_contiguous() and mask.data_ptr() % 16 == 0
        if not alike or not packed or gradient.shape != mask.shape:
            return None
        table.append([gradient.data_ptr(), mask.data_ptr(), mask.numel()])
    if bits not in (16, 32, 64) or dtype.is_complex:
        return None
    blocks = sum(triton.cdiv(size, _BLOCK) for *_, size in table)
    # Nothing waits for the copy, which comes before the launch on the stream.
    on_host = torch.tensor(table, dtype=torch.int64, pin_memory=device.type == "cuda")
    on_device = on_host.to(device, non_blocking=True)
    constants = bits, _BLOCK
    numbers = len(table), *constants
    return _launch.repeatedly(max(1, min(blocks, _MOST)), [on_device], numbers, constants)
