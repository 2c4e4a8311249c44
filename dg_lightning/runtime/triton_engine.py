"""The Triton engine: packed rows, grouped products, activations, a sum; and the way back."""

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
    # Hidden units, before and after their activation, other units, and outputs.
    entries = (1 + needs_grad + (net.other is not None)) * net.block_size + len(net.second[0])
    packing.fit_to_memory(entries * x.element_size())
    scale = gate.detach().contiguous() if net.scaled else None
    other = net.other or (None, None)
    maps = *net.first, *net.second, *other
    arguments: Any = *maps, net.block_size, name, packing, scale
    if needs_grad:
        out: Tensor = _GatedFeedForward.apply(x, gate, *arguments)  # type: ignore[no-untyped-call]
        return out
    return _forward(x, *arguments)[0]


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
    other: Tensor | None,
    other_bias: Tensor | None,
    block: int,
    activation: str,
    packing: Packing,
    scale: Tensor | None,
    keeps_raw: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return outputs, units before activation (None if not kept), gated units, other units."""

    def maker(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        by_block = weight.unflatten(0, (-1, block))
        return by_block, None if bias is None else bias.unflatten(0, (-1, block))

    value = None
    if other is not None:
        value = packing.product(x, *maker(other, other_bias), gathers=True)
    how: Any = {"activation": activation, "gate": scale, "value": value}
    raw = None
    if keeps_raw:
        raw = packing.product(x, *maker(first, first_bias), gathers=True)
        units = packing.activate(raw, **how)
    else:
        units = packing.product(x, *maker(first, first_bias), gathers=True, **how)
    packed = packing.product(units, _by_block(second, block))
    return packing.sum_samples(packed, second_bias), raw, units, value


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
        other: Tensor | None,
        other_bias: Tensor | None,
        block: int,
        activation: str,
        packing: Packing,
        scale: Tensor | None,
    ) -> Tensor:
        maps = first, first_bias, second, second_bias, other, other_bias
        options = block, activation, packing, scale
        out, raw, units, value = _forward(x, *maps, *options, keeps_raw=True)
        ctx.save_for_backward(x, first, second, other, raw, units, value, scale)
        ctx.block, ctx.activation, ctx.packing = block, activation, packing
        ctx.gate_type = gate.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        refuse_second_derivative()
        x, first, second, other, raw, units, value, scale = ctx.saved_tensors
        packing: Packing = ctx.packing
        grads: list[Tensor | None] = [None] * 12
        wanted = ctx.needs_input_grad
        # Padding rows are 0 here, and therefore in everything below.
        grad_rows = packing.gather(grad_output.contiguous())
        grad_raw = packing.product(grad_rows, _by_block(second, ctx.block).transpose(1, 2))
        if wanted[4]:
            grads[4] = _grad_w2(packing, grad_rows, units, second)
        if wanted[5]:
            grads[5] = grad_output.sum(0)
        # The gradient of an open gate is the sum of this times its units before scaling.
        grad_gate, grad_value = packing.activation_backward(
            grad_raw, raw, ctx.activation, scale, value, wanted[1]
        )
        grads[1] = None if grad_gate is None else grad_gate.to(ctx.gate_type)
        makers = [(2, grad_raw, first)]
        if grad_value is not None:
            makers.append((6, grad_value, other))
        rows = packing.gather(x) if wanted[2] or wanted[6] else x
        for place, gradient, weight in makers:
            if wanted[place]:
                grads[place] = packing.outer(gradient, rows).flatten(0, 1)
            if wanted[place + 1]:
                grads[place + 1] = packing.sum_blocks(gradient).flatten()
            if wanted[0]:
                back = weight.unflatten(0, (-1, ctx.block)).transpose(1, 2)
                part = packing.sum_samples(packing.product(gradient, back))
                grads[0] = part if grads[0] is None else grads[0] + part
        return tuple(grads)


def _grad_w2(packing: Packing, grad_rows: Tensor, hidden: Tensor, second: Tensor) -> Tensor:
    """Return the gradient of the second weight, in the memory layout of the weight."""
    if second.stride(0) == 1:  # see `BlockGatedMLP.lay_out_by_unit`
        return packing.outer(hidden, grad_rows).flatten(0, 1).t()
    return packing.outer(grad_rows, hidden).transpose(0, 1).flatten(1)
