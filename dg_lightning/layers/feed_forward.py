"""Transformer feed-forwards that choose units or experts for each token."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from dg_lightning.gates import Feeds, Gate, GateSettings, make_gate
from dg_lightning.gates.policies import top_k_mask
from dg_lightning.layers.mlp import Activation, make_activation


class Router(nn.Module):
    """Chooses the k experts with the largest ``p = softmax(W h / τ)`` for each sample.

    The weight of an expert is its p if k = 1, or p normalised over the chosen experts if k > 1. In
    training, an expert processes only the first samples of a batch, up to its capacity. There is no
    limit in evaluation, so predictions do not depend on the rest of the batch. The router computes
    in float32. It stores `probability`, `gate` (weights, 0 if not routed), `chosen` (bool, before
    capacity drops), `dropped` (bool), `logits` and `capacity`.

    Args:
        in_features: Number of inputs.
        experts: Number of experts.
        expert_width: Hidden units per expert.
        k: Number of experts per sample.
        capacity_factor: Capacity of an expert in training, as a multiple of an even share. None
            means no limit.
    """

    temperature: Tensor
    threshold: Tensor
    min_open: Tensor
    input_dependent = True

    # Attributes set by each forward pass.
    recorded = ("probability", "gate", "chosen", "dropped", "logits", "capacity")

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
        self.register_buffer("threshold", torch.zeros(()))  # unused
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
            fits = running_count(chosen) <= self.capacity
            g = weights * fits
        self.probability, self.gate, self.chosen, self.logits = p, g, chosen, z
        self.dropped = chosen & ~fits
        return g

    def capacity_for(self, samples: int) -> int:
        """Return the capacity of an expert for a batch of `samples` samples."""
        if self.capacity_factor is None or not self.training:
            return samples
        return min(math.ceil(self.capacity_factor * samples * self.k / self.experts), samples)

    def load_balance_loss(self) -> Tensor:
        """Return ``E Σ load_e mean p_e``, which is 1 if all experts are used equally.

        E is the number of experts, and load_e is the fraction of assignments to expert e.
        """
        assert self.chosen is not None
        assert self.probability is not None
        load = self.chosen.float().mean(0) / self.k
        return self.experts * (load * self.probability.mean(0)).sum()

    def z_loss(self) -> Tensor:
        """Return the mean squared log-sum-exp of the logits, which keeps the logits small."""
        assert self.logits is not None
        return self.logits.logsumexp(-1).square().mean()

    def auxiliary_loss(self, load_balance: float, z_loss: float) -> Tensor:
        """Return the weighted sum of the load-balance loss and the z-loss."""
        return load_balance * self.load_balance_loss() + z_loss * self.z_loss()

    def decision_macs(self, open_inputs: Tensor | None = None) -> Tensor:
        """Return the MACs of one decision, given the number of open inputs (None for all)."""
        inputs = torch.tensor(self.linear.in_features) if open_inputs is None else open_inputs
        return inputs * self.experts

    def set_min_open(self, min_open: int | float | str) -> None:
        """Raise an error, because every sample has exactly k experts."""
        raise ValueError(f"A router opens {self.k} of {self.experts} experts: set `top_k` instead.")

    def shift_bias(self, delta: float | Tensor) -> None:
        """Raise an error, because a softmax does not change when its logits are shifted."""
        raise ValueError("A router has no open rate: set `top_k`, or exclude it with `layers`.")

    def revive(self, units: Tensor) -> None:
        """Raise an error, because the load-balance loss takes care of unused experts."""
        raise ValueError("A router cannot revive experts: raise `load_balance` instead.")

    def __getstate__(self) -> dict[str, Any]:
        # Tensors with a graph cannot be copied or pickled.
        return {**self.__dict__, **dict.fromkeys(self.recorded), "capacity": self.capacity}


_NAMES_OF_0_2 = {"first": "fc1", "other": "fc1_gate", "second": "fc2"}


def _rename_maps(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the layers in checkpoints from version 0.2."""
    for old, new in _NAMES_OF_0_2.items():
        for kind in ("weight", "bias"):
            if f"{prefix}{old}.{kind}" in state:
                state[f"{prefix}{new}.{kind}"] = state.pop(f"{prefix}{old}.{kind}")


class Experts(nn.Module):
    """Parallel two-layer networks, each applied to the samples routed to it.

    The hidden layers of all experts are stored as one wide linear layer, and so are the output
    layers. Each expert applies only its own part of these weights to the samples routed to it.

    Args:
        width: Width of inputs and outputs.
        router: The router, which defines the number and width of the experts.
        activation: Nonlinearity of the experts.
    """

    def __init__(self, width: int, router: Router, activation: Activation = "relu") -> None:
        super().__init__()
        self.activation = make_activation(activation)
        self.experts, self.hidden = router.experts, router.block_size
        self.fc1 = nn.Linear(width, router.units)
        self.fc2 = nn.Linear(router.units, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(router.experts * width))
        self.register_load_state_dict_pre_hook(_rename_maps)  # type: ignore[no-untyped-call]
        # Initialise each expert like a separate module, whose fan-in is the width of one expert.
        bound = 1 / math.sqrt(self.hidden)
        nn.init.uniform_(self.fc2.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)
        router.feeds = Feeds(producer=self.fc1, skips_rows=True, consumers=(self.fc2,), runner=self)

    @override
    def forward(self, h: Tensor, weights: Tensor, capacity: int, k: int) -> Tensor:
        """Return the weighted sum of expert outputs for each sample.

        Args:
            h: The samples ``(batch, width)``.
            weights: Expert weights ``(batch, experts)``, 0 for experts that do not get the sample.
            capacity: Maximum number of samples per expert.
            k: Maximum number of experts per sample.
        """
        width = h.shape[-1]
        routed = weights != 0
        # Each expert has `capacity` consecutive rows for its samples. The last row is a dummy.
        row = torch.arange(self.experts, device=h.device) * capacity + running_count(routed) - 1
        row = row.masked_fill(~routed, self.experts * capacity)
        weight, expert = weights.topk(k, dim=-1)  # (batch, k)
        rows = row.gather(-1, expert)
        gathered = h.new_zeros(self.experts * capacity + 1, width)
        gathered = gathered.index_copy(0, rows.flatten(), h.repeat_interleave(k, 0))
        gathered = gathered[:-1].view(self.experts, capacity, width)
        fc1 = self.fc1.weight.view(self.experts, self.hidden, width)
        fc1_bias = self.fc1.bias.view(self.experts, 1, self.hidden)
        fc2 = self.fc2.weight.view(width, self.experts, self.hidden).permute(1, 2, 0)
        hidden = self.activation(gathered @ fc1.mT + fc1_bias)
        out = (hidden @ fc2 + self.bias.view(self.experts, 1, width)).flatten(0, 1)
        out = torch.cat([out, out.new_zeros(1, width)])
        taken = out.index_select(0, rows.flatten()).view(*rows.shape, width)
        return (taken * weight.unsqueeze(-1).to(out.dtype)).sum(1)


def running_count(chosen: Tensor) -> Tensor:
    """Return the running count of True entries down each column."""
    # A cumulative sum along contiguous rows is faster.
    return chosen.t().contiguous().cumsum(-1).t()


class SwitchMoE(nn.Module):
    """A mixture-of-experts classifier with a linear layer before and after the experts.

    The linear layer and the experts are each followed by a ReLU. A sample skips the experts if none
    of its experts has capacity left. `GatedClassifier` adds
    `auxiliary_loss` to the loss.

    Args:
        in_features: Number of inputs.
        num_classes: Number of outputs.
        width: Input and output width of the experts.
        experts: Number of experts.
        expert_width: Hidden units per expert.
        top_k: Number of experts per sample. The Switch Transformer (arXiv:2101.03961) uses 1, and
            the DynamicGate-MLP paper uses 2.
        capacity_factor: Capacity of an expert in training, as a multiple of an even share. None
            means no limit. There is never a limit in evaluation.
        load_balance: Weight of the loss that balances the use of experts.
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
        routed = (weights != 0).any(-1, keepdim=True)
        logits: Tensor = self.output(torch.where(routed, mixed, h.to(mixed.dtype)).relu())
        return logits

    def auxiliary_loss(self) -> Tensor:
        """Return the weighted load-balance loss and z-loss from the last forward pass."""
        return self.router.auxiliary_loss(self.load_balance, self.z_loss)


class GatedFeedForward(nn.Module):
    """Feed-forward that runs only some units for each token: ``W₂ (g(h) * u(h)) + b₂``.

    The units u are ``activation(W₁ h + b₁)``. With `glu`, they are ``activation(W₁ h) * (W₃ h)``,
    which is SwiGLU if the activation is `silu`. The gate reads the input, so it is known before any
    matrix product and closed blocks can be skipped. Inputs may have any leading dimensions.

    Args:
        width: Width of inputs and outputs.
        hidden: Number of units, by default four times the width.
        gate: A gate or a dict of gate settings; None for a dense feed-forward. With
            `scale: probability`, the loss reaches only open blocks, so closed blocks can be skipped
            in training too.
        activation: Nonlinearity of the units.
        glu: Whether units are products of two linear layers.
        bias: Whether the linear layers have a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters. The gate stays in float32 or wider.

    >>> gate = {"kind": "dynamic", "block_size": 16, "scale": "probability"}
    >>> layer = GatedFeedForward(32, 128, gate=gate, activation="silu", glu=True)
    >>> layer(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        *,
        gate: Gate | GateSettings | None = None,
        activation: Activation = "gelu",
        glu: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.fc1 = nn.Linear(width, hidden, **factory)
        self.fc1_gate = nn.Linear(width, hidden, **factory) if glu else None
        self.activation = make_activation(activation)
        self.fc2 = nn.Linear(hidden, width, **factory)
        self.register_load_state_dict_pre_hook(_rename_maps)  # type: ignore[no-untyped-call]
        if gate is not None and not isinstance(gate, Gate):
            gate = make_gate(gate, width, hidden, device, dtype)
        if gate is not None and gate.units != hidden:
            raise ValueError(
                f"The gate has {gate.units} units, but the feed-forward has {hidden}: they must "
                "match."
            )
        self.gate = gate
        # Set by `runtime.skip_closed_blocks` to run open blocks only. None runs all blocks.
        self.skip: Callable[[GatedFeedForward, Tensor], Tensor | None] | None = None
        if gate is not None:
            partners = () if self.fc1_gate is None else (self.fc1_gate,)
            gate.feeds = Feeds(self.fc1, skips_rows=True, consumers=(self.fc2,), partners=partners)

    @property
    def applied_gate(self) -> Gate | None:
        """The gate on the units, from the constructor or from `add_gates`."""
        put = dict(self.fc2.named_children()).get("dg_gate")
        return put if isinstance(put, Gate) else self.gate

    @override
    def forward(self, h: Tensor) -> Tensor:
        device = h.device.type
        # The gate reads what the linear layers read. Autocast leaves float64 as it is.
        if torch.is_autocast_enabled(device) and h.dtype != torch.float64:
            h = h.to(torch.get_autocast_dtype(device))
        if self.skip is not None and (skipped := self.skip(self, h)) is not None:
            return skipped
        units: Tensor = self.activation(self.fc1(h))
        if self.fc1_gate is not None:
            units = units * self.fc1_gate(h)
        if self.gate is not None:
            units = self.gate(h, units)
        out: Tensor = self.fc2(units)
        return out


class MoEFeedForward(nn.Module):
    """Mixture-of-experts feed-forward for a Transformer, which routes every token separately.

    If none of the experts chosen for a token has capacity left, the output is 0, so the residual
    stream carries the token unchanged.

    Args:
        width: Width of inputs and outputs.
        hidden: Total number of hidden units in all experts.
        experts: Number of experts, which must divide `hidden`.
        top_k: Number of experts per token. The Switch Transformer (arXiv:2101.03961) uses 1.
        capacity_factor: Capacity of an expert in training, as a multiple of an even share. None
            means no limit. There is never a limit in evaluation.
        load_balance: Weight of the loss that balances the use of experts.
        z_loss: Weight of the loss that keeps the router's logits small.
        activation: Nonlinearity of the experts.

    >>> MoEFeedForward(32, 128, experts=4)(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int = 4,
        top_k: int = 1,
        capacity_factor: float | None = 1.25,
        load_balance: float = 1e-2,
        z_loss: float = 1e-3,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__()
        if experts < 1 or hidden % experts:
            raise ValueError(f"`experts`={experts} must divide `hidden`={hidden}.")
        self.router = Router(width, experts, hidden // experts, top_k, capacity_factor)
        self.experts = Experts(width, self.router, activation)
        self.load_balance, self.z_loss = load_balance, z_loss

    @override
    def forward(self, h: Tensor) -> Tensor:
        tokens = h.flatten(0, -2)
        weights = self.router(tokens)
        out: Tensor = self.experts(tokens, weights, self.router.capacity, self.router.k)
        return out.view(h.shape)

    @property
    def fc2(self) -> nn.Linear:
        """The linear layer that produces the output."""
        return self.experts.fc2

    def auxiliary_loss(self) -> Tensor:
        """Return the weighted load-balance loss and z-loss from the last forward pass."""
        return self.router.auxiliary_loss(self.load_balance, self.z_loss)
