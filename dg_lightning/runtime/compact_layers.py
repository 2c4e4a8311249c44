"""Layers during compaction: prunable weights, removed units, and the recipe of the result."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.gates import DynamicGate, Gate
from dg_lightning.gates.policies import hard_gate, logit_for, open_probability
from dg_lightning.layers.mlp import GatedLinear, GatedMLP
from dg_lightning.runtime.plain import GatedStep, build

__all__ = ["Inputs", "Layer", "PrunableLinear", "Recipe", "static_value"]

_ACTIVATION_NAMES = {nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh"}


class PrunableLinear:
    """Weight and bias of a linear map, in float32 or wider, whose units can be removed."""

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
    """A layer during compaction: its weights, and the units to remove.

    Args:
        name: Name of the layer.
        layer: The layer.
        usage: Fraction of samples that open each of its blocks.
        min_usage: Blocks used less often are removed.
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
        self.linear = PrunableLinear(linear)
        self.removed = torch.zeros(len(self.linear.weight), dtype=torch.bool)
        self.rare = self.removed.clone()  # below `min_usage`
        self.gate_maps: list[PrunableLinear] = []
        self.activation: nn.Module = nn.Identity()
        self.norm: nn.LayerNorm | None = None
        self.gate: Gate | None = None
        self.value = torch.ones(len(self.removed))  # what a static gate multiplies units by
        if isinstance(layer, nn.Linear):
            return
        self.activation = layer.activation
        if isinstance(layer.norm, nn.BatchNorm1d):
            scale, shift = _batch_norm_affine(layer.norm)
            self.linear.weight *= scale[:, None]
            self.linear.bias = self.linear.bias * scale + shift
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
            self.gate_maps = [PrunableLinear(m) for m in gate.network if isinstance(m, nn.Linear)]
            if usage is not None:
                self.rare = (usage.cpu() < min_usage).repeat_interleave(gate.block_size)
                self.removed |= self.rare
        else:
            self.value = static_value(gate)
            self.removed |= self.value == 0

    @property
    def readers(self) -> list[PrunableLinear]:
        """The maps that read the layer's input."""
        return [self.linear, *self.gate_maps[:1]]

    def kept_units(self, multiple: int) -> Tensor:
        """Return the indices of the units to keep."""
        if self.norm is not None:
            return torch.arange(len(self.removed))
        if not self.gate_maps:
            return _round_up_indices(~self.removed, multiple)
        assert self.gate is not None
        # With top-k or a floor, an unread unit still affects which others open.
        competes = self.gate.k is not None or self.gate._floor > 0
        removed = self.rare if competes else self.removed
        blocks = _round_up_indices(~removed.unflatten(0, (-1, self.gate.block_size)).all(1), 1)
        units = blocks[:, None] * self.gate.block_size + torch.arange(self.gate.block_size)
        return units.flatten()

    def emit(self, recipe: "Recipe", after: "Layer", multiple: int) -> None:
        """Append the pruned layer to the recipe, and prune the inputs of the next one."""
        kept = self.kept_units(multiple)
        if len(kept) < len(self.removed):
            recipe.units[self.name] = (len(self.removed), len(kept))
        elif self.norm is not None and self.removed.any():
            recipe.notes.append(
                f"{self.name}: all {len(self.removed)} units stay, {int(self.removed.sum())} of "
                "them closed: a layer norm reads all."
            )
        for reader in after.readers:
            reader.weight = reader.weight[:, kept]
        self.linear.weight, self.linear.bias = self.linear.weight[kept], self.linear.bias[kept]
        activation = _ACTIVATION_NAMES[type(self.activation)]
        if self.gate_maps:
            self._emit_gated(recipe, kept, activation)
            return
        recipe.add("linear", self.linear.state(), **self.linear.sizes())
        if self.norm is not None:
            recipe.add_norm(self.norm)
        recipe.add(activation, {})

    def _emit_gated(self, recipe: "Recipe", kept: Tensor, activation: str) -> None:
        gate = self.gate
        assert isinstance(gate, DynamicGate)
        blocks = kept[:: gate.block_size] // gate.block_size
        *before, last = self.gate_maps
        last.weight, last.bias = last.weight[blocks], last.bias[blocks]
        state = {f"linear.{key}": value for key, value in self.linear.state().items()}
        if self.norm is not None:
            state |= {f"norm.{key}": value for key, value in self.norm.state_dict().items()}
        for index, part in enumerate(self.gate_maps):
            state |= {f"gate.{index}.{key}": value for key, value in part.state().items()}
        recipe.add(
            "gated",
            state,
            inputs=self.linear.weight.shape[1],
            outputs=len(self.linear.weight),
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
            scaled=gate.scale is not None,
        )


class Inputs:
    """Inputs of a net, with their gate and norm."""

    def __init__(self, net: GatedMLP, first: Layer) -> None:
        self.first = first
        self.width = first.linear.weight.shape[1]
        self.value = torch.ones(self.width)  # what the gate multiplies inputs by
        self.norm: nn.LayerNorm | None = None
        gate = net.input_gate
        if gate is not None:
            if gate.input_dependent:
                raise TypeError(
                    "input_gate: only a static gate on the inputs can be made compact, got a "
                    f"{type(gate).__name__}."
                )
            self.value = static_value(gate)
        if isinstance(net.input_norm, nn.LayerNorm):
            self.norm = net.input_norm
            return
        for reader in first.readers:
            weight = reader.weight
            reader.weight = weight * self.value.to(weight.dtype)
            if isinstance(net.input_norm, nn.BatchNorm1d):
                # A closed input is 0 before the norm, so only the shift remains after it.
                scale, shift = _batch_norm_affine(net.input_norm)
                reader.bias = reader.bias + weight @ shift
                reader.weight = reader.weight * scale

    def emit(self, recipe: "Recipe", selects: bool, multiple: int) -> None:
        """Append the steps before the first layer to the recipe."""
        if self.norm is not None:
            if not (self.value == 1).all():
                recipe.add("mask", {"mask": self.value.float()}, size=self.width)
                recipe.notes.append("input_gate: no input is left out: a layer norm reads all.")
            recipe.add_norm(self.norm)
            return
        read = torch.stack([(reader.weight != 0).any(0) for reader in self.first.readers]).any(0)
        kept = _round_up_indices(read, multiple)
        if not selects or len(kept) == self.width:
            return
        recipe.add("select", {"index": kept}, size=len(kept))
        recipe.units["inputs"] = (self.width, len(kept))
        for reader in self.first.readers:
            reader.weight = reader.weight[:, kept]


class Recipe:
    """A recipe under construction, with the state of each step."""

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

    def build_net(self, like: Tensor) -> nn.Sequential:
        """Build the net with the dtype and device of a tensor."""
        net = build(self.steps)
        net.to(torch.promote_types(like.dtype, torch.float32))
        for module, state in zip(net, self.states, strict=True):
            module.load_state_dict(state)
        for module in net.requires_grad_(False):
            parts = module.children() if isinstance(module, GatedStep) else [module]
            for part in parts:
                # Gates compute in float32 or wider, whatever the dtype of the net.
                decides = isinstance(module, GatedStep) and part is module.gate
                part.to(like.device, None if decides else like.dtype)
        return net


def static_value(gate: Gate) -> Tensor:
    """Return what a static gate multiplies units by when deployed, 0 where it is closed."""
    h = torch.zeros(1, device=gate.temperature.device)  # ignored by static gates
    p = open_probability(gate.logits(h) / gate.temperature, gate.policy).detach()
    g = hard_gate(p, gate.threshold, gate.k, gate._floor)
    return (g if gate.scale is None else g * p).cpu().repeat_interleave(gate.block_size)


def _round_up_indices(wanted: Tensor, multiple: int) -> Tensor:
    """Return the wanted indices, at least one, padded with others to a multiple."""
    count = max(int(wanted.sum()), 1)
    count = min(-(-count // multiple) * multiple, len(wanted))
    order = (~wanted).int().argsort(stable=True)
    return order[:count].sort().values


def _batch_norm_affine(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a batch norm in evaluation mode."""
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
