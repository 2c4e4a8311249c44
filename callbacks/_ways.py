"""How the gradient of a loss gets to the values of gates, and how to add to it."""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["Pull", "Way", "ways_to"]

Way: TypeAlias = Literal["by", "in", "no"]


class Pull(torch.autograd.Function):
    """A zero whose gradient by the entries of each value is given."""

    @staticmethod
    @override
    def forward(ctx: Any, pulls: list[Tensor], *values: Tensor) -> Tensor:
        ctx.pulls = pulls
        ctx.shapes = [value.shape for value in values]
        return values[0].new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        pulls = zip(ctx.pulls, ctx.shapes, strict=True)
        return (None, *((pull * grad_outputs[0]).expand(shape) for pull, shape in pulls))


def ways_to(loss: Tensor, values: list[Tensor]) -> list[Way]:
    """Tell for each value how the gradient of a loss gets to it.

    It comes `by`; or it gets to the node only that made the value, as where a compiled net hands
    out p beside the output that the loss is made of (`in`); or it does not get there (`no`).
    """
    edges, nodes, ahead = set(), set(), [(loss.grad_fn, loss.output_nr)]
    while ahead:
        edge = ahead.pop()
        if edge[0] is not None and edge not in edges:
            edges.add(edge)
            if edge[0] not in nodes:
                nodes.add(edge[0])
                ahead += edge[0].next_functions
    return [
        "by" if (v.grad_fn, v.output_nr) in edges else "in" if v.grad_fn in nodes else "no"
        for v in values
    ]
