"""Policies: how a gate's probability becomes its gate, in training and when deployed.

Pure functions of tensors. `z` is the logit already divided by the temperature.
"""

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "Policy",
    "deployed",
    "is_plain",
    "logit_for",
    "open_probability",
    "raised",
    "sampled",
    "straight_through",
    "top_k_mask",
]

Policy: TypeAlias = Literal["threshold", "top_k", "bernoulli", "soft", "concrete", "hard_concrete"]

# Concrete relaxations: temperature of the noise, and the interval that hard-concrete stretches to
# before it clips (Louizos, Welling, Kingma: "Learning Sparse Neural Networks through L0
# Regularization", arXiv:1712.01312).
NOISE_TEMPERATURE = 2 / 3
STRETCH = (-0.1, 1.1)
_HARD_CONCRETE_SHIFT = NOISE_TEMPERATURE * math.log(-STRETCH[0] / STRETCH[1])


def straight_through(hard: Tensor, probability: Tensor) -> Tensor:
    """Return `hard` in the forward pass with the gradient of `probability` in the backward pass.

    >>> p = torch.tensor([0.2, 0.7], requires_grad=True)
    >>> g = straight_through((p > 0.5).float(), p)
    >>> g.tolist()
    [0.0, 1.0]
    >>> g.sum().backward()
    >>> p.grad.tolist()
    [1.0, 1.0]
    """
    return hard + (probability - probability.detach())


def top_k_mask(scores: Tensor, k: int, into: Tensor | None = None) -> Tensor:
    """Mark the `k` largest scores of the last axis; of equal scores the first ones win.

    With `into`, a mask that is changed, beside what is marked in it already.

    >>> top_k_mask(torch.tensor([0.5, 0.9, 0.5, 0.1]), 2).tolist()
    [True, True, False, False]
    """
    scores = scores.detach()
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool) if into is None else into
    if scores.is_cuda:  # few operations: each costs its launch, and equal scores come in order
        mask = torch.zeros_like(scores, dtype=torch.bool) if into is None else into
        return mask.scatter_(-1, scores.topk(k, dim=-1, sorted=False).indices, True)
    if scores.ndim == 1:
        order = scores.argsort(dim=-1, descending=True, stable=True)
        mask = torch.zeros_like(scores, dtype=torch.bool) if into is None else into
        return mask.scatter_(-1, order[..., :k], True)
    last = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    # Of equal scores, which ones torch.topk picks differs from device to device: count them out.
    above, tied = scores > last, scores == last
    missing = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    mask = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= missing))
    return mask if into is None else into.logical_or_(mask)


def open_probability(z: Tensor, policy: Policy) -> Tensor:
    """Return the chance that a gate is open; of a hard-concrete gate, that it is not 0."""
    return torch.sigmoid(z - _HARD_CONCRETE_SHIFT if policy == "hard_concrete" else z)


def logit_for(probability: float, policy: Policy) -> float:
    """Return the z of a probability: the inverse of `open_probability`."""
    z = math.log(probability / (1 - probability))
    return z + _HARD_CONCRETE_SHIFT if policy == "hard_concrete" else z


def deployed(p: Tensor, threshold: Tensor, k: int | None, floor: int = 0) -> Tensor:
    """Return the hard gate: 1 for the `k` largest p, or where p is above the threshold.

    The `floor` largest are open in any case.
    """
    is_open = p > threshold if k is None else top_k_mask(p, k)
    if floor > (k or 0):
        is_open = raised(is_open, p, floor)
    hard = is_open.to(p.dtype)
    return straight_through(hard, p) if p.requires_grad else hard


def raised(is_open: Tensor, p: Tensor, floor: int) -> Tensor:
    """Open the `floor` largest p of each row too, in place; what is open must be the largest p.

    >>> raised(torch.tensor([[True, False, False]]), torch.tensor([[0.9, 0.2, 0.3]]), 2).tolist()
    [[True, False, True]]
    """
    p = p.detach()
    if p.ndim == 1 or p.is_cuda or not is_plain(p):  # a GPU would be waited for
        return top_k_mask(p, floor, into=is_open)
    # As a rule enough are open, and then the largest are among them: counting takes little time.
    lacking = is_open.sum(-1, dtype=torch.int32) < floor
    if lacking.any():
        is_open[lacking] = top_k_mask(p[lacking], floor, into=is_open[lacking])
    return is_open


def is_plain(p: Tensor) -> bool:
    """Tell whether a tensor is one in memory, which a kernel can read."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if type(p) not in (Tensor, nn.Parameter) or forward_ad._current_level >= 0:
        return False
    return not torch._C._are_functorch_transforms_active() and p.numel() > 0


def sampled(z: Tensor, p: Tensor, policy: Policy) -> Tensor:
    """Return the gate that a noisy policy draws in training, one draw per entry of p."""
    if policy == "bernoulli":
        return straight_through(torch.bernoulli(p.detach()), p)
    noise = torch.logit(torch.rand_like(p).clamp(1e-6, 1 - 1e-6))
    sample = torch.sigmoid((z + noise) / NOISE_TEMPERATURE)
    if policy == "concrete":
        return sample
    low, high = STRETCH
    return (sample * (high - low) + low).clamp(0, 1)
