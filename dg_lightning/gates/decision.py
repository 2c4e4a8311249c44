"""The decision of a gate: from logits to p and the hard g, as one node of autograd's graph."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dg_lightning.gates.policies import Policy, deployed, is_plain, open_probability
from dg_lightning.own_kernels import kernel_on

__all__ = ["decided", "node_of", "pull_at"]


def decided(
    z: Tensor, temperature: Tensor, threshold: Tensor, policy: Policy, k: int | None, floor: int = 0
) -> tuple[Tensor, Tensor]:
    """Return p and the hard g of logits, see `deployed`; the gradient of g is the one of p.

    >>> z = torch.tensor([-1.0, 2.0], requires_grad=True)
    >>> p, g = decided(z, torch.tensor(1.0), torch.tensor(0.5), "threshold", None)
    >>> g.tolist()
    [0.0, 1.0]
    >>> g.sum().backward()
    >>> torch.equal(z.grad, p * (1 - p))
    True
    """
    if not is_plain(z) or temperature.requires_grad:  # whoever looks into it sees plain operations
        p = open_probability(z / temperature, policy)
        return p, deployed(p, threshold, k, floor)
    if z.requires_grad and torch.is_grad_enabled():
        both: tuple[Tensor, Tensor] = _Decision.apply(  # type: ignore[no-untyped-call]
            z, temperature, threshold, policy, k, floor
        )
        return both
    return _computed(z, temperature, threshold, policy, k, floor)


def node_of(value: Tensor) -> Any:
    """Return the node that has made a p or g, if a penalty can pull at it; else None."""
    node = value.grad_fn
    return node if isinstance(node, _Decision._backward_cls) else None


def pull_at(node: Any, pull: Tensor, scale: float) -> None:
    """Add ``scale * pull`` to the gradient by p when the next backward pass comes by.

    A hook would do the same, and take several times as long.
    """
    node.pulls = (*node.pulls, (pull, scale))


class _Decision(torch.autograd.Function):
    """p and g of logits. `pulls` are what was left by `pull_at`."""

    @staticmethod
    @override
    def forward(ctx: Any, z: Tensor, temperature: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        p, g = _computed(z, temperature, *settings)
        g.add_(p, alpha=0)  # what is not a number is to be seen
        ctx.save_for_backward(p, temperature)
        ctx.set_materialize_grads(False)
        ctx.pulls = ()
        return p, g

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        p, temperature = ctx.saved_tensors
        of_p, gradient = grad_outputs
        if of_p is not None:
            gradient = of_p if gradient is None else gradient + of_p
        for pull, scale in ctx.pulls:
            gradient = torch.zeros_like(p) if gradient is None else gradient
            gradient = gradient.add(pull, alpha=scale)
        ctx.pulls = ()  # once, however many losses there are
        if gradient is not None:
            gradient = torch.ops.aten.sigmoid_backward(gradient, p) / temperature
        return gradient, None, None, None, None, None


def _computed(
    z: Tensor, temperature: Tensor, threshold: Tensor, policy: Policy, k: int | None, floor: int
) -> tuple[Tensor, Tensor]:
    """Return p and g without a graph, in few operations: on a GPU each costs its launch."""
    if floor and k is None and z.is_cuda and policy != "hard_concrete":
        kernel = kernel_on(z.device, "gates.floor_kernel", "decided_with_floor", _try_floor)
        found = None if kernel is None else kernel(z, temperature, threshold, floor)
        if found is not None:
            both: tuple[Tensor, Tensor] = found
            return both
    p = open_probability(z / temperature, policy)
    if k is None and not floor:
        return p, torch.gt(p, threshold, out=torch.empty_like(p))
    return p, deployed(p, threshold, k, floor)


def _try_floor(decided_with_floor: Any, device: torch.device) -> None:
    decided_with_floor(torch.zeros(2, device=device), *torch.ones(2, device=device).unbind(), 1)
