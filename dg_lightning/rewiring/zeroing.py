"""Set to exactly 0 what a mask leaves out: done in every step, so it must be fast."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

__all__ = ["keep_only"]

_AS_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_IN_CACHE = 2**19  # entries
_WORTH_A_THREAD = 2**17
_MOST_THREADS = 4


def keep_only(kept: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set the entries of tensors to 0 where their mask, bool and of the same shape, is not set.

    >>> values = torch.tensor([1.0, torch.inf])
    >>> keep_only([(values, torch.tensor([True, False]))])
    >>> values.tolist()
    [1.0, 0.0]
    """
    flat, tensors, factors = [], [], []
    for values, mask in kept:
        integers = _AS_INTEGERS.get(values.dtype)
        if integers is None:
            values.detach().masked_fill_(~mask, 0)
            continue
        # As whole numbers, whose product with 0 is 0 and with 1 the same bits: torch's own ways are
        # several times as slow, or leave inf * 0 there.
        bits, ones = values.detach().view(integers), mask.view(torch.uint8)
        if bits.device.type == "cpu" and bits.is_contiguous() and ones.is_contiguous():
            flat.append((bits.view(-1), ones.view(-1)))
        else:
            tensors.append(bits)
            factors.append(ones)
    if flat and _has_wide_vectors():
        _multiply_piece_by_piece(flat)
    elif flat:
        _multiply_in_threads(flat)
    if tensors:
        torch._foreach_mul_(tensors, factors)


def _has_wide_vectors() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _multiply_piece_by_piece(flat: list[tuple[Tensor, Tensor]]) -> None:
    """Multiply tensors with others in place, by torch.

    It writes the second one, of another type, to memory as the first type first: not more than
    stays in caches.
    """
    for values, factors in flat:
        pieces = zip(values.split(_IN_CACHE), factors.split(_IN_CACHE), strict=True)
        for piece, theirs in pieces:
            piece.mul_(theirs)


def _multiply_in_threads(flat: list[tuple[Tensor, Tensor]]) -> None:
    """Multiply tensors with others in place, by numpy, which is faster without wide vectors."""
    import numpy as np

    arrays = [(values.numpy(), factors.numpy()) for values, factors in flat]
    total = sum(len(factors) for _, factors in arrays)
    threads = min(torch.get_num_threads(), _MOST_THREADS, total // _WORTH_A_THREAD) or 1

    def part(number: int) -> None:
        for values, factors in arrays:
            size = len(factors)
            here = slice(size * number // threads, size * (number + 1) // threads)
            np.multiply(values[here], factors[here], out=values[here])

    others = [_workers(os.getpid()).submit(part, number) for number in range(1, threads)]
    part(0)
    for other in others:
        other.result()
    for values, _ in flat:
        increment_version(values)


@cache
def _workers(process: int) -> ThreadPoolExecutor:
    # A process of its own each: threads do not survive a fork.
    return ThreadPoolExecutor(_MOST_THREADS - 1, thread_name_prefix="dg-lightning")
