"""Add gates to the units of any model through hooks."""

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dg_lightning.arguments import renamed
from dg_lightning.compute.macs import as_matrix, is_linear_map, set_calls_per_sample, unit_axis
from dg_lightning.gates import Feeds, Gate, GateSettings, gate_layers, make_gate
from dg_lightning.gates.protocol import filter_by_name
from dg_lightning.layers import GatedFeedForward, GatedLinear, GatedMLP
from dg_lightning.surgery.finding import Units, UnitSearchResult, find_units
from dg_lightning.surgery.recording import first_tensor, with_first_tensor

_GATE = "dg_gate"  # attribute of a layer under which the gate on its inputs is stored
_NESTED = "dg_use_nested_tensor"  # attribute that saves the setting of a TransformerEncoder


# Quantization replaces layers and copies their hooks, but not how hooks are called.
_REPLACED = (
    "A layer with a gate was replaced by another one, as quantization does: call `compact` before "
    "quantizing, which removes the gates."
)


class Hooks:
    """The hooks that apply a gate in the forward pass of a model.

    The consumer's input is multiplied by the gate. If the gate depends on the input, it is computed
    from the producer's input when the producer is called.

    Args:
        gate: The gate, with its `feeds` set.
        units: The gated units.
        between: The modules with weights between the producers and the consumer.
    """

    def __init__(self, gate: Gate, units: Units, between: list[nn.Module]) -> None:
        self.gate = gate
        self.units = units
        self.between = between
        producer, (consumer,) = gate.feeds.producer, gate.feeds.consumers
        self.axis = unit_axis(consumer)
        self._open: Tensor | None = None
        self.handles = [consumer.register_forward_pre_hook(self.apply_gate, with_kwargs=True)]
        if producer is not None and gate.input_dependent:
            compute_gate = producer.register_forward_pre_hook(self.compute_gate, with_kwargs=True)
            self.handles.append(compute_gate)

    def compute_gate(
        self, producer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Compute the gate from the producer's input."""
        if kwargs is None:
            raise RuntimeError(_REPLACED)
        self._open = self.gate(first_tensor(args, kwargs))

    def apply_gate(
        self, consumer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Multiply the consumer's input by the gate."""
        if kwargs is None:
            raise RuntimeError(_REPLACED)
        x = first_tensor(args, kwargs)
        spatial = -1 - self.axis
        if self.gate.input_dependent:
            factor = self._open
            assert factor is not None
        else:
            factor = self.gate(x.flatten(self.axis + 1)[..., 0] if spatial else x)
        for _ in range(spatial):
            factor = factor.unsqueeze(-1)
        factor = factor.to(x.dtype)
        return with_first_tensor(args, kwargs, lambda x: x * factor)

    def __getstate__(self) -> dict[str, Any]:
        # Tensors with an autograd graph can be neither copied nor pickled.
        return {**self.__dict__, "_open": None}


@renamed(only="layers")
def add_gates(
    model: nn.Module,
    *,
    feed_forward: GateSettings | None = None,
    heads: GateSettings | None = None,
    channels: GateSettings | None = None,
    pairs: Sequence[tuple[str, str]] = (),
    layers: Sequence[str] | None = None,
    example: Any = None,
    more_examples: Sequence[Any] = (),
) -> UnitSearchResult:
    """Add gates to the hidden units, attention heads or channels of any model.

    The model keeps its modules, its class and the keys of its state dict. Each gate is a submodule
    of the layer that consumes its units (`<layer>.dg_gate`) and acts through hooks. While all gates
    are open, outputs are bitwise identical to those of the ungated model. Callbacks, the
    compute ledger and penalties treat these gates like the gates in our own networks.

    Args:
        model: The model, which may be a LightningModule or any other module.
        feed_forward: Settings for gates on units between two linear layers, such as
            `{"kind": "static"}`.
        heads: Settings for gates on attention heads. These gates must be static.
        channels: Settings for gates on channels between convolutions. These gates must be static.
        pairs: Names of producer and consumer layers. If given, the search is skipped. Only these
            pairs get gates, with the settings in `feed_forward`, and only the consumer counts as
            saving compute.
        layers: Name patterns for the layers that consume the units, or None for all layers.
        example: Example inputs for the model, as in `find_units`.
        more_examples: More examples, which take other branches of the model.

    Returns:
        The gated units, and the reason for each skipped layer.

    >>> from dg_lightning import gate_layers
    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> print(add_gates(net, feed_forward={"kind": "static"}, example=torch.randn(2, 8)))
    2: 4 units, produced by 0
    0: skipped because it reads the model's input
    >>> list(gate_layers(net))
    ['2.dg_gate']
    """
    given = {"feed_forward": feed_forward, "heads": heads, "channels": channels}
    settings = {kind: value for kind, value in given.items() if value is not None}
    if not settings:
        raise ValueError("Pass settings for at least one of `feed_forward`, `heads`, `channels`.")
    if already := gated_units(model):
        raise ValueError(
            f"{type(model).__name__} already has gates (at {next(iter(already))}): pass all "
            "settings in one call, or call `remove_gates` first."
        )
    if is_sharded(model):
        raise ValueError(
            f"The weights of {type(model).__name__} are sharded already: call `add_gates` before "
            "`fully_shard` or `parallelize_module`, for example in `configure_model`."
        )
    if pairs:
        found = UnitSearchResult({pair[1]: _given_units(model, *pair) for pair in pairs}, {}, {})
    else:
        found = find_units(model, example, more_examples)
    units = {name: u for name, u in found.units.items() if u.kind in settings}
    missing = [kind for kind in settings if not any(u.kind == kind for u in units.values())]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {' and no '.join(missing)} to gate "
            f"({'; '.join(found.reasons()) or 'no linear map ran'}): omit "
            f"{' and '.join(f'`{kind}`' for kind in missing)}."
        )
    units = filter_by_name(units, layers, "layer with units to gate")
    found = UnitSearchResult(units, found.skipped, found.calls_per_sample)
    install_gates(model, found, settings)
    return found


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` or tensor parallelism has split a model's weights."""
    # Between a forward pass and the next, FSDP may hold whole weights.
    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def install_gates(
    model: nn.Module, found: UnitSearchResult, settings: Mapping[str, GateSettings]
) -> None:
    """Build and register gates for all units in a search result."""
    register_gates(model, found, build_gates(model, found, settings))


def build_gates(
    model: nn.Module, found: UnitSearchResult, settings: Mapping[str, GateSettings]
) -> dict[str, Gate]:
    """Build a gate for each consumer's units, and set its `feeds`."""
    return {name: _make_gate(model, u, settings[u.kind]) for name, u in found.units.items()}


def register_gates(model: nn.Module, found: UnitSearchResult, gates: Mapping[str, Gate]) -> None:
    """Register gates as submodules of their consumers, and activate their hooks."""
    for name, gate in gates.items():
        _attach(model, found.units[name], gate)
    for name, count in found.calls_per_sample.items():
        set_calls_per_sample(model.get_submodule(name), count)
    for child in model.modules():
        if isinstance(child, nn.TransformerEncoder):
            # It would convert padded inputs to nested tensors, which gates cannot multiply.
            vars(child)[_NESTED] = child.use_nested_tensor
            child.use_nested_tensor = False
    _forget_compiled()


def _forget_compiled() -> None:
    """Force recompilation, because compiled code does not notice new hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _given_units(model: nn.Module, producer: str, consumer: str) -> Units:
    widths = []
    for name, axis in ((producer, 0), (consumer, 1)):
        module: Any = dict(model.named_modules()).get(name)
        if module is None or not is_linear_map(module):
            raise ValueError(f"`pairs` must name linear layers in the model, got {name!r}.")
        widths.append(as_matrix(module, module.weight).shape[axis])
    if widths[0] != widths[1]:
        raise ValueError(
            f"`pairs` must name layers of equal width, got {producer!r} with {widths[0]} outputs "
            f"and {consumer!r} with {widths[1]} inputs."
        )
    for name, gate in gate_layers(model, required=False).items():
        maps = {model.get_submodule(producer), model.get_submodule(consumer)}
        if maps & {*gate.feeds.producers, *gate.feeds.consumers}:
            raise ValueError(
                f"`pairs` must name layers without gates, but {producer!r} or {consumer!r} "
                f"already has the gate {name!r}: remove this pair."
            )
    rows = {producer: torch.arange(widths[0], device="cpu")}
    return Units("feed_forward", rows, consumer, widths[0], 1, True, is_independent=False)


def _make_gate(model: nn.Module, units: Units, settings: GateSettings) -> Gate:
    producer: Any = model.get_submodule(next(iter(units.producers)))
    size = settings.get("block_size", 1) * units.block_size
    inputs = as_matrix(producer, producer.weight).shape[1]
    gate = make_gate(
        {**settings, "block_size": size},
        inputs,
        units.size,
        producer.weight.device,
        producer.weight.dtype,
    )
    if gate.input_dependent and not (units.kind == "feed_forward" and units.is_tokenwise):
        raise ValueError(
            f"The {units.kind} of {units.consumer} cannot have input-dependent gates, "
            "because such gates decide for each position: use static gates."
        )
    gate.feeds = _feeds(model, units, gate)
    return gate


def _feeds(model: nn.Module, units: Units, gate: Gate) -> Feeds:
    consumer = model.get_submodule(units.consumer)
    rows = {
        model.get_submodule(name): blocks // (gate.block_size // units.block_size)
        for name, blocks in units.producers.items()
    }
    producer, *partners = rows
    in_order = torch.arange(units.size, device="cpu") // gate.block_size
    return Feeds(
        producer,
        skips_rows=units.is_independent,
        consumers=(consumer,),
        partners=tuple(partners),
        rows={module: row for module, row in rows.items() if not torch.equal(row, in_order)},
        scales_between=units.kind == "heads" or bool(units.between),
    )


def _attach(model: nn.Module, units: Units, gate: Gate) -> None:
    consumer = model.get_submodule(units.consumer)
    gate.train(consumer.training)
    consumer.add_module(_GATE, gate)
    between = [model.get_submodule(name) for name in units.between]
    vars(gate)["hooks"] = Hooks(gate, units, between)


def remove_gates(model: nn.Module) -> None:
    """Remove all gates added by `add_gates`, and keep the current weights."""
    if not gated_units(model):
        raise ValueError(f"{type(model).__name__} has no gates added by `add_gates`.")
    for child in list(model.modules()):
        gate = dict(child.named_children()).get(_GATE)
        if isinstance(gate, Gate):
            for handle in vars(gate)["hooks"].handles:
                handle.remove()
            delattr(child, _GATE)
        set_calls_per_sample(child, None)
        if _NESTED in vars(child):
            child.use_nested_tensor = vars(child).pop(_NESTED)
    _forget_compiled()


def without_gates(model: nn.Module) -> nn.Module:
    """Return a copy of a model without any gates, those of our own layers included."""
    dense = copy.deepcopy(model)
    if gated_units(dense):
        remove_gates(dense)
    for module in dense.modules():
        if isinstance(module, GatedLinear | GatedFeedForward):
            module.gate = None
        elif isinstance(module, GatedMLP):
            module.input_gate = None
        if isinstance(module, GatedFeedForward | GatedMLP):
            module.skip = None
    return dense.eval()


def restore_gates(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Add the gates that AddGates or `convert` has saved in a checkpoint."""
    for state in (checkpoint, *checkpoint.get("callbacks", {}).values()):
        saved = state.get("add_gates") if isinstance(state, dict) else None
        if saved is not None:
            try:
                part = model.get_submodule(saved["module"])
                found, settings = UnitSearchResult.from_state(saved["found"]), saved["settings"]
                for units in found.units.values():
                    _check_units(part, units, settings)
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                raise ValueError(
                    f"The gates in the checkpoint do not fit {type(model).__name__} ({error})."
                ) from error
            if not gated_units(part):
                install_gates(part, found, settings)


def load_weights(model: nn.Module, source: str | Path | Mapping[str, Any]) -> list[str]:
    """Load weights into a model with or without added gates from one with or without.

    Gates that only the model has keep their values. Gates that only the source has are left out,
    with a warning, and the units that they close compute again. `restore_gates` adds them instead.
    One side may have the model under another name, such as `model.` in a LightningModule. What
    else the source has, such as metrics, is then ignored.

    Args:
        model: The model to load into.
        source: A checkpoint, a safetensors file or a state dict.

    Returns:
        The names of the gates that were left out.

    Raises:
        ValueError: If weights other than those of gates are missing, left over or of another shape,
            or if several parts of one side fit. The model is not changed.
    """
    name, own = type(model).__name__, model.state_dict()
    needed = [key for key in own if _gate_of(key) is None]
    state = _under_names_of(_with_tied(_state_in(source), own), needed, name)
    gates, other_gates = _gates_in(own), _gates_in(state)
    shared = {gate for gate, keys in gates.items() if other_gates.get(gate) == keys}
    fitting = {k: v for k, v in state.items() if _gate_of(k) is None or _gate_of(k) in shared}
    if missing := [key for key in needed if key not in fitting]:
        raise ValueError(f"The source lacks {missing[0]}, which {name} has: pass another one.")
    if extra := [key for key in fitting if key not in own]:
        raise ValueError(f"The source has {extra[0]}, which {name} lacks: pass another one.")
    for key, value in fitting.items():
        if isinstance(value, Tensor) and value.shape != own[key].shape:
            raise ValueError(
                f"{key} must have the shape {tuple(own[key].shape)}, got {tuple(value.shape)}: a "
                "compact model is loaded by `load_compact`."
            )
    model.load_state_dict(own | fitting)
    left_out = sorted(other_gates.keys() - shared)
    if left_out:
        rank_zero_warn(
            f"{name} has no place for {len(left_out)} gates, such as {left_out[0]}: the units that "
            "they closed compute again. Use `restore_gates` to add them."
        )
    return left_out


def _state_in(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights in a file or a state dict, by name."""
    content: Any = source
    if isinstance(source, str | Path):
        if Path(source).suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(source)
        else:
            content = torch.load(source, map_location="cpu", weights_only=True)
    found = content.get("state_dict", content)
    return {k: v for k, v in found.items() if isinstance(v, Tensor) or k.endswith("_extra_state")}


def _with_tied(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the tied weights that files of Hugging Face models leave out."""
    by_place: dict[Any, list[str]] = {}
    for key, value in own.items():
        if isinstance(value, Tensor) and value.numel():
            by_place.setdefault((value.data_ptr(), value.shape), []).append(key)
    made = dict(state)
    for keys in by_place.values():
        given = next((key for key in keys if key in state), None)
        if given is not None:
            made |= {key: state[given] for key in keys if key not in state}
    return made


def _under_names_of(state: dict[str, Any], needed: list[str], name: str) -> dict[str, Any]:
    """Return a state under the model's names, if one side has the model in a part."""
    offered = [key for key in state if _gate_of(key) is None]
    if not needed or not offered or set(needed) <= set(offered):
        return state
    parts = {key.removesuffix(needed[0]) for key in offered if key.endswith("." + needed[0])}
    parts = {part for part in parts if all(part + key in state for key in needed)}
    if len(parts) > 1:
        raise ValueError(
            f"Several parts of the source fit {name} ({', '.join(sorted(parts))}): pass the state "
            "dict of one of them."
        )
    for part in parts:
        return {k.removeprefix(part): v for k, v in state.items() if k.startswith(part)}
    parts = {key.removesuffix(offered[0]) for key in needed if key.endswith("." + offered[0])}
    parts = {part for part in parts if all(part + key in needed for key in offered)}
    if len(parts) > 1:
        raise ValueError(
            f"Several parts of {name} fit the source ({', '.join(sorted(parts))}): pass one of "
            "them."
        )
    return {part + key: value for part in parts for key, value in state.items()} or state


def _gates_in(state: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the names of the weights of each gate."""
    gates: dict[str, set[str]] = {}
    for key in state:
        gate = _gate_of(key)
        if gate is not None:
            gates.setdefault(gate, set()).add(key)
    return gates


def _gate_of(key: str) -> str | None:
    """Return the name of the added gate that a weight belongs to."""
    parts = key.split(".")
    return ".".join(parts[: parts.index(_GATE) + 1]) if _GATE in parts else None


def _check_units(model: nn.Module, units: Units, settings: Mapping[str, GateSettings]) -> None:
    """Raise ValueError if units from a checkpoint do not fit the model."""
    consumer: Any = model.get_submodule(units.consumer)
    fits = units.size == as_matrix(consumer, consumer.weight).shape[1]
    fits = fits and units.block_size > 0 and units.size % units.block_size == 0
    for name, blocks in units.producers.items():
        producer: Any = model.get_submodule(name)
        rows = as_matrix(producer, producer.weight).shape[0]
        fits = fits and blocks.shape == (rows,) and blocks.dtype == torch.int64
        fits = fits and bool(((blocks >= 0) & (blocks < units.blocks)).all())
    if not fits or units.kind not in settings:
        raise ValueError(
            f"The checkpoint has gates for {units.consumer} that do not fit this layer: use a "
            "checkpoint of this model."
        )


def gated_units(model: nn.Module) -> dict[str, tuple[Units, Gate]]:
    """Return the units and gates from `add_gates`, keyed by the consumer's name.

    The names are the current ones, because the gated model may have become part of a larger or
    compiled model.
    """
    names = {child: name for name, child in model.named_modules()}
    found = {}
    for child, name in names.items():
        gate = dict(child.named_children()).get(_GATE)
        if isinstance(gate, Gate):
            hooks: Hooks = vars(gate)["hooks"]
            rows = zip(gate.feeds.producers, hooks.units.producers.values(), strict=True)
            found[name] = (
                replace(
                    hooks.units,
                    producers={names[producer]: blocks for producer, blocks in rows},
                    consumer=name,
                    between=tuple(names[module] for module in hooks.between),
                ),
                gate,
            )
    return found
