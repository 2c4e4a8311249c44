"""The mixture of experts that the paper compares with: a router sends each sample to k experts.

To the ledger and to callbacks the router is a gate like any other, whose blocks are the experts:
the hidden units of all experts are one wide layer, of which each sample opens k blocks.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from dg_lightning.gates.policies import top_k_mask
from dg_lightning.protocol import Feeds

__all__ = ["Experts", "Router", "SwitchMoE"]


class Router(nn.Module):
    """Chooses k experts for each sample, by the largest ``p = softmax(W h / τ)``.

    The weight of an expert is its p (k = 1), or its share of the p of all chosen ones (k > 1). In
    training an expert takes in no more samples of a batch than its capacity, the first ones; in
    evaluation it takes all, so that a prediction does not hang on the other samples of its batch.
    Computes in float32, and leaves `probability`, `gate` (weights, 0 where not sent), `chosen`
    (bool, before anything was dropped), `dropped` (bool) and `capacity` behind.

    Args:
        in_features: Width of what it reads.
        experts: How many experts there are.
        expert_width: Hidden units of an expert.
        k: How many experts a sample is sent to.
        capacity_factor: Samples that an expert takes in training, as a multiple of an even share;
            None is no limit.
    """

    temperature: Tensor
    threshold: Tensor
    min_open: Tensor
    input_dependent = True

    def __init__(
        self,
        in_features: int,
        experts: int,
        expert_width: int,
        k: int = 1,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= k <= experts:
            raise ValueError(f"`top_k` must be from 1 to {experts} experts, got {k}.")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"`capacity_factor` must be above 0, got {capacity_factor}.")
        self.linear = nn.Linear(in_features, experts, bias=False)
        self.experts = experts
        self.units = experts * expert_width
        self.block_size = expert_width
        self.k = k
        self.capacity_factor = capacity_factor
        self.initial_open_rate = k / experts
        self.feeds = Feeds()
        self.probability: Tensor | None = None
        self.gate: Tensor | None = None
        self.chosen: Tensor | None = None
        self.dropped: Tensor | None = None
        self.logits: Tensor | None = None
        self.capacity = 0
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("threshold", torch.zeros(()))  # has no meaning here
        self.register_buffer("min_open", torch.tensor(float(k)))

    @override
    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            z = F.linear(h.float(), self.linear.weight.float()) / self.temperature
            p = z.softmax(-1)
            chosen = top_k_mask(p, self.k)
            weights = p * chosen
            if self.k > 1:
                weights = weights / weights.sum(-1, keepdim=True)
            self.capacity = self.capacity_for(len(h))
            fits = chosen.cumsum(0) <= self.capacity
            g = weights * fits
        self.probability, self.gate, self.chosen, self.logits = p, g, chosen, z
        self.dropped = chosen & ~fits
        return g

    def capacity_for(self, samples: int) -> int:
        """Return how many of so many samples an expert takes in."""
        if self.capacity_factor is None or not self.training:
            return samples
        return min(math.ceil(self.capacity_factor * samples * self.k / self.experts), samples)

    def load_balance_loss(self) -> Tensor:
        """Return ``E Σ load_e mean p_e``, 1 where all experts are used alike."""
        assert self.chosen is not None
        assert self.probability is not None
        load = self.chosen.float().mean(0) / self.k
        return self.experts * (load * self.probability.mean(0)).sum()

    def z_loss(self) -> Tensor:
        """Return the mean square of the logits' log-sum-exp, which keeps them small."""
        assert self.logits is not None
        return self.logits.logsumexp(-1).square().mean()

    def decision_macs(self, open_inputs: Tensor | None = None) -> Tensor:
        """Return the MACs of the decision for a sample with so many inputs open; None is all."""
        inputs = torch.tensor(self.linear.in_features) if open_inputs is None else open_inputs
        return inputs * self.experts

    def set_min_open(self, min_open: int | float) -> None:
        """Refuse: every sample has k experts."""
        raise ValueError(f"A router opens {self.k} of {self.experts} experts; set `top_k`.")

    def shift_bias(self, delta: float) -> None:
        """Refuse: only differences of logits matter to a router."""
        raise ValueError("A router has no open rate to shift: set `top_k`, or leave it out.")

    def revive(self, units: Tensor) -> None:
        """Refuse: an expert that nobody is sent to is the load-balance loss's affair."""
        raise ValueError("A router's experts are revived by `load_balance`: raise its weight.")

    def __getstate__(self) -> dict[str, Any]:
        # What the last forward pass left has a graph, which can be neither copied nor pickled.
        left = ("probability", "gate", "chosen", "dropped", "logits")
        return {**self.__dict__, **dict.fromkeys(left)}


class Experts(nn.Module):
    """Small two-layer nets side by side, each for the samples that a router sends to it.

    The hidden layers of all experts are one wide linear map, as are their outputs; each expert
    multiplies only its own rows with its own samples.

    Args:
        width: Width of inputs and outputs.
        router: The router; it tells how many experts there are, and how wide.
    """

    def __init__(self, width: int, router: Router) -> None:
        super().__init__()
        self.experts, self.hidden = router.experts, router.block_size
        self.first = nn.Linear(width, router.units)
        self.second = nn.Linear(router.units, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(router.experts * width))
        # As if each expert were a module of its own: its fan-in is its own width.
        bound = 1 / math.sqrt(self.hidden)
        nn.init.uniform_(self.second.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)
        router.feeds = Feeds(producer=self.first, skips_rows=True, consumers=(self.second,))

    @override
    def forward(self, h: Tensor, weights: Tensor, capacity: int, k: int) -> Tensor:
        """Return the weighted sum of experts for each sample.

        Args:
            h: The samples, ``(batch, width)``.
            weights: Weight of every expert, 0 where a sample is not sent, ``(batch, experts)``.
            capacity: The largest number of samples of an expert.
            k: The largest number of experts of a sample.
        """
        width = h.shape[-1]
        sent = weights != 0
        # Each expert has `capacity` rows for its samples, in order; one more row is for nobody.
        row = torch.arange(self.experts, device=h.device) * capacity + sent.cumsum(0) - 1
        row = row.masked_fill(~sent, self.experts * capacity)
        weight, expert = weights.topk(k, dim=-1)  # (batch, k)
        rows = row.gather(-1, expert)
        taken = h.new_zeros(self.experts * capacity + 1, width)
        taken = taken.index_copy(0, rows.flatten(), h.repeat_interleave(k, 0))
        taken = taken[:-1].view(self.experts, capacity, width)
        first = self.first.weight.view(self.experts, self.hidden, width)
        first_bias = self.first.bias.view(self.experts, 1, self.hidden)
        second = self.second.weight.view(width, self.experts, self.hidden).permute(1, 2, 0)
        hidden = (taken @ first.mT + first_bias).relu()
        out = (hidden @ second + self.bias.view(self.experts, 1, width)).flatten(0, 1)
        out = torch.cat([out, out.new_zeros(1, width)])
        return (out[rows] * weight.unsqueeze(-1).to(out.dtype)).sum(1)


class SwitchMoE(nn.Module):
    """A classifier with a mixture of experts: linear, ReLU, experts, ReLU, linear.

    A sample that no expert has room for goes on unchanged. `auxiliary_loss` is what
    `GatedClassifier` adds to the loss.

    Args:
        in_features: Number of inputs.
        num_classes: Number of outputs.
        width: Width of what goes into experts and comes out.
        experts: How many experts there are.
        expert_width: Hidden units of an expert.
        top_k: How many experts a sample is sent to; 1 is the Switch Transformer's choice
            (arXiv:2101.03961), 2 the paper's.
        capacity_factor: Samples of a batch that an expert takes in training, as a multiple of an
            even share; None is no limit. There is none in evaluation.
        load_balance: Weight of the loss that wants all experts used alike.
        z_loss: Weight of the loss that keeps the router's logits small.

    >>> moe = SwitchMoE(784, 10, width=32, experts=4, expert_width=8, top_k=2)
    >>> moe(torch.randn(5, 1, 28, 28)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        width: int = 512,
        experts: int = 8,
        expert_width: int = 512,
        top_k: int = 1,
        capacity_factor: float | None = 2.0,
        load_balance: float = 1e-2,
        z_loss: float = 1e-3,
    ) -> None:
        super().__init__()
        if min(width, experts, expert_width) < 1:
            raise ValueError(
                "`width`, `experts` and `expert_width` must be at least 1, got "
                f"{width}, {experts} and {expert_width}."
            )
        self.stem = nn.Linear(in_features, width)
        self.router = Router(width, experts, expert_width, top_k, capacity_factor)
        self.experts = Experts(width, self.router)
        self.output = nn.Linear(width, num_classes)
        self.load_balance, self.z_loss = load_balance, z_loss

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.flatten(1)).relu()
        weights = self.router(h)
        mixed = self.experts(h, weights, self.router.capacity, self.router.k)
        kept = (weights != 0).any(-1, keepdim=True)
        logits: Tensor = self.output(torch.where(kept, mixed, h.to(mixed.dtype)).relu())
        return logits

    def auxiliary_loss(self) -> Tensor:
        """Return the load-balance and z loss of the last forward pass, weighted."""
        balance = self.load_balance * self.router.load_balance_loss()
        return balance + self.z_loss * self.router.z_loss()
