"""A Triton kernel that drops and grows connections in one launch, in place of twenty.

All its programs run at once, and wait for each other where all have to know what each has counted.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rewired_at_once"]

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_BLOCK = 4096
_MOST = 2**31 - 2**20  # positions that a program can count


@triton.jit
def _wait_for_all(arrived, goal):
    """Let no program go on before all have come here."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1)
    while tl.atomic_add(arrived, 0) < goal:
        pass
    tl.debug_barrier()


@triton.jit
def _bits(scores, marks, MARK: tl.constexpr, here, inside):
    """Return scores as whole numbers of the same order, and which of them may be chosen."""
    value = tl.load(scores + here, mask=inside, other=0.0)
    allowed = inside & (tl.load(marks + here, mask=inside, other=2) == MARK)
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, allowed


@triton.jit
def _choose(
    scores, marks, MARK: tl.constexpr, count, new, ADDS: tl.constexpr, counters, start, end,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set `new` for the `count` largest scores of those whose mark is so; of equal ones the first.

    The smallest one that is in is found by its bits, eight at a time from the highest on: programs
    add up how often each digit occurs, and all of them see which one it must be.
    """
    arrived, digits = counters, counters + 32
    ties = digits + 4 * 256
    digit = tl.arange(0, 256)
    goal = tl.num_programs(0)
    smallest = start * 0
    left = count
    equal = count
    for place in tl.static_range(4):
        own = tl.zeros([256], tl.int32)
        for at in range(start, end, BLOCK):
            here = at + tl.arange(0, BLOCK)
            bits, allowed = _bits(scores, marks, MARK, here, here < end)
            if place > 0:
                allowed = allowed & ((bits >> (32 - 8 * place)) == smallest)
            own += tl.histogram((bits >> (24 - 8 * place)) & 255, 256, mask=allowed)
        tl.atomic_add(digits + 256 * place + digit, own, mask=own > 0)
        _wait_for_all(arrived, goal)
        goal += tl.num_programs(0)
        every = tl.load(digits + 256 * place + digit, cache_modifier=".cg")
        found = tl.max(tl.where(tl.cumsum(every, reverse=True) >= left, digit, 0))
        left -= tl.sum(tl.where(digit > found, every, 0))
        equal = tl.sum(tl.where(digit == found, every, 0))
        smallest = (smallest << 8) | found
    before = start * 0
    if equal > left:  # who is first is counted over all programs
        for at in range(start, end, BLOCK):
            here = at + tl.arange(0, BLOCK)
            bits, allowed = _bits(scores, marks, MARK, here, here < end)
            before += tl.sum((allowed & (bits == smallest)).to(tl.int32))
        tl.atomic_add(ties + tl.program_id(0), before)
        _wait_for_all(arrived, goal)
        others = tl.arange(0, PROGRAMS)
        earlier = others < tl.program_id(0)
        before = tl.sum(tl.load(ties + others, mask=earlier, other=0, cache_modifier=".cg"))
    for at in range(start, end, BLOCK):
        here = at + tl.arange(0, BLOCK)
        inside = here < end
        bits, allowed = _bits(scores, marks, MARK, here, inside)
        tied = (allowed & (bits == smallest)).to(tl.int32)
        chosen = allowed & (bits > smallest)
        chosen = chosen | ((tied == 1) & ((before + tl.cumsum(tied) <= left) | (equal == left)))
        before += tl.sum(tied)
        if ADDS:
            chosen = chosen | (tl.load(new + here, mask=inside, other=0) == 1)
            tl.debug_barrier()
        tl.store(new + here, chosen.to(tl.uint8), mask=inside)
    tl.debug_barrier()


@triton.jit
def _rewire(
    old, keep, grow, new, counters, size, share, kept, grown,
    EXCLUDE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep the largest of what there is, and grow the largest of what there is not."""
    start = tl.program_id(0) * share
    end = tl.minimum(start + share, size)
    _choose(keep, old, 1, kept, new, False, counters, start, end, PROGRAMS, BLOCK)
    counters += 32 + 4 * 256 + PROGRAMS
    if EXCLUDE:
        _choose(grow, old, 0, grown, new, True, counters, start, end, PROGRAMS, BLOCK)
    else:
        _choose(grow, new, 0, grown, new, True, counters, start, end, PROGRAMS, BLOCK)


def rewired_at_once(
    old: Tensor, keep: Tensor, grow: Tensor, kept: int, grown: int, exclude: bool
) -> Tensor | None:
    """Return the `kept` of the old connections with the largest scores, and the best others.

    Args:
        old: The connections, bool.
        keep: Scores for keeping, at least 0, of the same shape.
        grow: Scores for growing, likewise.
        kept: How many stay.
        grown: How many come, the largest of those that do not stay; of equal ones the first.
        exclude: Whether none of the old ones may come again.

    Returns:
        The new connections; None where the kernel does not do it: then torch must.
    """
    floats = keep.dtype == grow.dtype == torch.float32
    packed = old.is_contiguous() and keep.is_contiguous() and grow.is_contiguous()
    if _VERSION < (3, 6) or not floats or not packed or not 0 < old.numel() <= _MOST:
        return None
    if kept < 1 or grown < 1:
        return None
    size = old.numel()
    programs = min(_processors(old.device), triton.cdiv(size, _BLOCK))
    share = triton.cdiv(triton.cdiv(size, programs), _BLOCK) * _BLOCK
    most = triton.next_power_of_2(programs)
    counters = torch.zeros(2 * (32 + 4 * 256 + most), dtype=torch.int32, device=old.device)
    new = torch.empty_like(old)
    with torch.cuda.device_of(old):
        _rewire[(programs,)](
            old.view(torch.uint8), keep, grow, new.view(torch.uint8), counters, size, share,
            kept, grown, exclude, most, _BLOCK, num_warps=16, launch_cooperative_grid=True,
        )  # fmt: skip
    return new


@cache
def _processors(device: torch.device) -> int:
    if _INTERPRETED:  # programs run one after the other there, and cannot wait
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
