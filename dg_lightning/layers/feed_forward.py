"""Feed-forwards of a Transformer that decide token by token what to run: gates, and experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.gates import Feeds, Gate, GateSettings, make_gate
from dg_lightning.layers.mlp import Activation, make_activation
from dg_lightning.layers.switch_moe import Experts, Router

__all__ = ["GatedFeedForward", "MoEFeedForward"]


class GatedFeedForward(nn.Module):
    """A feed-forward of which each token runs some blocks of units: ``W₂ (g(h) * u(h)) + b₂``.

    The units u are ``activation(W₁ h + b₁)``, or ``activation(W₁ h) * (W₃ h)`` with `glu` (SwiGLU
    if the activation is `silu`). The gate reads the token, so it is known before any product, and
    closed blocks can be skipped. Inputs have any leading shape.

    Args:
        width: Width of inputs and outputs.
        hidden: Number of units; four times the width if None.
        gate: Settings of the gate as plain values, or a gate; None for a dense feed-forward. With
            `scale: probability` the loss reaches open blocks only, so training may skip closed ones
            too.
        activation: Nonlinearity of the units.
        glu: Whether units are products of two maps.
        bias: Whether the maps add a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters; those of the gate stay in float32 or wider.

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
        self.first = nn.Linear(width, hidden, **factory)
        self.other = nn.Linear(width, hidden, **factory) if glu else None
        self.activation = make_activation(activation)
        self.second = nn.Linear(hidden, width, **factory)
        if gate is not None and not isinstance(gate, Gate):
            gate = make_gate(gate, width, hidden, device, dtype)
        if gate is not None and gate.units != hidden:
            raise ValueError(
                f"The gate has {gate.units} units, the feed-forward {hidden}: they must be equal."
            )
        self.gate = gate
        # Computes open blocks only, or returns None, see `runtime.skip_closed_blocks`.
        self.skip: Callable[[GatedFeedForward, Tensor], Tensor | None] | None = None
        if gate is not None:
            partners = () if self.other is None else (self.other,)
            gate.feeds = Feeds(
                self.first, skips_rows=True, consumers=(self.second,), partners=partners
            )

    @property
    def applied_gate(self) -> Gate | None:
        """The gate on its units: its own, or one that `add_gates` has put there."""
        put = dict(self.second.named_children()).get("dg_gate")
        return put if isinstance(put, Gate) else self.gate

    @override
    def forward(self, h: Tensor) -> Tensor:
        if self.skip is not None and (skipped := self.skip(self, h)) is not None:
            return skipped
        units: Tensor = self.activation(self.first(h))
        if self.other is not None:
            units = units * self.other(h)
        if self.gate is not None:
            units = self.gate(h, units)
        out: Tensor = self.second(units)
        return out


class MoEFeedForward(nn.Module):
    """The feed-forward of a Transformer as a mixture of experts, chosen token by token.

    A token for which no expert has capacity left gets 0: it passes by in the residual stream.

    Args:
        width: Width of inputs and outputs.
        hidden: Hidden units of all experts together.
        experts: Number of experts, which must divide `hidden`.
        top_k: Number of experts per token; the Switch Transformer (arXiv:2101.03961) uses 1.
        capacity_factor: Capacity of an expert in training, as a multiple of an even share; None
            for no limit. Evaluation has no limit.
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
    def second(self) -> nn.Linear:
        """The map that writes the output."""
        return self.experts.second

    def auxiliary_loss(self) -> Tensor:
        """Return the weighted sum of load-balance loss and z-loss of the last forward pass."""
        return self.router.auxiliary_loss(self.load_balance, self.z_loss)
