"""Lower a trained GatedMLP to a smaller net of plain layers, chosen by measured speed.

A unit is removed if its static gate is closed, if the next layer does not use it, or if it has no
inputs. In the last case its constant output is added to the bias of the next layer. Batch norms are
folded into adjacent weights. The original net is not changed.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.functional import r2_score

from dg_lightning.gates import DynamicGate, Gate, StaticGate
from dg_lightning.gates.policies import hard_gate, logit_for, open_probability, top_k_mask
from dg_lightning.layers.mlp import GatedLinear, GatedMLP
from dg_lightning.runtime.plain import GatedStep, build_plain
from dg_lightning.runtime.timing import median_seconds

_ACTIVATION_NAMES = {nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh"}


class PrunableLinear:
    """Weight and bias of a linear layer, in float32 or wider, with removable units."""

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
    """A layer that is being lowered: its weights, and the units to remove.

    Args:
        name: Name of the layer.
        layer: The layer.
        usage: Fraction of samples that open each of the layer's blocks.
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
        self.rare = self.removed.clone()  # units used less often than `min_usage`
        self.gate_maps: list[PrunableLinear] = []
        self.activation: nn.Module = nn.Identity()
        self.norm: nn.LayerNorm | None = None
        self.gate: Gate | None = None
        self.value = torch.ones(len(self.removed))  # static gate's factor for each unit
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
            raise TypeError(f"{name}: only a Gate can be lowered, got a {type(gate).__name__}.")
        self.gate = gate
        if gate.input_dependent and not isinstance(gate, DynamicGate):
            raise TypeError(
                f"{name}: an input-dependent gate must be a DynamicGate to be lowered, got a "
                f"{type(gate).__name__}."
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
    def consumers(self) -> list[PrunableLinear]:
        """The linear layers that read the layer's input."""
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
        """Append the pruned layer to the recipe, and prune the inputs of the next layer."""
        kept = self.kept_units(multiple)
        if len(kept) < len(self.removed):
            recipe.units[self.name] = (len(self.removed), len(kept))
        elif self.norm is not None and self.removed.any():
            recipe.notes.append(
                f"{self.name}: all {len(self.removed)} units are kept, although "
                f"{int(self.removed.sum())} are closed, because a layer norm reads them."
            )
        for consumer in after.consumers:
            consumer.weight = consumer.weight[:, kept]
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
    """The inputs of a net, with their gate and norm."""

    def __init__(self, net: GatedMLP, first: Layer) -> None:
        self.first = first
        self.width = first.linear.weight.shape[1]
        self.value = torch.ones(self.width)  # input gate's factor for each input
        self.norm: nn.LayerNorm | None = None
        gate = net.input_gate
        if gate is not None:
            if gate.input_dependent:
                raise TypeError(
                    "input_gate: a gate on the inputs must be static to be lowered, got a "
                    f"{type(gate).__name__}."
                )
            self.value = static_value(gate)
        if isinstance(net.input_norm, nn.LayerNorm):
            self.norm = net.input_norm
            return
        for consumer in first.consumers:
            weight = consumer.weight
            consumer.weight = weight * self.value.to(weight.dtype)
            if isinstance(net.input_norm, nn.BatchNorm1d):
                # A closed input is 0 before the norm, so only the shift remains after the norm.
                scale, shift = _batch_norm_affine(net.input_norm)
                consumer.bias = consumer.bias + weight @ shift
                consumer.weight = consumer.weight * scale

    def emit(self, recipe: "Recipe", selects: bool, multiple: int) -> None:
        """Append the steps before the first layer to the recipe."""
        if self.norm is not None:
            if not (self.value == 1).all():
                recipe.add("mask", {"mask": self.value.float()}, size=self.width)
                recipe.notes.append(
                    "input_gate: all inputs are kept because a layer norm reads them."
                )
            recipe.add_norm(self.norm)
            return
        read = torch.stack(
            [(consumer.weight != 0).any(0) for consumer in self.first.consumers]
        ).any(0)
        kept = _round_up_indices(read, multiple)
        if not selects or len(kept) == self.width:
            return
        recipe.add("select", {"index": kept}, size=len(kept))
        recipe.units["inputs"] = (self.width, len(kept))
        for consumer in self.first.consumers:
            consumer.weight = consumer.weight[:, kept]


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
        """Build the net with the dtype and device of `like`."""
        net = build_plain(self.steps)
        net.to(torch.promote_types(like.dtype, torch.float32))
        for module, state in zip(net, self.states, strict=True):
            module.load_state_dict(state)
        for module in net.requires_grad_(False):
            parts = module.children() if isinstance(module, GatedStep) else [module]
            for part in parts:
                # Gates compute in float32 or wider, regardless of the net's dtype.
                decides = isinstance(module, GatedStep) and part is module.gate
                part.to(like.device, None if decides else like.dtype)
        return net


def static_value(gate: Gate) -> Tensor:
    """Return a static gate's factor for each unit at inference, 0 if the gate is closed."""
    h = torch.zeros(1, device=gate.temperature.device)  # ignored by static gates
    p = open_probability(gate.logits(h) / gate.temperature, gate.policy).detach()
    g = hard_gate(p, gate.threshold, gate.k, gate._floor)
    return (g if gate.scale is None else g * p).cpu().repeat_interleave(gate.block_size)


def _round_up_indices(wanted: Tensor, multiple: int) -> Tensor:
    """Return the wanted indices (at least one), padded with others to a multiple."""
    count = max(int(wanted.sum()), 1)
    count = min(-(-count // multiple) * multiple, len(wanted))
    order = (~wanted).int().argsort(stable=True)
    return order[:count].sort().values


def _batch_norm_affine(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Return the scale and shift of a batch norm in evaluation mode."""
    if norm.running_mean is None or norm.running_var is None:
        raise TypeError("A batch norm without running statistics cannot be folded.")
    wide = torch.promote_types(norm.running_var.dtype, torch.float32)
    scale = (norm.running_var.to(wide) + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    return scale.detach().cpu(), shift.detach().cpu()


@dataclass
class PlainNet:
    """A net of plain layers.

    Args:
        net: The net, made of plain layers.
        steps: The recipe that describes the net, see `plain.build_plain`.
        units: Numbers of units before and after, by layer name, and of inputs under `inputs`.
        notes: Remarks, such as why units could not be removed.
    """

    net: nn.Sequential
    steps: list[dict[str, Any]]
    units: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@torch.no_grad()
def plain_net(
    net: nn.Module,
    *,
    usage: Mapping[str, Tensor] | None = None,
    min_usage: float = 0.0,
    selects_inputs: bool = True,
    multiple: int = 1,
) -> PlainNet:
    """Return a smaller net of plain layers that computes the same function as a `GatedMLP`.

    Args:
        net: The net.
        usage: Fraction of samples that open each block of a dynamic gate, by hidden layer name, see
            `block_usage`.
        min_usage: Blocks used less often are removed, which changes the function.
        selects_inputs: Whether to drop unused inputs before the first layer. Otherwise their
            weights are 0, which is faster if selecting takes longer than multiplying.
        multiple: Round widths up to a multiple of this number by keeping some idle units.

    Raises:
        TypeError: If the net is not a `GatedMLP`.

    >>> mlp = GatedMLP(8, [4], 2, gate={"kind": "static"})
    >>> _ = mlp.hidden[0].gate.logit.data[:3].fill_(-1)
    >>> plain_net(mlp).units
    {'hidden.0': (4, 1)}
    """
    if not isinstance(net, GatedMLP):
        raise TypeError(
            f"Only a GatedMLP can be lowered to plain layers, got a {type(net).__name__}: use "
            "`dg_lightning.compact` for other models."
        )
    usage = usage or {}
    names = [f"hidden.{i}" for i, layer in enumerate(net.layers())]
    if unknown := sorted(set(usage) - set(names)):
        raise ValueError(f"`usage` has the unknown layer {unknown[0]!r}: use {', '.join(names)}.")
    if not 0 <= min_usage <= 1 or (min_usage and not usage):
        raise ValueError(
            f"`min_usage` must be in [0, 1] and needs `usage` (see `block_usage`), got {min_usage} "
            f"and usage for {len(usage)} layers."
        )
    if multiple < 1:
        raise ValueError(f"`multiple` must be at least 1, got {multiple}.")
    stack = [
        Layer(f"hidden.{i}", layer, usage.get(f"hidden.{i}"), min_usage)
        for i, layer in enumerate(net.layers())
    ]
    output = Layer("output", net.output)
    inputs = Inputs(net, [*stack, output][0])
    _remove_idle_units([*stack, output])
    recipe = Recipe()
    inputs.emit(recipe, selects_inputs, multiple)
    for layer, after in pairwise([*stack, output]):
        layer.emit(recipe, after, multiple)
    recipe.add("linear", output.linear.state(), **output.linear.sizes())
    return PlainNet(recipe.build_net(net.output.weight), recipe.steps, recipe.units, recipe.notes)


def _remove_idle_units(stack: list[Layer]) -> None:
    """Mark unused and constant units, and fold constants and gates into the next layer."""
    pairs = list(pairwise(stack))
    for layer, after in reversed(pairs):
        for consumer in after.consumers:
            consumer.weight *= layer.value.to(consumer.weight.dtype)
            consumer.weight[:, layer.removed] = 0
        read = torch.stack([(consumer.weight != 0).any(0) for consumer in after.consumers]).any(0)
        layer.removed |= ~read
        if layer.norm is None:
            layer.linear.weight[layer.removed] = 0
    for layer, after in pairs:
        # A dynamic gate passes a constant only for some inputs.
        if layer.gate_maps or layer.norm is not None:
            continue
        constant = ~(layer.linear.weight != 0).any(1) & ~layer.removed
        outputs = layer.activation(layer.linear.bias) * constant
        for consumer in after.consumers:
            consumer.bias = consumer.bias + consumer.weight @ outputs
            consumer.weight[:, constant] = 0
        layer.removed |= constant


FREEZE_USAGE = 0.05  # blocks open for at least this share of samples stay open when frozen
MAX_ACCURACY_DROP = 0.01  # largest drop in accuracy for which gates are frozen automatically
_NOISE = 1.03  # timings within this factor count as equal
_REMOVE_NOTHING = 2**31  # value of `multiple` that rounds every width up to its full size
_VARIANTS: dict[str, dict[str, Any]] = {
    "as small as can be": {},
    "widths rounded to 16": {"multiple": 16},
    "all inputs read": {"selects_inputs": False},
    "all inputs read, widths rounded to 16": {"selects_inputs": False, "multiple": 16},
    "no unit removed: faster here": {"selects_inputs": False, "multiple": _REMOVE_NOTHING},
}


def fastest_plain_net(
    net: GatedMLP, batch_sizes: Sequence[int] = (1, 32, 1024), **options: Any
) -> PlainNet:
    """Return the plain net with the shortest geometric-mean time over batch sizes.

    Args:
        net: The net.
        batch_sizes: The batch sizes to measure.
        **options: Further arguments of `plain_net`.
    """
    made: dict[str, PlainNet] = {}
    for name, variant in _VARIANTS.items():
        candidate = plain_net(net, **options, **variant)
        if all(candidate.steps != other.steps for other in made.values()):
            made[name] = candidate
    if len(made) == 1:
        return next(iter(made.values()))
    scores = dict.fromkeys(made, 0.0)
    nets = {name: candidate.net for name, candidate in made.items()}
    for size in batch_sizes:
        for name, seconds in _measure(nets, size, net).items():
            scores[name] += math.log(seconds)
    best = min(scores, key=lambda name: scores[name])
    made[best].notes.append(f"Fastest of {len(made)} variants: {best}.")
    return made[best]


def without_gates(net: GatedMLP) -> GatedMLP:
    """Return a copy of the net without gates, to use as the dense baseline."""
    dense = copy.deepcopy(net)
    dense.input_gate = None
    for layer in dense.layers():
        layer.gate = None
    return dense.eval()


def freeze_if_faster(
    net: GatedMLP,
    data: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    batch_sizes: Sequence[int] = (1, 32, 1024),
    max_accuracy_drop: float = MAX_ACCURACY_DROP,
) -> tuple[GatedMLP, PlainNet]:
    """Lower a net, and freeze dynamic gates that cost more time than they save.

    The notes explain the decision.

    Args:
        net: The net.
        data: Function that returns batches of inputs and labels, to measure usage and the accuracy
            lost by freezing. The function is called twice.
        batch_sizes: The batch sizes to measure.
        max_accuracy_drop: Maximum drop in accuracy on this data (R² in regression).

    Returns:
        The net, with or without frozen gates, and its plain form.
    """
    made = fastest_plain_net(net, batch_sizes)
    if not any(step["kind"] == "gated" for step in made.steps):
        return net, made
    nets = {"dense": fastest_plain_net(without_gates(net), batch_sizes).net, "ours": made.net}
    measured = [_measure(nets, size, net) for size in batch_sizes]
    gains = ", ".join(f"{seconds['dense'] / seconds['ours']:.2f}" for seconds in measured)
    if all(seconds["ours"] <= _NOISE * seconds["dense"] for seconds in measured):
        return net, made
    sizes = ", ".join(map(str, batch_sizes))
    reason = f"Input-dependent gates run at {gains} times the dense speed at batch sizes {sizes}."
    gates = [layer.gate for layer in net.layers() if layer.gate is not None]
    if any(gate.input_dependent and gate.scale is not None for gate in gates):
        made.notes.append(f"{reason} They are kept, because they scale units by p, which varies.")
        return net, made
    frozen = freeze_gates(net, block_usage(net, (x for x, _ in data())))
    small = fastest_plain_net(frozen, batch_sizes)
    nets_now = [copy.deepcopy(each).eval() for each in (net, frozen)]
    measure, (before, after) = scores(nets_now, data())
    effect = f"validation {measure} is {before:.2%} with them and {after:.2%} without"
    if before - after > max_accuracy_drop:
        made.notes.append(f"{reason} They are kept: {effect}.")
        return net, made
    small.notes.append(f"{reason} They are frozen: {effect}.")
    return frozen, small


def _measure(nets: Mapping[str, Any], size: int, net: GatedMLP) -> dict[str, float]:
    like = net.output.weight
    x = torch.randn(size, net.in_features, device=like.device, dtype=like.dtype)
    with torch.inference_mode():
        runs = {name: partial(candidate, x) for name, candidate in nets.items()}
        return median_seconds(runs, like.device, rounds=7)


@torch.inference_mode()
def scores(
    runs: Sequence[Callable[[Tensor], Tensor]], data: Iterable[tuple[Tensor, Tensor]]
) -> tuple[str, list[float]]:
    """Return a metric's name and its value for each run: accuracy, or R² for one output."""
    wanted, given = [], []
    for x, target in data:
        wanted.append(target)
        given.append([run(x) for run in runs])
    target, outputs = torch.cat(wanted), [torch.cat(of) for of in zip(*given, strict=True)]
    if outputs[0].shape[-1] == 1:
        target, mean = target.double(), target.double().mean()  # keeps sums of squares exact
        values = [output.squeeze(-1).double() - mean for output in outputs]
        return "R²", [float(r2_score(value, target - mean)) for value in values]
    return "accuracy", [float((out.argmax(-1) == target).double().mean()) for out in outputs]


@torch.no_grad()
def freeze_gates(
    net: GatedMLP, usage: Mapping[str, Tensor], least: float = FREEZE_USAGE
) -> GatedMLP:
    """Return a copy of the net with its dynamic gates frozen to static ones.

    This changes the net's function, but often only slightly, because many dynamic gates learn to
    make the same decision for every input.

    Args:
        net: The net.
        usage: Fraction of samples that open each block, by hidden layer, see `block_usage`.
        least: Blocks used at least this often stay open, and the others are closed. If the
            gate's floor or k requires more open blocks, the most used ones stay open too.

    Raises:
        TypeError: If the input gate is dynamic, or a gate scales units by a varying p.
    """
    if net.input_gate is not None and net.input_gate.input_dependent:
        raise TypeError("input_gate: only gates of hidden layers can be frozen.")
    frozen = copy.deepcopy(net)
    for index, layer in enumerate(frozen.layers()):
        gate: Any = layer.gate
        if gate is None or not gate.input_dependent:
            continue
        name = f"hidden.{index}"
        if gate.scale is not None:
            raise TypeError(f"{name}: the gate scales units by p, which a frozen gate cannot do.")
        shares = usage.get(name)
        if shares is None or len(shares) != gate.blocks:
            raise ValueError(
                f"`usage` must have {gate.blocks} shares for {name}, one per block, got "
                f"{'none' if shares is None else len(shares)}: see `block_usage`."
            )
        min_open = max(gate._floor, gate.k or 0, 1)
        is_kept = (shares >= least) | top_k_mask(shares, min_open)
        device = layer.linear.weight.device
        static = StaticGate(gate.units, block_size=gate.block_size, device=device)
        static.feeds = gate.feeds
        static.logit.copy_(torch.where(is_kept, 1.0, -1.0))
        layer.gate = static.requires_grad_(False).train(gate.training)
    return frozen


@torch.no_grad()
def block_usage(net: GatedMLP, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Measure how often each block of a dynamic gate is open.

    Args:
        net: The net.
        batches: Batches of inputs.

    Returns:
        The fraction of samples that open each block, by hidden layer name.
    """
    net, samples = copy.deepcopy(net).eval(), 0
    layers = {f"hidden.{i}": layer for i, layer in enumerate(net.layers())}
    gates = {n: layer.gate for n, layer in layers.items() if layer.gate is not None}
    gates = {name: gate for name, gate in gates.items() if gate.input_dependent}
    opened: dict[str, Tensor] = {}
    for x in batches:
        net(x)
        samples += len(x)
        for name, gate in gates.items():
            assert isinstance(gate.gate, Tensor)
            count = torch.count_nonzero(gate.gate, 0)
            opened[name] = opened[name] + count if name in opened else count
    if gates and not samples:
        raise ValueError("`batches` is empty: pass inputs to measure usage on.")
    return {name: count / samples for name, count in opened.items()}
