"""Engines: implementations of a gated feed-forward that may skip closed blocks.

    y = W₂ (g ∘ act(W₁ x + b₁)) + b₂,  or  W₂ (g ∘ act(W₁ x + b₁) ∘ (W₃ x + b₃)) + b₂

An open gate g is 1, or p if the gate scales.

All engines return the same outputs and gradients, with one exception: a gate gets no gradient from
the samples that close it, as in a mixture of experts. Only `masked` gives closed gates a gradient.
"""

import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ELEMENTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)


def elementwise(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an activation that can be applied block by block, but not in place.

    Raises:
        ValueError: If the activation may mix units, have parameters or draw random numbers.
    """
    if type(activation) not in _ELEMENTWISE or "forward" in vars(activation):
        raise ValueError(
            "Engines that skip blocks need an elementwise, deterministic activation from torch.nn "
            f"without parameters, got {activation}: use engine='masked'."
        )
    if getattr(activation, "inplace", False):
        activation = copy(activation)
        vars(activation)["inplace"] = False
    return activation


@dataclass(frozen=True, eq=False)
class FeedForward:
    """Linear layers with gated units between them: ``W₂ (g * act(W₁ x + b₁)) + b₂``.

    With `fc1_gate`, activated units are multiplied by the outputs of a third layer (SwiGLU).

    Args:
        fc1: Weight ``(units, inputs)`` and bias of the layer whose outputs are gated.
        activation: Elementwise nonlinearity applied to the outputs of `fc1`.
        fc2: Weight ``(outputs, units)`` and bias of the layer that reads the gated units.
        block_size: Number of adjacent units that share a gate.
        fc1_gate: Weight and bias of an optional third layer, shaped like those of `fc1`.
        scaled: Whether open gates may differ from 1.
        most_open: Largest number of blocks that a row can open; None if it can open all of them.
    """

    fc1: tuple[Tensor, Tensor | None]
    activation: Callable[[Tensor], Tensor]
    fc2: tuple[Tensor, Tensor | None]
    block_size: int
    fc1_gate: tuple[Tensor, Tensor | None] | None = None
    scaled: bool = False
    most_open: int | None = None

    @classmethod
    def from_linears(
        cls,
        fc1: nn.Linear,
        activation: Callable[[Tensor], Tensor],
        fc2: nn.Linear,
        block_size: int,
        fc1_gate: nn.Linear | None = None,
        scaled: bool = False,
        most_open: int | None = None,
    ) -> "FeedForward":
        """Create a feed-forward from linear layers."""
        maps = (fc1.weight, fc1.bias), (fc2.weight, fc2.bias)
        third = None if fc1_gate is None else (fc1_gate.weight, fc1_gate.bias)
        return cls(maps[0], activation, maps[1], block_size, third, scaled, most_open)

    @property
    def up_projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weights and biases of the layers that produce units."""
        return [self.fc1] if self.fc1_gate is None else [self.fc1, self.fc1_gate]

    @property
    def tensors(self) -> list[Tensor]:
        """All weights and biases."""
        maps = (*self.up_projections, self.fc2)
        return [tensor for pair in maps for tensor in pair if tensor is not None]

    def to(self, dtype: torch.dtype) -> "FeedForward":
        """Return a copy in another dtype, with gradients that flow through the cast."""
        fc1, fc2, *fc1_gate = (
            (w.to(dtype), None if b is None else b.to(dtype))
            for w, b in (self.fc1, self.fc2, *self.up_projections[1:])
        )
        return replace(self, fc1=fc1, fc2=fc2, fc1_gate=fc1_gate[0] if fc1_gate else None)


def masked(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Reference implementation: compute every block, then multiply by the gate."""
    units = net.activation(F.linear(x, *net.fc1))
    if net.fc1_gate is not None:
        units = units * F.linear(x, *net.fc1_gate)
    open_units = gate.to(units.dtype).repeat_interleave(net.block_size, -1)
    return F.linear(units * open_units, *net.fc2)


def dense(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Compute every block, but give closed gates no gradient, like engines that skip blocks."""
    if gate.requires_grad:
        gate = torch.where(gate != 0, gate, gate.detach())
    return masked(x, gate, net)


def run_blocks(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Compute each block for the samples that open it."""
    if not torch.is_grad_enabled():
        return _run_blocks_without_grad(x, gate, net)
    fc1_gate = net.fc1_gate or (None, None)
    tensors = Operands(x, gate, *net.fc1, *net.fc2, *fc1_gate)
    out: Tensor = _RunBlocks.apply(net.block_size, net.activation, *tensors)  # type: ignore[no-untyped-call]
    return out


def _run_blocks_without_grad(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    fc2, size = net.fc2[0], net.block_size
    in_blocks = [
        (weight.split(size), None if bias is None else bias.split(size))
        for weight, bias in net.up_projections
    ]
    second_in_blocks = fc2.split(size, 1)
    # `addmm` first writes the bias to memory, so adding it later saves time on a CPU. In half
    # precision this would round twice, and on a GPU it would cost a launch.
    adds_later = not x.is_cuda and x.dtype.itemsize > 2
    is_open = gate != 0
    block_of, sample = is_open.t().nonzero().unbind(1)
    counts = is_open.sum(0).tolist()
    total = _initial_outputs(x, net)
    most = len(sample) if x.is_cuda else _CACHE_ENTRIES // max(x.shape[1], len(fc2))
    groups = _groups(counts, most)
    lengths = [sum(counts[start:stop]) for start, stop in groups]
    samples, of_blocks = sample.split(lengths), block_of.split(lengths)
    for (start, stop), own, of_block in zip(groups, samples, of_blocks, strict=True):
        blocks, sizes = range(start, stop), counts[start:stop]
        inputs = torch.index_select(x, 0, own, out=_buffer("inputs", x, len(own), x.shape[1]))
        made = []
        for index, (weights, biases) in enumerate(in_blocks):
            made.append(_buffer(f"made {index}", x, len(own), size))
            for part, block, out in zip(
                inputs.split(sizes), blocks, made[-1].split(sizes), strict=True
            ):
                if biases is None:
                    torch.mm(part, weights[block].t(), out=out)
                elif adds_later:
                    torch.mm(part, weights[block].t(), out=out).add_(biases[block])
                else:
                    torch.addmm(biases[block], part, weights[block].t(), out=out)
        units = made[0].relu_() if isinstance(net.activation, nn.ReLU) else net.activation(made[0])
        if net.fc1_gate is not None:
            units = units * made[1]
        if net.scaled:
            units = units * gate[own, of_block].to(x.dtype).unsqueeze(1)
        packed = _buffer("packed", x, len(own), len(fc2))
        for part, block, out in zip(units.split(sizes), blocks, packed.split(sizes), strict=True):
            torch.mm(part, second_in_blocks[block].t(), out=out)
        total.index_add_(0, own, packed)
    return total


def _initial_outputs(x: Tensor, net: FeedForward) -> Tensor:
    """Return the outputs of samples that open no block: the bias."""
    shape, bias = (len(x), len(net.fc2[0])), net.fc2[1]
    return x.new_zeros(shape) if bias is None else bias.detach().expand(shape).clone()


_BAG_COUNT = 8  # number of partial sums computed in parallel
_CACHE_ENTRIES = 2**21  # a temporary tensor with at most this many entries stays in cache


def _groups(counts: list[int], most: int) -> list[tuple[int, int]]:
    """Split blocks into consecutive groups with at most `most` samples.

    A block with more samples forms its own group. Groups are (start, stop) pairs of block indices.

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


_MAX_BUFFER_BYTES = 2**26  # larger buffers are not kept
_buffers = threading.local()


def _buffer(name: str, like: Tensor, rows: int, width: int) -> Tensor:
    """Return a temporary tensor, whose memory is reused by later calls on a CPU.

    Otherwise the operating system would zero newly allocated pages, which is slow compared with the
    products.
    """
    size = rows * width
    if like.device.type != "cpu" or size * like.element_size() > _MAX_BUFFER_BYTES:
        return like.new_empty(rows, width)
    kept: dict[Any, Tensor] = vars(_buffers).setdefault("kept", {})
    key = (name, like.dtype, torch.is_inference_mode_enabled())
    if key not in kept or len(kept[key]) < size:
        kept[key] = like.new_empty(size)
    return kept[key][:size].view(rows, width)


class Operands(NamedTuple):
    """The tensors of a gated feed-forward, or a gradient or flag for each of them."""

    x: Any = None
    gate: Any = None
    fc1: Any = None
    fc1_bias: Any = None
    fc2: Any = None
    fc2_bias: Any = None
    fc1_gate: Any = None
    fc1_gate_bias: Any = None


class _RunBlocks(torch.autograd.Function):
    """Computes gradients manually, as autograd would fill a full-size one for every block."""

    @staticmethod
    def forward(
        ctx: Any, block: int, activation: Callable[[Tensor], Tensor], *tensors: Tensor | None
    ) -> Tensor:
        x, gate, fc1, fc1_bias, fc2, fc2_bias, fc1_gate, fc1_gate_bias = Operands(*tensors)
        is_open = gate != 0
        parts = is_open.t().nonzero()[:, 1].split(is_open.sum(0).tolist())
        out = x.new_zeros(len(x), len(fc2))
        if fc2_bias is not None:
            out += fc2_bias
        saved: list[Tensor | None] = []
        for index, rows in enumerate(parts):
            own = slice(index * block, (index + 1) * block)
            h = _take_rows(x, rows)
            raw = F.linear(h, fc1[own], None if fc1_bias is None else fc1_bias[own])
            value = None
            units = activation(raw)
            if fc1_gate is not None:
                value = F.linear(
                    h, fc1_gate[own], None if fc1_gate_bias is None else fc1_gate_bias[own]
                )
                units = units * value
            scale = gate[rows, index, None].to(x.dtype)
            out.index_add_(0, rows, F.linear(units * scale, fc2[:, own]))
            saved += [rows, raw, value]
        ctx.save_for_backward(x, gate, fc1, fc2, fc1_gate, *saved)
        ctx.block, ctx.activation = block, activation
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        check_no_double_backward()
        x, gate, fc1, fc2, fc1_gate, *saved = ctx.saved_tensors
        wanted = Operands(*ctx.needs_input_grad[2:])
        bias = x.new_empty(len(fc1))
        shapes = Operands(x, gate, fc1, bias, fc2, None, fc1_gate, bias)
        grads = Operands(
            *(
                torch.zeros_like(t) if want and t is not None else None
                for t, want in zip(shapes, wanted, strict=True)
            )
        )
        for index in range(len(saved) // 3):
            rows, raw, value = saved[3 * index : 3 * index + 3]
            own = slice(index * ctx.block, (index + 1) * ctx.block)
            grad_out, h = _take_rows(grad_output, rows), _take_rows(x, rows)
            grad_units = grad_out @ fc2[:, own]
            scale = gate[rows, index, None].to(x.dtype)
            with torch.enable_grad():
                raw = raw.detach().requires_grad_()
                hidden = ctx.activation(raw)
            units = hidden.detach() if value is None else hidden.detach() * value
            if grads.fc2 is not None:
                grads.fc2[:, own] = grad_out.t() @ (units * scale)
            if grads.gate is not None:
                grads.gate[rows, index] = (grad_units * units).sum(-1).to(gate.dtype)
            grad_units = grad_units * scale
            grad_hidden = grad_units if value is None else grad_units * value
            (grad_raw,) = torch.autograd.grad(hidden, raw, grad_hidden)
            up_projections = [(grad_raw, fc1, grads.fc1, grads.fc1_bias)]
            if value is not None:
                grad_value = grad_units * hidden.detach()
                up_projections.append((grad_value, fc1_gate, grads.fc1_gate, grads.fc1_gate_bias))
            for gradient, weight, grad_weight, grad_bias in up_projections:
                if grad_weight is not None:
                    grad_weight[own] = gradient.t() @ h
                if grad_bias is not None:
                    grad_bias[own] = gradient.sum(0)
                if grads.x is not None:
                    grads.x.index_add_(0, rows, gradient @ weight[own])
        fc2_bias = grad_output.sum(0) if wanted.fc2_bias else None
        return (
            None, None, grads.x, grads.gate, grads.fc1, grads.fc1_bias, grads.fc2, fc2_bias,
            grads.fc1_gate, grads.fc1_gate_bias,
        )  # fmt: skip


def check_no_double_backward() -> None:
    """Raise RuntimeError in a backward pass with `create_graph=True`."""
    if torch.is_grad_enabled():  # disabled in a backward pass without `create_graph`
        raise RuntimeError(
            "A net that skips blocks has no second derivatives: use engine='masked' to get them."
        )


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the selected rows, without a copy if all rows are selected."""
    return x if len(rows) == len(x) else x.index_select(0, rows)


@torch.no_grad()
def run_open_rows(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Read only the weights of open units, sample by sample, without gradients.

    This is fast for a few samples with few open blocks.
    """
    size, samples = net.block_size, x.unbind()
    opened = (gate != 0).nonzero()
    is_open = opened.tolist()
    made = []
    for weight, bias in net.up_projections:
        weights = weight.detach().split(size)
        biases = None if bias is None else bias.detach().split(size)
        made.append(x.new_empty(len(is_open), size))
        for (sample, block), out in zip(is_open, made[-1].unbind(), strict=True):
            if biases is None:
                torch.mv(weights[block], samples[sample], out=out)
            else:
                torch.addmv(biases[block], weights[block], samples[sample], out=out)
    hidden = net.activation(made[0])
    if net.fc1_gate is not None:
        hidden = hidden * made[1]
    if net.scaled:
        hidden = hidden * gate[tuple(opened.t())].to(x.dtype).unsqueeze(1)
    total = _initial_outputs(x, net)
    outputs = total.unbind()
    if net.fc2[0].stride(0) == 1:  # laid out by unit
        counts = torch.bincount(opened[:, 0], minlength=len(x)).tolist()
        parts = zip(outputs, hidden.split(counts), opened[:, 1].split(counts), strict=True)
        for out, units, own in parts:
            out += _sum_units(units, own, net.fc2[0].t())
        return total
    second_in_blocks = net.fc2[0].detach().split(size, 1)
    for (sample, block), units in zip(is_open, hidden.unbind(), strict=True):
        outputs[sample].addmv_(second_in_blocks[block], units)
    return total


def _sum_units(values: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    """Sum the weights ``(units, outputs)`` of one sample's units, multiplied by the units' values.

    Units that are exactly 0 are skipped. After a ReLU, these are about half of the units.
    """
    units = blocks.unsqueeze(1) * values.shape[1] + torch.arange(
        values.shape[1], device=blocks.device
    )
    active = values.flatten().nonzero()[:, 0]
    starts = torch.arange(0, len(active), -(-len(active) // _BAG_COUNT) or 1, device=active.device)
    return F.embedding_bag(
        units.flatten()[active],
        weights,
        starts,
        mode="sum",
        per_sample_weights=values.flatten()[active],
    ).sum(0)
