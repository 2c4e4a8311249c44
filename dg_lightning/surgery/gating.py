"""Gates on the units of any model: they live beside its modules and act through hooks."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.arguments import renamed
from dg_lightning.compute.macs import as_matrix, is_linear_map, set_calls_per_sample, unit_axis
from dg_lightning.gates import Feeds, Gate, GateSettings, gate_layers, make_gate
from dg_lightning.gates.protocol import filter_by_name
from dg_lightning.surgery.finding import Units, UnitSearchResult, find_units
from dg_lightning.surgery.recording import first_tensor, with_first_tensor

_GATE = "dg_gate"  # the attribute of a map under which the gate of its inputs lives
_NESTED = "dg_use_nested_tensor"  # what a TransformerEncoder had before


class Hooks:
    """What a gate does in a forward pass of somebody's model.

    A static gate is applied to the consumer's input. A gate that looks at the input decides when
    its producer is called, on the producer's input.

    Args:
        gate: The gate, which knows the maps around it.
        units: What it gates.
        between: The modules with weights between the maps.
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
        self, producer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Decide by the producer's input."""
        self._open = self.gate(first_tensor(args, kwargs))

    def apply_gate(
        self, consumer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Multiply the consumer's input by the gate."""
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
        return {**self.__dict__, "_open": None}  # with a graph it can be neither copied nor pickled


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
    """Put gates on the units, attention heads or channels of a model, however it is built.

    Nothing of the model is replaced: its modules, its class and the keys of its state dict stay. A
    gate lives under the map that reads its units (`<map>.dg_gate`) and acts through hooks. While
    all gates are open, outputs are the same bits as before. Callbacks, ledger and penalties find
    them as they find the gates of our own nets.

    Args:
        model: The model, a LightningModule or any other.
        feed_forward: Gates on units between two linear maps, as plain values: `{"kind": "static"}`.
        heads: Gates on attention heads, which must be static.
        channels: Gates on channels between convolutions, which must be static.
        pairs: Names of two maps each: the first makes units, the second reads them. Only these get
            gates, those of `feed_forward`, whatever lies between them; nothing is looked for, and
            only the second map is known to save compute.
        layers: Name patterns of the maps that read the units; None for all.
        example: What the model is called with, see `find_units`.
        more_examples: Further examples, which take other branches of the model.

    Returns:
        What has got gates, and what was left alone, with reasons.

    >>> from dg_lightning import gate_layers
    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> print(add_gates(net, feed_forward={"kind": "static"}, example=torch.randn(2, 8)))
    2: 4 units, made by 0
    0: left alone, it reads the model's input
    >>> list(gate_layers(net))
    ['2.dg_gate']
    """
    given = {"feed_forward": feed_forward, "heads": heads, "channels": channels}
    settings = {kind: value for kind, value in given.items() if value is not None}
    if not settings:
        raise ValueError("Say what to gate: `feed_forward`, `heads` or `channels`.")
    if already := gated_units(model):
        raise ValueError(
            f"{type(model).__name__} has gates already, as at {next(iter(already))}: give all "
            "settings at once, or take them out first (`remove_gates`)."
        )
    if pairs:
        found = UnitSearchResult({pair[1]: _given_units(model, *pair) for pair in pairs}, {}, {})
    else:
        found = find_units(model, example, more_examples)
    units = {name: u for name, u in found.units.items() if u.kind in settings}
    missing = [kind for kind in settings if not any(u.kind == kind for u in units.values())]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {' and no '.join(missing)} to gate, leave out "
            f"{' and '.join(f'`{kind}`' for kind in missing)}: "
            f"{'; '.join(found.reasons()) or 'no linear map ran'}."
        )
    units = filter_by_name(units, layers, "map with units to gate")
    found = UnitSearchResult(units, found.skipped, found.calls_per_sample)
    install_gates(model, found, settings)
    return found


def install_gates(
    model: nn.Module, found: UnitSearchResult, settings: Mapping[str, GateSettings]
) -> None:
    """Put gates on the units that were found, with the settings of their kind."""
    register_gates(model, found, build_gates(model, found, settings))


def build_gates(
    model: nn.Module, found: UnitSearchResult, settings: Mapping[str, GateSettings]
) -> dict[str, Gate]:
    """Return a gate for the units of each map that reads some, which knows the maps around it."""
    return {name: _make_gate(model, u, settings[u.kind]) for name, u in found.units.items()}


def register_gates(model: nn.Module, found: UnitSearchResult, gates: Mapping[str, Gate]) -> None:
    """Put gates into a model, where they act from now on."""
    for name, gate in gates.items():
        _attach(model, found.units[name], gate)
    for name, count in found.calls_per_sample.items():
        set_calls_per_sample(model.get_submodule(name), count)
    for child in model.modules():
        if isinstance(child, nn.TransformerEncoder):
            # Nested tensors, which it makes of padded ones, cannot be multiplied by gates.
            vars(child)[_NESTED] = child.use_nested_tensor
            child.use_nested_tensor = False
    _forget_compiled()


def _forget_compiled() -> None:
    """Let compiled code be compiled again: it does not look whether modules have got hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _given_units(model: nn.Module, producer: str, consumer: str) -> Units:
    widths = []
    for name, axis in ((producer, 0), (consumer, 1)):
        module: Any = dict(model.named_modules()).get(name)
        if module is None or not is_linear_map(module):
            raise ValueError(f"`pairs` names {name!r}, which is no linear map of the model.")
        widths.append(as_matrix(module, module.weight).shape[axis])
    if widths[0] != widths[1]:
        raise ValueError(
            f"`pairs` names {producer!r} with {widths[0]} outputs and {consumer!r} with "
            f"{widths[1]} inputs: they must be equal."
        )
    for name, gate in gate_layers(model, required=False).items():
        maps = {model.get_submodule(producer), model.get_submodule(consumer)}
        if maps & {*gate.feeds.producers, *gate.feeds.consumers}:
            raise ValueError(
                f"`pairs` names {producer!r} and {consumer!r}, whose units have the gate {name!r} "
                "already: one gate is enough."
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
            f"The {units.kind} of {units.consumer} cannot be decided by the input, position by "
            "position: take static gates."
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
    """Take out what `add_gates` has put in: the model is as it was, with the weights of now."""
    if not gated_units(model):
        raise ValueError(f"{type(model).__name__} has no gates of `add_gates`.")
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


def restore_gates(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Put the gates into a model that AddGates or `convert` had when a checkpoint was saved."""
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
                    f"The checkpoint holds gates that do not fit {type(model).__name__} ({error})."
                ) from error
            if not gated_units(part):
                install_gates(part, found, settings)


def _check_units(model: nn.Module, units: Units, settings: Mapping[str, GateSettings]) -> None:
    """Raise ValueError for units from a file that are not those of a model."""
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
            f"The checkpoint holds gates for {units.consumer} that do not fit it: give another one."
        )


def gated_units(model: nn.Module) -> dict[str, tuple[Units, Gate]]:
    """Return what `add_gates` has gated, by the maps that read the units.

    Names are those of now: gates may have been put into a larger model, or a part may be compiled.
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
