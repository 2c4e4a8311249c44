"""Triton kernels for an update of connections: one launch to choose them, one to change them."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from dg_lightning.kernel_launch import INTERPRETED, VERSION, Launch

from .news import HEADER

__all__ = ["changed_at_once", "rewired_at_once"]

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
    scores, marks, MARK: tl.constexpr, count, new, ADDS: tl.constexpr, finite, counters, start, end,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set `new` for the `count` largest scores of those whose mark is so; of equal ones the first.

    The smallest one that is in is found by its bits, eight at a time from the highest on: programs
    add up how often each digit occurs, and all of them see which one it must be. If any score, of
    whatever mark, is not finite, `finite` is set to 0.
    """
    arrived, digits = counters, counters + 32
    ties = digits + 4 * 256
    digit = tl.arange(0, 256)
    goal = tl.num_programs(0)
    smallest = start * 0  # a number of the program, not a constant
    left = count  # how many of those that equal the smallest so far are in, and how many there are
    equal = count
    largest = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(4):
        own = tl.zeros([256], tl.int32)
        for at in range(start, end, BLOCK):
            here = at + tl.arange(0, BLOCK)
            bits, allowed = _bits(scores, marks, MARK, here, here < end)
            if place == 0:
                largest = tl.maximum(largest, bits)
            else:
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
    if tl.max(largest) >= 0x7F800000:  # the bits of what is infinite, or beyond: not a number
        tl.store(finite, 0)
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


@triton.jit(do_not_specialize=["size", "share", "kept", "grown"])
def _rewire(
    old, keep, grow, new, finite, counters, size, share, kept, grown,
    EXCLUDE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep the largest of what there is, and grow the largest of what there is not.

    All programs run at once, and wait for each other where all must know what each has counted.
    """
    start = tl.program_id(0) * share
    end = tl.minimum(start + share, size)
    _choose(keep, old, 1, kept, new, False, finite, counters, start, end, PROGRAMS, BLOCK)
    counters += 32 + 4 * 256 + PROGRAMS
    if EXCLUDE:
        _choose(grow, old, 0, grown, new, True, finite, counters, start, end, PROGRAMS, BLOCK)
    else:
        _choose(grow, new, 0, grown, new, True, finite, counters, start, end, PROGRAMS, BLOCK)


_launch_rewire = Launch(_rewire, num_warps=16, launch_cooperative_grid=True)


def rewired_at_once(
    old: Tensor,
    keep: Tensor,
    grow: Tensor,
    kept: int,
    grown: int,
    exclude: bool,
    finite: Tensor | None = None,
) -> Tensor | None:
    """Return the `kept` of the old connections with the largest scores, and the best others.

    What counts of a score is its size, not its sign.

    Args:
        old: The connections, bool.
        keep: Scores for keeping, of the same shape.
        grow: Scores for growing, likewise.
        kept: How many stay.
        grown: How many come, the largest of those that do not stay; of equal ones the first.
        exclude: Whether none of the old ones may come again.
        finite: A bool that is unset if a score is not finite.

    Returns:
        The new connections; None where the kernel does not do it: then torch must.
    """
    floats = keep.dtype == grow.dtype == torch.float32 and old.shape == keep.shape == grow.shape
    packed = old.is_contiguous() and keep.is_contiguous() and grow.is_contiguous()
    if VERSION < (3, 6) or not floats or not packed or not 0 < old.numel() <= _MOST:
        return None
    if kept < 1 or grown < 1:
        return None
    size = old.numel()
    programs = min(_processors(old.device), triton.cdiv(size, _BLOCK))
    share = triton.cdiv(triton.cdiv(size, programs), _BLOCK) * _BLOCK
    most = triton.next_power_of_2(_processors(old.device))  # not of each layer: it is compiled in
    counters = torch.zeros(2 * (32 + 4 * 256 + most), dtype=torch.int32, device=old.device)
    new = torch.empty_like(old)
    tensors = old, keep, grow, new, old.new_empty(()) if finite is None else finite, counters
    constants = exclude, most, _BLOCK
    _launch_rewire(programs, tensors, (size, share, kept, grown, *constants), constants)
    return new


@cache
def _processors(device: torch.device) -> int:
    if INTERPRETED:  # programs run one after the other there, and cannot wait
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=["size", "columns", "rows", "every"])
def _change(
    mask, new, only_if, news, first, second, third, size, columns, rows, every,
    TENSORS: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take new connections, and count what there is to be told of them."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < size
    before = tl.load(mask + here, mask=inside, other=0)
    after = tl.load(new + here, mask=inside, other=0)
    made = tl.load(only_if) != 0
    after = tl.where(made, after, before)
    tl.store(mask + here, after, mask=inside)
    changed = inside & (after != before)
    zero = tl.zeros([BLOCK], tl.float32)
    tl.store(first + here, zero, mask=changed)
    if TENSORS > 1:
        tl.store(second + here, zero, mask=changed)
    if TENSORS > 2:
        tl.store(third + here, zero, mask=changed)
    header = news.to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_add(header, tl.sum((inside & (after != 0)).to(tl.int64)))
    tl.atomic_add(header + 1, tl.sum((inside & (after == before)).to(tl.int64)))
    tl.store(header + 2, made.to(tl.int64))
    # All write the same: that there is one.
    news += HEADER
    one = tl.full([BLOCK], 1, tl.uint8)
    tl.store(news + here % columns, one, mask=inside & (after != 0))
    tl.store(news + columns + here // columns, one, mask=inside & (after != 0))
    tl.store(news + columns + rows + here // every, after, mask=inside & (here % every == 0))


_launch_change = Launch(_change, num_warps=4)


def changed_at_once(
    mask: Tensor, new: Tensor, only_if: Tensor | None, at_zero: list[Tensor], every: int
) -> Tensor | None:
    """Change a mask in place, and set to 0 what belongs to connections that are new or gone.

    Args:
        mask: The connections, bool.
        new: What they become.
        only_if: A bool; if it is not set, nothing changes.
        at_zero: The weights, and what an optimizer keeps for each of them.
        every: The step of the positions whose history is followed.

    Returns:
        What `News` takes to the host; None where the kernel does not do it: then torch must.
    """
    floats = all(t.dtype == torch.float32 and t.is_contiguous() for t in at_zero)
    alike = new.shape == mask.shape and new.dtype == mask.dtype == torch.bool
    if not floats or not alike or len(at_zero) > 3 or mask.numel() > _MOST:
        return None
    if not mask.is_contiguous() or not new.is_contiguous():
        return None
    size, rows, device = mask.numel(), len(mask), mask.device
    columns, samples = size // rows, triton.cdiv(size, every)
    news = torch.zeros(HEADER + columns + rows + samples, dtype=torch.uint8, device=device)
    made = torch.ones((), dtype=torch.bool, device=device) if only_if is None else only_if
    three = [*at_zero, *at_zero[:1] * 2][:3]  # some are not used
    tensors = mask, new, made, news, *three
    constants = len(at_zero), HEADER, 1024
    numbers = size, columns, rows, every, *constants
    _launch_change(triton.cdiv(size, 1024), tensors, numbers, constants)
    for changed in (mask, *at_zero):
        increment_version(changed)
    return news
