"""Gated linear layers and MLPs, written like the equations in section 3 of the paper."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.gates import GateSettings, make_gate
from dg_lightning.gates.protocol import Feeds, is_gate

Activation: TypeAlias = Literal["relu", "gelu", "silu", "tanh"]
Norm: TypeAlias = Literal["layer", "batch"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
_NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}


def make_activation(name: Activation) -> nn.Module:
    """Return the activation module with this name."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {', '.join(_ACTIVATIONS)}, got {name!r}.")
    return _ACTIVATIONS[name]()


class GatedWeight(Tensor):
    """The weight of a gated layer, as other code sees it.

    Torch's fused kernels, such as those for a TransformerEncoder in evaluation, read a plain weight
    directly and would bypass the gate. If the weight is a tensor subclass, torch calls the layer.
    """


class GatedLinear(nn.Module):
    """One gated hidden layer: ``h' = dropout(g(h) * activation(norm(W h + b)))``.

    The gate reads the layer's input, so it is known before the matrix product and the rows of
    closed units can be skipped. A layer norm prevents this, because it needs all rows.

    Args:
        in_features: Number of inputs.
        out_features: Number of units.
        gate: A gate (any implementation of `protocol.GateLike`) or a dict of gate settings; None
            for a dense layer.
        activation: Nonlinearity after the norm.
        norm: Normalisation after the matrix product.
        dropout: Dropout probability of the outputs.
        bias: Whether to add a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters. The gate stays in float32 or wider.

    >>> layer = GatedLinear(8, 4, gate={"kind": "dynamic", "network": "low_rank", "rank": 2})
    >>> layer(torch.randn(5, 8)).shape
    torch.Size([5, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        gate: nn.Module | GateSettings | None = None,
        activation: Activation = "relu",
        norm: Norm | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.norm = _norm(norm, out_features, device, dtype)
        self.activation = make_activation(activation)
        if gate is not None and not isinstance(gate, nn.Module):
            gate = make_gate(gate, in_features, out_features, device, dtype)
        if gate is not None:
            self._attach(gate, skips_rows=norm != "layer")
        self.gate = gate
        self.dropout = nn.Dropout(dropout)

    @property
    def weight(self) -> Tensor:
        """The weight of the linear layer, for code that expects an `nn.Linear`."""
        return self.linear.weight.as_subclass(GatedWeight)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the linear layer."""
        return self.linear.bias

    def _attach(self, gate: nn.Module, skips_rows: bool) -> None:
        if not is_gate(gate):
            raise TypeError(
                f"`gate` must be a gate or its settings, got {type(gate).__name__}: "
                "see dg_lightning.gates.protocol.GateLike."
            )
        if gate.units != self.linear.out_features:
            raise ValueError(
                f"The gate has {gate.units} units, but the layer has {self.linear.out_features}: "
                "they must match."
            )
        if gate.feeds.producer is not None:
            raise ValueError("The gate already belongs to another layer: pass a new gate.")
        gate.feeds = Feeds(producer=self.linear, skips_rows=skips_rows)

    @override
    def forward(self, h: Tensor) -> Tensor:
        return self.finish(h, self.linear(h))

    def finish(self, h: Tensor, pre_activation: Tensor) -> Tensor:
        """Return the output, given the input and what the linear layer computed from it."""
        out: Tensor = self.activation(self.norm(pre_activation))
        if self.gate is not None:
            out = self.gate(h).to(out.dtype) * out
        dropped: Tensor = self.dropout(out)
        return dropped


class GatedMLP(nn.Module):
    """A multi-layer perceptron with gated hidden units and, optionally, gated inputs.

    Without gates it is a plain MLP. With all gates open, its outputs are bitwise equal to those of
    the plain MLP. Inputs of any shape ``(batch, ...)`` are flattened.

    Args:
        in_features: Number of inputs.
        hidden: Width of each hidden layer.
        num_classes: Number of outputs.
        activation: Nonlinearity of the hidden layers.
        norm: Normalisation in the hidden layers, between the matrix product and the activation.
        dropout: Dropout probability in the hidden layers, after the gate.
        gate: Gate settings for every hidden layer, or a list with one entry per layer.
        input_gate: Settings of the gate on the inputs; None for no input gate.
        input_norm: Normalisation of the inputs, after their gate. It makes closed inputs non-zero,
            so the ledger counts no savings for them.
        device: Device of the parameters.
        dtype: Dtype of the parameters. The gates stay in float32 or wider.

    >>> mlp = GatedMLP(784, [256], 10, gate={"kind": "static"}, input_gate={"kind": "static"})
    >>> mlp(torch.randn(5, 1, 28, 28)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        in_features: int,
        hidden: list[int],
        num_classes: int,
        activation: Activation = "relu",
        norm: Norm | None = None,
        dropout: float = 0.0,
        gate: GateSettings | list[GateSettings | None] | None = None,
        input_gate: GateSettings | None = None,
        input_norm: Norm | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        gates = gate if isinstance(gate, list) else [gate] * len(hidden)
        if len(gates) != len(hidden):
            raise ValueError(
                f"`gate` must be one dict or a list with {len(hidden)} entries, one per hidden "
                f"layer, got {len(gates)} entries."
            )
        widths = [in_features, *hidden]
        if min(*widths, num_classes) < 1:
            raise ValueError(f"Widths must be at least 1, got {[*widths, num_classes]}.")
        self.in_features = in_features
        self.input_gate = (
            None
            if input_gate is None
            else make_gate(input_gate, in_features, in_features, device, dtype)
        )
        self.input_norm = _norm(input_norm, in_features, device, dtype)
        self.hidden = nn.ModuleList(
            GatedLinear(
                n_in,
                n_out,
                gate=settings,
                activation=activation,
                norm=norm,
                dropout=dropout,
                device=device,
                dtype=dtype,
            )
            for n_in, n_out, settings in zip(widths, hidden, gates, strict=False)
        )
        self.output = nn.Linear(widths[-1], num_classes, device=device, dtype=dtype)
        # Set by `runtime.skip_closed_blocks` to run open blocks only.
        self.skip: Callable[[GatedMLP, Tensor], Tensor] | None = None
        self._connect(input_is_normalised=input_norm is not None)

    def _connect(self, input_is_normalised: bool) -> None:
        """Register which linear layer consumes the outputs of each gate."""
        maps = [layer.linear for layer in self.layers()] + [self.output]
        if self.input_gate is not None and not input_is_normalised:
            self.input_gate.feeds = Feeds(consumers=(maps[0],))
        for layer, consumer in zip(self.layers(), maps[1:], strict=True):
            if is_gate(layer.gate):
                layer.gate.feeds = replace(layer.gate.feeds, consumers=(consumer,))

    def layers(self) -> list[GatedLinear]:
        """Return the hidden layers."""
        return [layer for layer in self.hidden if isinstance(layer, GatedLinear)]

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        if self.input_gate is not None:
            h = self.input_gate(h).to(h.dtype) * h
        h = self.input_norm(h)
        if self.skip is not None:
            return self.skip(self, h)
        for layer in self.hidden:
            h = layer(h)
        logits: Tensor = self.output(h)
        return logits


def _norm(norm: Norm | None, width: int, device: Any, dtype: torch.dtype | None) -> nn.Module:
    if norm is None:
        return nn.Identity()
    if norm not in _NORMS:
        raise ValueError(f"`norm` must be one of {', '.join(_NORMS)} or None, got {norm!r}.")
    return _NORMS[norm](width, device=device, dtype=dtype)
