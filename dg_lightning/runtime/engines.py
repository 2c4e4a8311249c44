"""Engines: ways to compute a gated feed-forward of which each sample needs some blocks only.

    y = W₂ (g ∘ act(W₁ x + b₁)) + b₂

All give the same values and the same gradients, with one exception that is the point of it: a block
that a sample closes is not computed, so its gate learns nothing from that sample's loss (as in a
mixture of experts), while `masked` computes it and lets its gate learn.
"""

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dg_lightning.runtime.feed_forward import FeedForward

__all__ = [
    "by_blocks",
    "by_open_rows",
    "dense",
    "forget_rooms",
    "masked",
    "refuse_second_derivative",
]


def masked(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Compute every block, and multiply by the gate: the reference."""
    hidden = net.activation(F.linear(x, *net.first))
    units = gate.to(hidden.dtype).repeat_interleave(net.block_size, -1)
    return F.linear(hidden * units, *net.second)


def dense(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Compute every block, and let closed gates learn nothing: as the engines that skip them."""
    if gate.requires_grad:
        gate = torch.where(gate != 0, gate, gate.detach())
    return masked(x, gate, net)


def by_blocks(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Multiply each block with the samples that open it, one block after the other."""
    if not torch.is_grad_enabled():
        return _without_gradients(x, gate, net)
    arguments = x, gate, *net.first, *net.second, net.block_size, net.activation
    out: Tensor = _ByBlocks.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def _without_gradients(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    second, _ = net.second
    every = net.blocks()
    # `addmm` writes the bias to memory before the product; added later, it would be rounded twice
    # in half precision, and cost a launch on a GPU.
    adds_later = not x.is_cuda and x.dtype.itemsize > 2
    is_open = gate != 0
    sample = is_open.t().nonzero()[:, 1]
    counts = is_open.sum(0).tolist()
    total = _of_nobody(x, net)
    most = len(sample) if x.is_cuda else _IN_CACHE // max(x.shape[1], len(second))
    groups = _groups(counts, most)
    samples = sample.split([sum(counts[start:stop]) for start, stop in groups])
    for (start, stop), own in zip(groups, samples, strict=True):
        blocks, sizes = [every[i] for i in range(start, stop)], counts[start:stop]
        inputs = torch.index_select(x, 0, own, out=_room("inputs", x, len(own), x.shape[1]))
        hidden = _room("hidden", x, len(own), net.block_size)
        packed = _room("packed", x, len(own), len(second))
        parts = zip(inputs.split(sizes), blocks, hidden.split(sizes), strict=True)
        for part, block, out in parts:
            if block.bias is None:
                torch.mm(part, block.first_t, out=out)
            elif adds_later:
                torch.mm(part, block.first_t, out=out).add_(block.bias)
            else:
                torch.addmm(block.bias, part, block.first_t, out=out)
        hidden = hidden.relu_() if isinstance(net.activation, nn.ReLU) else net.activation(hidden)
        parts = zip(hidden.split(sizes), blocks, packed.split(sizes), strict=True)
        for part, block, out in parts:
            torch.mm(part, block.second_t, out=out)
        total.index_add_(0, own, packed)
    return total


def _of_nobody(x: Tensor, net: FeedForward) -> Tensor:
    """Return what samples have that open no block at all."""
    shape, bias = (len(x), len(net.second[0])), net.second[1]
    return x.new_zeros(shape) if bias is None else bias.detach().expand(shape).clone()


_BAGS = 8  # sums of units that are made side by side
_IN_CACHE = 2**21  # entries of a tensor for the moment, while it is used


def _groups(counts: list[int], most: int) -> list[tuple[int, int]]:
    """Part blocks into runs with at most so many samples, or one block with more.

    Each is given as its first block and one past its last.

    >>> _groups([2, 3, 4, 9, 0, 1], 6)
    [(0, 2), (2, 3), (3, 4), (4, 6)]
    """
    starts, samples = [0], 0
    for block, count in enumerate(counts):
        if samples and samples + count > most:
            starts.append(block)
            samples = 0
        samples += count
    return list(pairwise([*starts, len(counts)]))


_MOST_ROOM = 2**26  # bytes of a tensor that is kept
_rooms = threading.local()


def forget_rooms() -> None:
    """Give the memory back that this thread keeps for `by_blocks`."""
    vars(_rooms).clear()


def _room(name: str, like: Tensor, rows: int, width: int) -> Tensor:
    """Return a tensor for the moment, whose memory is kept for the next time on a CPU.

    There, memory that is given back and taken again is filled with zeros by the system first, which
    takes as long as a good part of the products.
    """
    size = rows * width
    if like.device.type != "cpu" or size * like.element_size() > _MOST_ROOM:
        return like.new_empty(rows, width)
    kept: dict[Any, Tensor] = vars(_rooms).setdefault("kept", {})
    key = (name, like.dtype, torch.is_inference_mode_enabled())
    if key not in kept or len(kept[key]) < size:
        kept[key] = like.new_empty(size)
    return kept[key][:size].view(rows, width)


class _ByBlocks(torch.autograd.Function):
    """By hand: autograd would fill a gradient of the full size for every block."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        first: Tensor,
        first_bias: Tensor | None,
        second: Tensor,
        second_bias: Tensor | None,
        block: int,
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        is_open = gate != 0
        parts = is_open.t().nonzero()[:, 1].split(is_open.sum(0).tolist())
        out = x.new_zeros(len(x), len(second))
        if second_bias is not None:
            out += second_bias
        saved: list[Tensor] = []
        firsts, seconds = first.split(block), second.split(block, 1)
        biases = [None] * len(parts) if first_bias is None else first_bias.split(block)
        for rows, weight, bias, reader in zip(parts, firsts, biases, seconds, strict=True):
            raw = F.linear(_taken(x, rows), weight, bias)
            hidden = activation(raw)
            out.index_add_(0, rows, F.linear(hidden, reader))
            saved += [rows, raw, hidden]
        ctx.save_for_backward(x, gate, first, second, *saved)
        ctx.block, ctx.activation = block, activation
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative()
        x, gate, first, second, *saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        kept = (x, gate, first, x.new_empty(len(first)), second)
        of_x, of_gate, of_first, of_first_bias, of_second = (
            torch.zeros_like(t) if want else None for t, want in zip(kept, wanted, strict=False)
        )
        for index in range(len(saved) // 3):
            rows, raw, hidden = saved[3 * index : 3 * index + 3]
            units = slice(index * ctx.block, (index + 1) * ctx.block)
            of_out = _taken(gradient, rows)
            of_hidden = of_out @ second[:, units]
            if of_second is not None:
                of_second[:, units] = of_out.t() @ hidden
            if of_gate is not None:
                # A hard gate is a factor of 1; the loss would change by its block's own part.
                of_gate[rows, index] = (of_hidden * hidden).sum(-1).to(gate.dtype)
            with torch.enable_grad():
                raw = raw.detach().requires_grad_()
                (of_raw,) = torch.autograd.grad(ctx.activation(raw), raw, of_hidden)
            if of_first is not None:
                of_first[units] = of_raw.t() @ _taken(x, rows)
            if of_first_bias is not None:
                of_first_bias[units] = of_raw.sum(0)
            if of_x is not None:
                of_x.index_add_(0, rows, of_raw @ first[units])
        of_second_bias = gradient.sum(0) if wanted[5] else None
        return of_x, of_gate, of_first, of_first_bias, of_second, of_second_bias, None, None


def refuse_second_derivative() -> None:
    """Raise in a backward pass that somebody wants to differentiate in turn."""
    if torch.is_grad_enabled():  # it is, in a backward pass, with `create_graph` only
        raise RuntimeError(
            "A net that skips blocks has no second derivatives: use engine='masked' for those."
        )


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """Select rows; with all of them there is nothing to select."""
    return x if len(rows) == len(x) else x.index_select(0, rows)


@torch.no_grad()
def by_open_rows(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Read only the weights of open units, sample by sample: for few samples with few open blocks.

    Without gradients.
    """
    blocks, samples = net.blocks(), x.unbind()
    opened = (gate != 0).nonzero()
    is_open = opened.tolist()
    hidden = x.new_empty(len(is_open), net.block_size)
    for (sample, block), out in zip(is_open, hidden.unbind(), strict=True):
        weight, bias = blocks[block].first, blocks[block].bias
        if bias is None:
            torch.mv(weight, samples[sample], out=out)
        else:
            torch.addmv(bias, weight, samples[sample], out=out)
    hidden = net.activation(hidden)
    total = _of_nobody(x, net)
    outputs = total.unbind()
    if net.second[0].stride(0) == 1:  # laid out by unit
        counts = torch.bincount(opened[:, 0], minlength=len(x)).tolist()
        parts = zip(outputs, hidden.split(counts), opened[:, 1].split(counts), strict=True)
        for out, units, own in parts:
            out += _sum_of_units(units, own, net.second[0].t())
        return total
    for (sample, block), units in zip(is_open, hidden.unbind(), strict=True):
        outputs[sample].addmv_(blocks[block].second, units)
    return total


def _sum_of_units(values: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    """Sum the weights ``(units, outputs)`` of a sample's units, times their values.

    A unit at exactly 0, as half of them are behind a ReLU, is not read.
    """
    units = blocks.unsqueeze(1) * values.shape[1] + torch.arange(
        values.shape[1], device=blocks.device
    )
    active = values.flatten().nonzero()[:, 0]
    starts = torch.arange(0, len(active), -(-len(active) // _BAGS) or 1, device=active.device)
    return F.embedding_bag(
        units.flatten()[active],
        weights,
        starts,
        mode="sum",
        per_sample_weights=values.flatten()[active],
    ).sum(0)
