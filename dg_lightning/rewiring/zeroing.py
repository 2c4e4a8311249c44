"""Set to exactly 0 what a mask leaves out."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["zero_outside"]

_AS_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def zero_outside(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set the entries of tensors to 0 where their mask, bool and of the same shape, is not set.

    >>> values = torch.tensor([1.0, torch.inf])
    >>> zero_outside([(values, torch.tensor([True, False]))])
    >>> values.tolist()
    [1.0, 0.0]
    """
    for values, mask in pairs:
        integers = _AS_INTEGERS.get(values.dtype)
        if integers is None:
            values.detach().masked_fill_(~mask, 0)
        else:
            # As integers: their product with 0 is 0 and with 1 the same bits. On a CPU a third of
            # the time of `masked_fill_`; a product of floats would turn inf into NaN.
            values.detach().view(integers).mul_(mask.view(torch.uint8))
