"""The Triton engine: packed rows, two grouped products, a sum; and their backward pass."""

from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.gates import DynamicGate, Gate
from dg_lightning.runtime.engines import refuse_second_derivative
from dg_lightning.runtime.feed_forward import FeedForward
from dg_lightning.runtime.packing import Packing

__all__ = ["decide_by_kernel", "run_triton"]


def run_triton(x: Tensor, gate: Tensor, net: FeedForward, packing: Packing | None = None) -> Tensor:
    """Compute the open blocks with Triton kernels."""
    with torch.cuda.device_of(x):  # kernels are launched on the current device
        return _run_triton(x.contiguous(), gate, net, packing)


def _run_triton(x: Tensor, gate: Tensor, net: FeedForward, packing: Packing | None) -> Tensor:
    name = activation_name(net.activation)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate, *net.tensors))
    if packing is None:
        packing = Packing(gate)
    # Hidden units, before and after their activation, and outputs.
    entries = (1 + needs_grad) * net.block_size + len(net.second[0])
    packing.fit_to_memory(entries * x.element_size())
    scales = _by_row(gate.detach().to(x.dtype), packing) if net.scaled else None
    arguments = x, gate, *net.first, *net.second, net.block_size, name, packing, scales
    if needs_grad:
        out: Tensor = _GatedFeedForward.apply(*arguments)  # type: ignore[no-untyped-call]
        return out
    return _forward(x, *arguments[2:], None)[0]


def decide_by_kernel(gate: Gate, x: Tensor) -> Packing | None:
    """Run the gate in a single kernel if it is simple enough, otherwise return None."""
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
        return Packing.decide(gate, x.contiguous())


def activation_name(activation: Any) -> str:
    """Return the kernels' name of an activation."""
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
    scales: Tensor | None,
    raw: Tensor | None,
) -> tuple[Tensor, Tensor]:
    weight = first.unflatten(0, (-1, block))
    bias = None if first_bias is None else first_bias.unflatten(0, (-1, block))
    hidden = packing.product(x, weight, bias, gathers=True, activation=activation, raw=raw)
    if scales is not None:
        hidden = hidden * scales
    packed = packing.product(hidden, _by_block(second, block))
    return packing.sum_samples(packed, second_bias), hidden


def _by_row(gate: Tensor, packing: Packing) -> Tensor:
    """Return the gate of each packed row, ``(rows, 1)``, without synchronizing with the device."""
    position = packing.position.flatten().long()
    closed = position < 0
    rows = gate.new_zeros(packing.rows + 1)  # closed gates share the last one
    rows[torch.where(closed, packing.rows, position)] = gate.flatten()
    return rows[:-1].unsqueeze(1)


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
        scales: Tensor | None,
    ) -> Tensor:
        raw = x.new_empty(packing.rows, block)
        weights = first, first_bias, second, second_bias
        out, hidden = _forward(x, *weights, block, activation, packing, scales, raw)
        ctx.save_for_backward(x, first, second, raw, hidden, scales)
        ctx.block, ctx.activation, ctx.packing = block, activation, packing
        ctx.gate_type = gate.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        refuse_second_derivative()
        x, first, second, raw, hidden, scales = ctx.saved_tensors
        packing: Packing = ctx.packing
        grad_x = grad_gate = grad_w1 = grad_b1 = grad_w2 = grad_b2 = None
        wanted = ctx.needs_input_grad
        # Padding rows are 0 here, and therefore in everything below.
        grad_rows = packing.gather(grad_output.contiguous())
        grad_hidden = packing.product(grad_rows, _by_block(second, ctx.block).transpose(1, 2))
        if wanted[4]:
            grad_w2 = _grad_w2(packing, grad_rows, hidden, second)
        # The gradient of an open gate is the sum of grad_hidden times its units before scaling.
        grad_gate = packing.activation_backward(grad_hidden, raw, ctx.activation, wanted[1])
        if grad_gate is not None:
            grad_gate = grad_gate.to(ctx.gate_type)
        if scales is not None:
            grad_hidden = grad_hidden * scales
        if wanted[2]:
            grad_w1 = packing.outer(grad_hidden, packing.gather(x)).flatten(0, 1)
        if wanted[3]:
            grad_b1 = packing.sum_blocks(grad_hidden).flatten()
        if wanted[0]:
            weight = first.unflatten(0, (-1, ctx.block)).transpose(1, 2)
            grad_x = packing.sum_samples(packing.product(grad_hidden, weight))
        if wanted[5]:
            grad_b2 = grad_output.sum(0)
        return grad_x, grad_gate, grad_w1, grad_b1, grad_w2, grad_b2, None, None, None, None


def _grad_w2(packing: Packing, grad_rows: Tensor, hidden: Tensor, second: Tensor) -> Tensor:
    """Return the gradient of the second weight, in the memory layout of the weight."""
    if second.stride(0) == 1:  # see `BlockGatedMLP.lay_out_by_unit`
        return packing.outer(hidden, grad_rows).flatten(0, 1).t()
    return packing.outer(grad_rows, hidden).transpose(0, 1).flatten(1)
