"""How the gradient of a loss gets to the values of gates, and how to add to it."""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["Hook", "Pull", "Way", "ways_to"]

Way: TypeAlias = Literal["by", "in", "no"]


class Hook:
    """Adds to the gradient of a value when the backward pass comes by for the first time.

    `pulls` are what there is to add, as at the node of a gate's decision.
    """

    def __init__(self, value: Tensor, pull: Tensor, scale: float) -> None:
        self.pulls: tuple[tuple[Tensor, float], ...] = ((pull, scale),)
        self._handle = value.register_hook(self)

    def __call__(self, gradient: Tensor) -> Tensor:
        """Add it, once."""
        self._handle.remove()
        ((pull, scale),), self.pulls = self.pulls, ()
        return gradient.add(pull, alpha=scale)


class Pull(torch.autograd.Function):
    """A zero whose gradient by the entries of each value is given."""

    @staticmethod
    @override
    def forward(ctx: Any, pulls: list[Tensor], *values: Tensor) -> Tensor:
        ctx.gradients = pulls
        ctx.shapes = [value.shape for value in values]
        return values[0].new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        pulls = zip(ctx.gradients, ctx.shapes, strict=True)
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
