"""Policies define how a probability becomes a gate, in training and in deployment.

All functions here are pure. `z` is the logit divided by the temperature.
"""

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

Policy: TypeAlias = Literal["threshold", "top_k", "bernoulli", "soft", "concrete", "hard_concrete"]
HARD_POLICIES = ("threshold", "top_k", "bernoulli")  # g is 0 or 1 in training too

# Temperature of the concrete relaxations, and the interval that hard-concrete stretches samples to
# before clipping them. See Louizos, Welling, Kingma: "Learning Sparse Neural Networks through L0
# Regularization", arXiv:1712.01312.
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


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """Return a mask of the `k` largest scores along the last axis.

    Among equal scores, those with a lower index are chosen first.

    >>> top_k_mask(torch.tensor([0.5, 0.9, 0.5, 0.1]), 2).tolist()
    [True, True, False, False]
    """
    scores = scores.detach()
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    last = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    # torch.topk breaks ties differently on each device, so break them here.
    above, tied = scores > last, scores == last
    missing = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (tied & (_count_so_far(tied) <= missing))


def _count_so_far(chosen: Tensor) -> Tensor:
    """Return the running count of True entries along the last axis."""
    # A GPU scans many short rows faster side by side. In a program, the number of rows may change.
    is_tall = (
        chosen.is_cuda
        and not torch.compiler.is_compiling()
        and chosen.shape[-1] < chosen.shape[:-1].numel()
    )
    if not is_tall:
        return chosen.cumsum(-1, dtype=torch.int32)
    return chosen.movedim(-1, 0).contiguous().cumsum(0, dtype=torch.int32).movedim(0, -1)


def open_probability(z: Tensor, policy: Policy) -> Tensor:
    """Return the probability that a gate is open, or not 0 for hard-concrete gates."""
    return torch.sigmoid(z - _HARD_CONCRETE_SHIFT if policy == "hard_concrete" else z)


def logit_for(probability: float, policy: Policy) -> float:
    """Return the z that gives a probability, as the inverse of `open_probability`."""
    z = math.log(probability / (1 - probability))
    return z + _HARD_CONCRETE_SHIFT if policy == "hard_concrete" else z


def hard_gate(p: Tensor, threshold: Tensor, k: int | None, floor: int = 0) -> Tensor:
    """Return the hard gate, which is 1 for the `k` largest p, or for each p above the threshold.

    The threshold applies only if `k` is None. The gates with the `floor` largest p are always open.
    The gradient is the gradient of p (straight-through estimator).
    """
    is_open = p > threshold if k is None else top_k_mask(p, k)
    if floor > (k or 0):
        is_open = is_open | top_k_mask(p, floor)
    hard = is_open.to(p.dtype)
    # A derivative may be taken at an outer level that `requires_grad` does not show.
    differs = torch.is_grad_enabled() or _has_tangent(p)
    return straight_through(hard, p) if differs else hard


def _has_tangent(tensor: Tensor) -> bool:
    """Return whether forward-mode differentiation, such as `jacfwd`, runs through a tensor."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def sample_gate(z: Tensor, p: Tensor, policy: Policy) -> Tensor:
    """Sample a gate with a noisy training policy, drawing one sample for each entry of p."""
    if policy == "bernoulli":
        return straight_through(torch.bernoulli(p.detach()), p)
    noise = torch.logit(torch.rand_like(p).clamp(1e-6, 1 - 1e-6))
    sample = torch.sigmoid((z + noise) / NOISE_TEMPERATURE)
    if policy == "concrete":
        return sample
    low, high = STRETCH
    return (sample * (high - low) + low).clamp(0, 1)
