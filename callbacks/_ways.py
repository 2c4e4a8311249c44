"""How a penalty gets to the values of gates: what a loss is made of, and a term to add to it."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["Pull", "nodes_of"]


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


def nodes_of(loss: Tensor) -> set[Any]:
    """Return the nodes of autograd's graph that the gradient of a loss gets to."""
    nodes: set[Any] = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            ahead += [before for before, _ in node.next_functions]
    return nodes
