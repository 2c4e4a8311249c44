"""The engine of our own kernels: rows are packed, two grouped products, a sum; and back."""

from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.gates import DynamicGate, Gate
from dg_lightning.runtime.engines import refuse_second_derivative
from dg_lightning.runtime.feed_forward import FeedForward
from dg_lightning.runtime.packing import Packing

__all__ = ["by_kernels", "decided_by_kernel"]


def by_kernels(x: Tensor, gate: Tensor, net: FeedForward, packing: Packing | None = None) -> Tensor:
    """Compute the open blocks by our own kernels."""
    with torch.cuda.device_of(x):  # where kernels are launched
        return _by_kernels(x.contiguous(), gate, net, packing)


def _by_kernels(x: Tensor, gate: Tensor, net: FeedForward, packing: Packing | None) -> Tensor:
    name = activation_name(net.activation)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate, *net.tensors))
    if packing is None:
        packing = Packing(gate)
    # Hidden units, before and behind their activation, and outputs.
    entries = (1 + learns) * net.block_size + len(net.second[0])
    packing.make_room(entries * x.element_size())
    arguments = x, gate, *net.first, *net.second, net.block_size, name, packing
    if learns:
        out: Tensor = _GatedFeedForward.apply(*arguments)  # type: ignore[no-untyped-call]
        return out
    return _forward(x, *arguments[2:], None)[0]


def decided_by_kernel(gate: Gate, x: Tensor) -> Packing | None:
    """Let one kernel do all of a gate's decision, if it can; else return None."""
    simple = (
        isinstance(gate, DynamicGate)
        and len(gate.network) == 1
        and gate.k is None
        and not gate._floor
        and gate.policy != "hard_concrete"
        and (gate.policy == "threshold" or not gate.training)
    )
    if not simple or torch.is_grad_enabled() or not x.is_cuda or x.dtype.itemsize != 2:
        return None
    assert isinstance(gate, DynamicGate)
    with torch.cuda.device_of(x):
        return Packing.decided(gate, x.contiguous())


def activation_name(activation: Any) -> str:
    """Return what the kernels call an activation."""
    names = {nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh"}
    name = names.get(type(activation))
    if name is None or getattr(activation, "approximate", "none") != "none":
        raise ValueError(
            f"The engine 'triton' has the activations {', '.join(names.values())}, got "
            f"{activation}: use engine='blocks'."
        )
    return name


def _forward(
    x: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    second_bias: Tensor | None,
    block: int,
    activation: str,
    packing: Packing,
    raw: Tensor | None,
) -> tuple[Tensor, Tensor]:
    weight = first.unflatten(0, (-1, block))
    bias = None if first_bias is None else first_bias.unflatten(0, (-1, block))
    hidden = packing.product(x, weight, bias, gathers=True, activation=activation, raw=raw)
    packed = packing.product(hidden, _by_block(second, block))
    return packing.sum_of_samples(packed, second_bias), hidden


def _by_block(second: Tensor, block: int) -> Tensor:
    """Return the second weights as ``(blocks, outputs, units)``."""
    by_block: Tensor = second.unflatten(1, (-1, block)).transpose(0, 1)
    return by_block


class _GatedFeedForward(torch.autograd.Function):
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
        activation: str,
        packing: Packing,
    ) -> Tensor:
        raw = x.new_empty(packing.rows, block)
        weights = first, first_bias, second, second_bias
        out, hidden = _forward(x, *weights, block, activation, packing, raw)
        ctx.save_for_backward(x, first, second, raw, hidden)
        ctx.block, ctx.activation, ctx.packing = block, activation, packing
        ctx.gate_type = gate.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative()
        x, first, second, raw, hidden = ctx.saved_tensors
        packing: Packing = ctx.packing
        of_x = of_gate = of_first = of_first_bias = of_second = of_second_bias = None
        wanted = ctx.needs_input_grad
        # Padding is 0 here, and so in all that follows.
        of_row = packing.gathered(gradient.contiguous())
        of_hidden = packing.product(of_row, _by_block(second, ctx.block).transpose(1, 2))
        if wanted[4]:
            of_second = _of_second(packing, of_row, hidden, second)
        # A hard gate is a factor of 1; what the loss would change by is its block's own part.
        of_gate = packing.through_activation(of_hidden, raw, ctx.activation, of_pairs=wanted[1])
        if of_gate is not None:
            of_gate = of_gate.to(ctx.gate_type)
        if wanted[2]:
            of_first = packing.outer(of_hidden, packing.gathered(x)).flatten(0, 1)
        if wanted[3]:
            of_first_bias = packing.sum_of_blocks(of_hidden).flatten()
        if wanted[0]:
            weight = first.unflatten(0, (-1, ctx.block)).transpose(1, 2)
            of_x = packing.sum_of_samples(packing.product(of_hidden, weight))
        if wanted[5]:
            of_second_bias = gradient.sum(0)
        return of_x, of_gate, of_first, of_first_bias, of_second, of_second_bias, None, None, None


def _of_second(packing: Packing, of_row: Tensor, hidden: Tensor, second: Tensor) -> Tensor:
    """Return the gradient of the second weights, in their own layout."""
    if second.stride(0) == 1:  # by unit: see `BlockGatedMLP.lay_out_by_unit`
        return packing.outer(hidden, of_row).flatten(0, 1).t()
    return packing.outer(of_row, hidden).transpose(0, 1).flatten(1)
