"""Layers on the way to being compact: weights that change, units that go, steps of a recipe."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.gates import DynamicGate, Gate
from dg_lightning.gates.decision import decided
from dg_lightning.gates.policies import logit_for
from dg_lightning.layers import GatedLinear, GatedMLP
from dg_lightning.runtime.plain import GatedStep, build

__all__ = ["Inputs", "Layer", "Map", "Steps", "static_mask"]

_NAMES = {nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh"}


class Map:
    """A linear map whose rows and columns can be taken out."""

    def __init__(self, linear: nn.Linear) -> None:
        weight = linear.weight.detach().cpu()
        self.weight = weight.to(torch.promote_types(weight.dtype, torch.float32)).clone()
        bias = linear.bias
        self.bias = self.weight.new_zeros(len(weight)) if bias is None else bias.detach().cpu()
        self.bias = self.bias.to(self.weight.dtype).clone()

    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "bias": self.bias}

    def sizes(self) -> dict[str, int]:
        return {"in_features": self.weight.shape[1], "out_features": len(self.weight)}


class Layer:
    """A layer on the way to being compact: weights that change, and units that have gone.

    Args:
        name: Its name.
        layer: The layer.
        usage: How often each of its blocks is open.
        min_usage: Below this, a block goes.
    """

    def __init__(
        self,
        name: str,
        layer: GatedLinear | nn.Linear,
        usage: Tensor | None = None,
        min_usage: float = 0.0,
    ) -> None:
        self.name = name
        linear = layer if isinstance(layer, nn.Linear) else layer.linear
        self.own = Map(linear)
        self.gone = torch.zeros(len(self.own.weight), dtype=torch.bool)
        self.rare = self.gone.clone()  # hardly ever open
        self.decision: list[Map] = []
        self.activation: nn.Module = nn.Identity()
        self.norm: nn.LayerNorm | None = None
        self.gate: Gate | None = None
        if isinstance(layer, nn.Linear):
            return
        self.activation = layer.activation
        if isinstance(layer.norm, nn.BatchNorm1d):
            scale, shift = _affine(layer.norm)
            self.own.weight *= scale[:, None]
            self.own.bias = self.own.bias * scale + shift
        elif isinstance(layer.norm, nn.LayerNorm):
            self.norm = layer.norm
        gate: Any = layer.gate
        if gate is None:
            return
        if not isinstance(gate, Gate):
            raise TypeError(
                f"{name}: only our gates can be made compact, got a {type(gate).__name__}."
            )
        self.gate = gate
        if gate.input_dependent and not isinstance(gate, DynamicGate):
            raise TypeError(
                f"{name}: of gates that depend on the input a DynamicGate can be made compact, got "
                f"a {type(gate).__name__}."
            )
        if isinstance(gate, DynamicGate):
            self.decision = [Map(m) for m in gate.network if isinstance(m, nn.Linear)]
            if usage is not None:
                self.rare = (usage.cpu() < min_usage).repeat_interleave(gate.block_size)
                self.gone |= self.rare
        else:
            self.gone |= ~static_mask(gate)

    @property
    def readers(self) -> list[Map]:
        """The maps that read the layer's inputs."""
        return [self.own, *self.decision[:1]]

    def kept(self, multiple: int) -> Tensor:
        """Return which units stay."""
        if self.norm is not None:
            return torch.arange(len(self.gone))
        if not self.decision:
            return _at_least(~self.gone, multiple)
        assert self.gate is not None
        # Where gates compete for a number of open ones, a unit that nobody reads competes too.
        competes = self.gate.k is not None or self.gate._floor > 0
        gone = self.rare if competes else self.gone
        blocks = _at_least(~gone.unflatten(0, (-1, self.gate.block_size)).all(1), 1)
        units = blocks[:, None] * self.gate.block_size + torch.arange(self.gate.block_size)
        return units.flatten()

    def emit(self, steps: "Steps", after: "Layer", multiple: int) -> None:
        """Write the layer down without what has gone, and let the next one read the rest."""
        kept = self.kept(multiple)
        if len(kept) < len(self.gone):
            steps.units[self.name] = (len(self.gone), len(kept))
        elif self.norm is not None and self.gone.any():
            steps.notes.append(
                f"{self.name}: all {len(self.gone)} units stay, {int(self.gone.sum())} of them "
                "closed: a layer norm reads all."
            )
        for reader in after.readers:
            reader.weight = reader.weight[:, kept]
        self.own.weight, self.own.bias = self.own.weight[kept], self.own.bias[kept]
        activation = _NAMES[type(self.activation)]
        if self.decision:
            self._emit_gated(steps, kept, activation)
            return
        steps.add("linear", self.own.state(), **self.own.sizes())
        if self.norm is not None:
            steps.add_norm(self.norm)
        steps.add(activation, {})

    def _emit_gated(self, steps: "Steps", kept: Tensor, activation: str) -> None:
        gate = self.gate
        assert isinstance(gate, DynamicGate)
        blocks = kept[:: gate.block_size] // gate.block_size
        *before, last = self.decision
        last.weight, last.bias = last.weight[blocks], last.bias[blocks]
        state = {f"linear.{key}": value for key, value in self.own.state().items()}
        if self.norm is not None:
            state |= {f"norm.{key}": value for key, value in self.norm.state_dict().items()}
        for index, part in enumerate(self.decision):
            state |= {f"gate.{index}.{key}": value for key, value in part.state().items()}
        steps.add(
            "gated",
            state,
            inputs=self.own.weight.shape[1],
            outputs=len(self.own.weight),
            block=gate.block_size,
            gate=[len(part.weight) for part in before],
            relu=any(isinstance(m, nn.ReLU) for m in gate.network),
            activation=activation,
            norm=self.norm is not None,
            temperature=float(gate.temperature),
            shift=logit_for(0.5, gate.policy),
            threshold=float(gate.threshold),
            k=None if gate.k is None else min(gate.k, len(blocks)),
            floor=min(gate._floor, len(blocks)),
        )


class Inputs:
    """The inputs of a net, their gate and their norm."""

    def __init__(self, net: GatedMLP, first: Layer) -> None:
        self.first = first
        self.width = first.own.weight.shape[1]
        self.is_open = torch.ones(self.width, dtype=torch.bool)
        self.norm: nn.LayerNorm | None = None
        gate = net.input_gate
        if gate is not None:
            if gate.input_dependent:
                raise TypeError(
                    "input_gate: only a static gate on the inputs can be made compact, got a "
                    f"{type(gate).__name__}."
                )
            self.is_open = static_mask(gate)
        if isinstance(net.input_norm, nn.LayerNorm):
            self.norm = net.input_norm
            return
        for reader in first.readers:
            weight = reader.weight
            reader.weight = weight * self.is_open
            if isinstance(net.input_norm, nn.BatchNorm1d):
                # A closed input is 0 before the norm, and so nothing but the shift behind it.
                scale, shift = _affine(net.input_norm)
                reader.bias = reader.bias + weight @ shift
                reader.weight = reader.weight * scale

    def emit(self, steps: "Steps", selects: bool, multiple: int) -> None:
        """Write down what is done to the inputs before the first layer."""
        if self.norm is not None:
            if not self.is_open.all():
                steps.add("mask", {"mask": self.is_open.float()}, size=self.width)
                steps.notes.append("input_gate: no input is left out: a layer norm reads all.")
            steps.add_norm(self.norm)
            return
        read = torch.stack([(reader.weight != 0).any(0) for reader in self.first.readers]).any(0)
        kept = _at_least(read, multiple)
        if not selects or len(kept) == self.width:
            return
        steps.add("select", {"index": kept}, size=len(kept))
        steps.units["inputs"] = (self.width, len(kept))
        for reader in self.first.readers:
            reader.weight = reader.weight[:, kept]


class Steps:
    """The recipe as it grows, with the state of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = [{"kind": "flatten"}]
        self.states: list[dict[str, Tensor]] = [{}]
        self.units: dict[str, tuple[int, int]] = {}
        self.notes: list[str] = []

    def add(self, kind: str, state: Mapping[str, Tensor], **arguments: Any) -> None:
        self.steps.append({"kind": kind, **arguments})
        self.states.append(dict(state))

    def add_norm(self, norm: nn.LayerNorm) -> None:
        self.add("layer_norm", norm.state_dict(), normalized_shape=norm.normalized_shape[0])

    def net(self, like: Tensor) -> nn.Sequential:
        """Build the net, of the type and on the device of a tensor."""
        net = build(self.steps)
        net.to(torch.promote_types(like.dtype, torch.float32))
        for module, state in zip(net, self.states, strict=True):
            module.load_state_dict(state)
        for module in net.requires_grad_(False):
            parts = module.children() if isinstance(module, GatedStep) else [module]
            for part in parts:
                # Gates decide in float32 or wider, whatever the net is in.
                decides = isinstance(module, GatedStep) and part is module.gate
                part.to(like.device, None if decides else like.dtype)
        return net


def static_mask(gate: Gate) -> Tensor:
    """Return which units a static gate has open when deployed."""
    h = torch.zeros(1, device=gate.temperature.device)  # it does not look
    _, g = decided(
        gate.logits(h), gate.temperature, gate.threshold, gate.policy, gate.k, gate._floor
    )
    return (g != 0).cpu().repeat_interleave(gate.block_size)


def _at_least(wanted: Tensor, multiple: int) -> Tensor:
    """Return the indices that are wanted, and some others up to a multiple; at least one."""
    count = max(int(wanted.sum()), 1)
    count = min(-(-count // multiple) * multiple, len(wanted))
    order = (~wanted).int().argsort(stable=True)
    return order[:count].sort().values


def _affine(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Return what a batch norm multiplies with and adds in evaluation."""
    if norm.running_mean is None or norm.running_var is None:
        raise TypeError("A batch norm without running statistics cannot be made compact.")
    wide = torch.promote_types(norm.running_var.dtype, torch.float32)
    scale = (norm.running_var.to(wide) + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    return scale.detach().cpu(), shift.detach().cpu()
