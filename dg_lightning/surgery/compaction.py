"""Remove closed units from a model, which keeps its class but gets smaller layers.

A model's code may use the number of heads or channels, and it is unknown which attributes store
these numbers. So all attributes with a matching value are tried, and a change is accepted only if
the model's outputs stay the same.
"""

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dg_lightning.compute.macs import as_matrix, weight_axes
from dg_lightning.files import atomic_write, write_text
from dg_lightning.gates import DynamicGate, Gate, gate_layers, set_connections
from dg_lightning.layers import GatedFeedForward, GatedLinear, GatedMLP
from dg_lightning.surgery.finding import Units, UnitSearchResult, find_units
from dg_lightning.surgery.gating import gated_units, remove_gates
from dg_lightning.surgery.rebuilding import ConfigRebuilder, Rebuilder, find_rebuilder
from dg_lightning.surgery.watching import OutputComparison

# Attributes in which linear layers store the number of outputs or inputs.
_MAKES = ("out_features", "out_channels", "nf")
_READS = ("in_features", "in_channels", "nx")


# Words in the names of attributes that count units or heads.
_COUNT_WORDS = ("channel", "dim", "embd", "embed", "feature", "ffn", "filter", "group", "head")
_WIDTH_WORDS = ("hidden", "inner", "inter", "mid", "nf", "plane", "size", "unit", "width")
_PREFIXES = ("d_", "n_")
# Words in the names of other attributes, which may equal such a count by chance.
_OTHER_WORDS = (
    "bucket",
    "ctx",
    "idx",
    "in_channel",
    "in_feature",
    "index",
    "input",
    "kernel",
    "layer",
    "len",
    "pos",
    "stride",
    "window",
)


class _Change(NamedTuple):
    """A changed attribute and its old value. For a tensor, also the axis and the kept indices."""

    name: str
    key: str
    old: Any
    kept: tuple[int, Tensor] | None = None


class Edit:
    """Changes to a model that can be undone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changes: list[_Change] = []

    def shrink(self, units: Units, is_open: Tensor) -> None:
        """Remove closed blocks from the producers, the consumer and the modules between them."""
        self._cut_map(units.consumer, 1, is_open.repeat_interleave(units.block_size), _READS)
        for name, blocks in units.producers.items():
            self._cut_map(name, 0, is_open[blocks], _MAKES)
        # Maps the width of a tensor between the layers to the entries to keep.
        kept = {len(blocks): is_open[blocks] for blocks in reversed(units.producers.values())}
        for name in units.between:
            module = self.model.get_submodule(name)
            for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor.ndim and len(tensor) in kept:
                    self._cut(name, key, 0, kept[len(tensor)])
            for key, number in _numbers(module):
                if number in kept or number == units.blocks:
                    self.set_number(name, key, int(kept.get(number, is_open).sum()))

    def size_attributes(self, units: Units, is_open: Tensor) -> dict[tuple[str, str], int]:
        """Return integer attributes that may depend on the unit count, with their new values."""
        widths = [units.size, *(len(blocks) for blocks in units.producers.values())]

        def follows(number: int) -> bool:  # also fixed numbers per block, such as units per head
            return number % units.blocks == 0 and any(width % number == 0 for width in widths)

        return {
            (name, key): number // units.blocks * int(is_open.sum())
            for name in _enclosing_modules(units)
            for key, number in _numbers(self.model.get_submodule(name))
            if number > 0 and follows(number)
        }

    def counts(self, units: Units, among: set[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the attributes in `among` that seem to count heads or units.

        Names and values decide, because these attributes do not affect the examples' outputs.
        """
        widths = {units.blocks, units.size, *(len(rows) for rows in units.producers.values())}
        return [
            (name, key)
            for name, key in sorted(among)
            if getattr(self.model.get_submodule(name), key) in widths and _is_count(key)
        ]

    def _cut_map(self, name: str, axis: int, keep: Tensor, numbers: tuple[str, ...]) -> None:
        module: Any = self.model.get_submodule(name)
        self._cut(name, "weight", weight_axes(module)[axis], keep)
        if axis == 0 and module.bias is not None:
            self._cut(name, "bias", 0, keep)
        for key in numbers:
            if hasattr(module, key):
                self.set_number(name, key, int(keep.sum()))

    def _cut(self, name: str, key: str, axis: int, keep: Tensor) -> None:
        old, index = getattr(self.model.get_submodule(name), key), keep.nonzero().flatten()
        new = old.detach().index_select(axis, index.to(old.device)).clone()
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, old.requires_grad)
        self._set(_Change(name, key, old, (axis, index)), new)

    def set_number(self, name: str, key: str, number: int) -> None:
        """Set an attribute of a module."""
        old = getattr(self.model.get_submodule(name), key)
        self._set(_Change(name, key, old), number)

    def _set(self, change: _Change, new: Any) -> None:
        setattr(self.model.get_submodule(change.name), change.key, new)
        self.changes.append(change)

    def undo(self, count: int) -> None:
        """Undo all changes except the first `count`."""
        while len(self.changes) > count:
            change = self.changes.pop()
            setattr(self.model.get_submodule(change.name), change.key, change.old)

    def report(self, kept: dict[str, list[tuple[int, Tensor]]], attributes: dict[str, int]) -> None:
        """Record which indices of each tensor were kept, and which attributes changed."""
        for name, key, _, part in self.changes:
            full = f"{name}.{key}" if name else key
            if part is not None:
                kept.setdefault(full, []).append(part)
            else:
                attributes[full] = getattr(self.model.get_submodule(name), key)


def _is_count(key: str) -> bool:
    """Return whether an attribute counts units or heads, judging by its name."""
    # Llama's `num_key_value_groups` is the number of heads that share a key.
    if "key_value_group" in key or any(word in key for word in _OTHER_WORDS):
        return False
    words = (*_COUNT_WORDS, *_WIDTH_WORDS)
    return key.startswith(_PREFIXES) or any(word in key for word in words)


def _numbers(module: nn.Module) -> list[tuple[str, int]]:
    return [(key, value) for key, value in vars(module).items() if type(value) is int]


def _enclosing_modules(units: Units) -> list[str]:
    """Return the modules around the layers, up to their innermost common ancestor."""
    names = [*units.producers, units.consumer]
    parents = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(p) > shared for p in parents) and len({p[shared] for p in parents}) == 1:
        shared += 1
    homes = {".".join(p[:n]) for p in parents for n in range(shared, len(p) + 1)}
    return sorted(homes)


_MAX_ATTRIBUTES = 8  # maximum number of attributes tried in all combinations


@dataclass
class CompactModel:
    """A model without its closed units.

    Args:
        model: The compact model, of the same class as the original.
        units: Number of units, heads or channels before and after, for each consumer.
        notes: What could not be removed, and why.
        attributes: New values of all changed attributes, such as `"blocks.0.attn.num_heads": 2`.
        kept: For each changed parameter and buffer, the axis and the kept indices of every cut, in
            order.
        settings: With `uniform`, the settings with which the model's class builds it, such as
            `intermediate_size`.
        unused: Parameters that no example used. Branches that use them were not checked and may
            fail.
        hook: Handle of a hook that explains shape errors. Call its `remove()` before
            `torch.jit.script`, or before pickling the model for a process without this package.
    """

    model: nn.Module = field(repr=False)
    units: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    attributes: dict[str, int] = field(default_factory=dict, repr=False)
    kept: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict, repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    hook: RemovableHandle | None = field(default=None, repr=False, compare=False)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save a Hugging Face model to a folder.

        After `compact(uniform=True)`, `from_pretrained` loads it, also without this package.
        Otherwise, layers have different widths, which only `load_compact` can load.
        """
        model: Any = self.model
        if not hasattr(model, "save_pretrained"):
            raise ValueError(
                f"{type(model).__name__} is not a Hugging Face model: use `save_compact`."
            )
        if self.units and not self.settings:
            save_compact(self, Path(folder) / "compact.safetensors")
            rank_zero_warn(
                "`from_pretrained` needs layers of equal width: compact with `uniform=True`. Saved "
                f"{folder}/compact.safetensors for `load_compact` instead."
            )
        else:
            model.save_pretrained(folder)

    def carry_state(self, model: nn.Module, before: Optimizer, after: Optimizer) -> None:
        """Copy optimizer state from the gated to the compact model.

        Args:
            model: The gated model.
            before: The gated model's optimizer.
            after: An optimizer for the compact model's parameters.
        """
        old = dict(model.named_parameters())
        for name, parameter in self.model.named_parameters():
            state = before.state.get(old[name], {})
            shape = old[name].shape
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != shape:
                    raise ValueError(
                        f"`{key}` of {type(before).__name__} must have the shape of {name} to be "
                        "carried over: use a new optimizer without this state."
                    )
            after.state[parameter] = {
                key: self._cut(name, value)
                if isinstance(value, Tensor) and value.shape == shape
                else copy.deepcopy(value)
                for key, value in state.items()
            }

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        for axis, index in self.kept.get(name, []):
            tensor = tensor.index_select(axis, index.to(tensor.device))
        return tensor.clone()


@torch.no_grad()
def compact(
    model: nn.Module,
    example: Any = None,
    *,
    more_examples: Sequence[Any] = (),
    multiple: int = 1,
    uniform: bool = False,
    build: Callable[..., nn.Module] | None = None,
    attributes: Sequence[str] | None = None,
) -> CompactModel:
    """Return a copy of a model without its static gates and the units that they close.

    Outputs for the examples are compared before and after. Units whose removal would change the
    outputs stay, with weights of 0, and are listed in `notes`. Our own layers keep gates that
    depend on the input, or whose units a norm or another gate also reads. A checkpoint of a compact
    LightningModule cannot be loaded, so save its `net` with `save_compact` instead.

    Args:
        model: A model with static gates, from `add_gates` or in our own layers. It is not changed.
        example: Example inputs for the model, as in `find_units`. The default for a `GatedMLP` is
            random inputs.
        more_examples: More examples, which take other branches of the model.
        multiple: The number of feed-forward units and channels is rounded up to a multiple of this
            number by keeping closed ones, with weights of 0. GPUs are slow at multiplying matrices
            of odd sizes.
        uniform: Whether layers that are alike keep as many units as the one that needs most, so
            that the class itself builds the compact model from other settings. A Hugging Face model
            gets them in its config: `save_pretrained` it, and `from_pretrained` loads it anywhere.
        build: With `uniform`, a function that returns the original model and takes settings of its
            class as keyword arguments, such as `partial(create_model, "vit_base_patch16_224")` of
            timm. The result's `settings` are those that were found.
        attributes: Names of the attributes that count units or heads, such as `num_heads`, in
            modules around the units. Where there is none of them, as by default, attributes with
            fitting values are tried.

    Returns:
        The compact model, with a record of what was removed and what was not.

    Raises:
        ValueError: If the model has no static gates, or has input-dependent gates from `add_gates`.

    >>> from dg_lightning import add_gates
    >>> net, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 8)
    >>> _ = add_gates(net, feed_forward={"kind": "static"}, example=x)
    >>> _ = net[2].dg_gate.logit.data[:3].fill_(-1)
    >>> compact(net, x).model
    Sequential(
      (0): Linear(in_features=8, out_features=1, bias=True)
      (1): ReLU()
      (2): Linear(in_features=1, out_features=2, bias=True)
    )
    """
    if multiple < 1:
        raise ValueError(f"`multiple` must be at least 1, got {multiple}.")
    if build is not None and not uniform:
        raise ValueError("`build` needs `uniform=True`: other models have widths of their own.")
    if isinstance(attributes, str):
        raise ValueError(f"`attributes` must be a list of names, got {attributes!r}.")
    for key in attributes or ():
        if not any(key in dict(_numbers(module)) for module in model.modules()):
            raise ValueError(f"`attributes` must name integers of a module, got {key!r}.")
    small = copy.deepcopy(model)
    if example is None and isinstance(model, GatedMLP):
        generator = torch.Generator("cpu").manual_seed(0)
        example = torch.randn(2, model.in_features, generator=generator, device="cpu")
    added, own = gated_units(small), _own_layers(small)
    input_gates = _input_gated(small)
    for name, (_, gate) in added.items():
        if gate.input_dependent:
            raise ValueError(
                f"The gate of {name} must be static, because input-dependent gates may need any "
                "of their units."
            )
    gates = gate_layers(small, required=False).values()
    if not any(isinstance(gate, Gate) and not gate.input_dependent for gate in gates):
        raise ValueError(f"{type(model).__name__} has no static gates: add some with `add_gates`.")
    for child in small.modules():
        set_connections(child, None)  # shapes will change, and missing connections have weight 0
    examples = [example, *more_examples]
    watch = OutputComparison(small, examples)
    gated, notes = _own_units(small, own, examples)
    names = [*added, *(name for name in gated if name not in added)]
    expected = watch.look(*names)
    if added:
        remove_gates(small)
    for layer in own:
        if any(layer.gate is gate for _, gate in gated.values()):
            layer.gate = None
    _fold_input_gates(input_gates)
    gated |= added
    is_open = {name: _fold_gate(small, *gated[name]) for name in gated}
    if not watch.is_same(expected, *names):
        raise ValueError(
            f"Folding gates into weights changes the outputs of {type(model).__name__}: check for "
            "shared or parametrized weights."
        )
    result = CompactModel(small, notes=notes, unused=watch.unused_parameters())
    groups = _alike(gated) if uniform else [[name] for name in gated]
    rebuilder = find_rebuilder(small, build) if uniform else None
    stuck = [
        names
        for names in groups
        if not _remove(result, names, gated, is_open, multiple, watch, rebuilder, attributes)
    ]
    if uniform:  # one setting may serve layers with other names, such as encoder and decoder
        merged = _same_sizes(stuck, gated)
        stuck = [
            names
            for names in merged
            if not _remove(result, names, gated, is_open, multiple, watch, rebuilder, attributes)
        ]
    for name in chain.from_iterable(stuck):
        units = gated[name][0]
        reason = (
            f"removing them changes the outputs of {type(small).__name__}"
            if rebuilder is None
            else f"no setting of {type(small).__name__} gives these layers another number of them"
        )
        result.notes.append(
            f"{name}: {int((~is_open[name]).sum())} closed {units.noun} stay, with weights of 0, "
            f"because {reason}."
        )
    if rebuilder is not None:
        result.settings = rebuilder.changes
        if isinstance(rebuilder, ConfigRebuilder):
            rebuilder.apply()
    for name, (units, gate) in gated.items():
        if not bool((gate(torch.zeros(1, device=gate.threshold.device)) != 0).any()):
            result.notes.append(
                f"{name}: all {units.noun} are closed, but one is kept because a layer needs one."
            )
    for name, left in gate_layers(small, required=False).items():
        if not left.input_dependent and not any(note.startswith(f"{name}:") for note in notes):
            result.notes.append(f"{name}: this gate stays because its units were not found.")
    result.hook = explain_shape_errors(small)
    return result


def _own_layers(model: nn.Module) -> list[Any]:
    """Return our own layers with a static gate."""
    ours = [m for m in model.modules() if isinstance(m, GatedLinear | GatedFeedForward)]
    return [m for m in ours if isinstance(m.gate, Gate) and not m.gate.input_dependent]


def _own_units(
    model: nn.Module, layers: Sequence[Any], examples: Sequence[Any]
) -> tuple[dict[str, tuple[Units, Gate]], list[str]]:
    """Return the units and gates of our own layers for each consumer, and notes on the rest."""
    if not layers:
        return {}, []
    names = {module: name for name, module in model.named_modules()}
    gates = {layer: (names[layer.gate], layer.gate) for layer in layers}
    for layer in layers:
        layer.gate = None
    try:
        found = find_units(model, examples[0], examples[1:])
    except Exception as error:  # without its gates, a model may fail in any way
        found = UnitSearchResult({}, {}, {})
        reason = " ".join(f"the model fails without its gates ({error})".split())
    else:
        reason = "its units do not feed exactly one linear layer"
    finally:
        for layer, (_, gate) in gates.items():
            layer.gate = gate
    gated, notes = {}, []
    for layer, (name, gate) in gates.items():
        producer = names[layer.linear if isinstance(layer, GatedLinear) else layer.fc1]
        consumers = [c for c, units in found.units.items() if producer in units.producers]
        if len(consumers) == 1 and found.units[consumers[0]].size == gate.units:
            gated[consumers[0]] = found.units[consumers[0]], gate
        else:
            notes.append(f"{name}: this gate stays because {reason}.")
    return gated, notes


def _input_gated(model: nn.Module) -> list[GatedMLP]:
    """Return the nets whose static input gate can be folded into weights."""
    found = []
    for net in [m for m in model.modules() if isinstance(m, GatedMLP)]:
        gate: Any = net.input_gate
        if not isinstance(gate, Gate) or gate.input_dependent or len(gate.feeds.consumers) != 1:
            continue
        first: Any = next((layer.gate for layer in net.layers()), None)
        knows = first is None or isinstance(first, DynamicGate) or not first.input_dependent
        if isinstance(net.input_norm, nn.Identity) and knows:
            found.append(net)
    return found


def _fold_input_gates(nets: Sequence[GatedMLP]) -> None:
    """Multiply the weights that read the inputs of nets by their static input gates."""
    for net in nets:
        gate: Any = net.input_gate
        readers: list[Any] = list(gate.feeds.consumers)
        first = next((layer.gate for layer in net.layers()), None)
        if isinstance(first, DynamicGate):
            readers.append(first.network[0])
        value = gate.eval()(torch.zeros(1, device=gate.threshold.device))
        for reader in readers:
            reader.weight.mul_(value.to(reader.weight))
        net.input_gate = None


def explain_shape_errors(model: nn.Module) -> RemovableHandle:
    """Add a note about the likely cause to errors from a compact model."""
    return model.register_forward_hook(_add_note, always_call=True)


def _add_note(model: nn.Module, args: Any, output: Any) -> None:
    error = sys.exc_info()[1] if output is None else None
    if isinstance(error, RuntimeError | ValueError | IndexError):
        note = (
            f"`compact` has removed units from this {type(model).__name__}. If shapes do not fit, "
            "this call may take a branch that no example took: add such an example to "
            "`more_examples`."
        )
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _alike(gated: dict[str, tuple[Units, Gate]]) -> list[list[str]]:
    """Group consumers whose names differ only in numbers, and whose units have the same sizes."""
    groups: dict[Any, list[str]] = {}
    for name, (units, _) in gated.items():
        pattern = re.sub(r"\d+", "*", name)
        groups.setdefault((pattern, *_sizes(units)), []).append(name)
    return list(groups.values())


def _same_sizes(groups: list[list[str]], gated: dict[str, tuple[Units, Gate]]) -> list[list[str]]:
    """Join groups whose units have the same sizes."""
    joined: dict[Any, list[str]] = {}
    for names in groups:
        joined.setdefault(_sizes(gated[names[0]][0]), []).extend(names)
    return list(joined.values())


def _sizes(units: Units) -> tuple[str, int, int]:
    return units.kind, units.size, units.block_size


def _fold_gate(model: nn.Module, units: Units, gate: Gate) -> Tensor:
    """Multiply the consumer's weights by a static gate, and return which blocks are open."""
    consumer: Any = model.get_submodule(units.consumer)
    value: Tensor = gate.eval()(torch.zeros(1, device=gate.threshold.device))
    as_matrix(consumer, consumer.weight).mul_(value.to(consumer.weight)[:, None])
    return (value.reshape(units.blocks, -1) != 0).any(1).cpu()


def _remove(
    result: CompactModel,
    names: Sequence[str],
    gated: dict[str, tuple[Units, Gate]],
    is_open: dict[str, Tensor],
    multiple: int,
    watch: OutputComparison,
    rebuilder: Rebuilder | None,
    attributes: Sequence[str] | None,
) -> bool:
    """Remove closed units, as many from each of these consumers, from all or from none.

    Returns:
        Whether it worked.
    """
    units = gated[names[0]][0]
    multiple = multiple if units.block_size == 1 else 1
    # A layer needs at least one unit.
    wanted = max(1, *(int(is_open[name].sum()) for name in names))
    count = min(-(-wanted // multiple) * multiple, units.blocks)
    if count == units.blocks:
        return True
    edits: dict[str, Edit] = {}
    for name in names:
        order = (~is_open[name]).int().argsort(stable=True)  # open ones first
        kept = torch.zeros_like(is_open[name]).index_fill(0, order[:count], True)
        edit = _remove_units(result.model, gated[name][0], kept, watch, attributes)
        if edit is None:
            break
        edits[name] = edit
    if len(edits) == len(names) and (rebuilder is None or rebuilder.follow(watch, units, count)):
        for name, edit in edits.items():
            result.units[name] = (units.blocks, count)
            edit.report(result.kept, result.attributes)
        return True
    for edit in reversed(edits.values()):
        edit.undo(0)
    return False


def _remove_units(
    model: nn.Module,
    units: Units,
    is_open: Tensor,
    watch: OutputComparison,
    attributes: Sequence[str] | None,
) -> Edit | None:
    """Remove closed blocks if the outputs then stay the same."""
    expected = watch.look(units.consumer)
    edit = Edit(model)
    edit.shrink(units, is_open)
    numbers = edit.size_attributes(units, is_open)
    shrunk = len(edit.changes)
    named = [place for place in numbers if attributes is not None and place[1] in attributes]
    for chosen in [tuple(named)] if named else _subsets(list(numbers)):
        for name, key in chosen:
            edit.set_number(name, key, numbers[name, key])
        if watch.is_same(expected, units.consumer):
            # Other inputs may need attributes that these examples do not use.
            for name, key in edit.counts(units, set(numbers) - set(chosen)):
                fits = len(edit.changes)
                edit.set_number(name, key, numbers[name, key])
                if not watch.is_same(expected, units.consumer):
                    edit.undo(fits)
            return edit
        edit.undo(shrunk)
    edit.undo(0)
    return None


def _subsets(items: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Return all subsets, small ones first. For many items, return only none and all."""
    if len(items) > _MAX_ATTRIBUTES:
        return iter([(), tuple(items)])
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


_FORMAT = "dg_lightning compact model, version 1"


def save_compact(result: CompactModel, path: str | Path) -> None:
    """Save the weights of a compact model to `path`, and its recipe to `<path>.json`.

    The recipe contains the attributes that differ from the values set by the model's constructor,
    such as the number of attention heads.

    Args:
        result: The compact model.
        path: The file for the weights, in safetensors format.
    """
    from safetensors.torch import save_model

    if not isinstance(result, CompactModel):
        raise ValueError(
            "`result` must be the CompactModel that `compact` returns, which also records changed "
            f"attributes; got {type(result).__name__}."
        )
    path = Path(path)
    recipe = {"format": _FORMAT, "attributes": result.attributes, "units": result.units}
    with atomic_write(path) as unfinished:
        save_model(result.model, str(unfinished))
    write_text(_recipe(path), json.dumps(recipe, indent=1))


def load_compact(build: Callable[[], nn.Module], path: str | Path) -> nn.Module:
    """Load a compact model from its files.

    Args:
        build: Function that returns the original model without gates, such as its constructor.
        path: The file written by `save_compact`.

    Raises:
        ValueError: If the files do not fit the model that `build` returns.
    """
    from safetensors import safe_open

    path = Path(path)
    for file in (path, _recipe(path)):
        if not file.is_file():
            raise FileNotFoundError(f"There is no {file}: `save_compact` writes it.")
    recipe: dict[str, Any] = json.loads(_recipe(path).read_text(encoding="utf-8"))
    if recipe.get("format") != _FORMAT:
        raise ValueError(f"{_recipe(path)} is not the recipe for a compact model.")
    model = build()
    for full, number in recipe["attributes"].items():
        name, _, key = full.rpartition(".")
        setattr(_submodule(model, name, path), key, number)
    loaded = set()
    with safe_open(str(path), framework="pt") as file, torch.no_grad():
        for full in file.keys():  # noqa: SIM118, not a dict
            name, _, key = full.rpartition(".")
            module = _submodule(model, name, path)
            tensor, old = file.get_tensor(full), getattr(module, key, None)
            if not isinstance(old, torch.Tensor):
                raise ValueError(f"{path} contains {full}, which {type(model).__name__} lacks.")
            if old.shape != tensor.shape:
                new = torch.empty_like(tensor, dtype=old.dtype, device=old.device)
                is_parameter = isinstance(old, nn.Parameter)
                old = nn.Parameter(new, old.requires_grad) if is_parameter else new
                setattr(module, key, old)
            old.copy_(tensor)
            loaded.add(id(old))
    saved = model.state_dict().keys()
    for full, tensor in [*model.named_parameters(), *model.named_buffers()]:  # tied tensors once
        if full in saved and id(tensor) not in loaded:
            raise ValueError(f"{path} lacks {full}, which {type(model).__name__} has.")
    explain_shape_errors(model)
    return model


def _recipe(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _submodule(model: nn.Module, name: str, path: Path) -> nn.Module:
    found: nn.Module | None = dict(model.named_modules()).get(name)
    if found is None:
        raise ValueError(
            f"{path} contains {name}, which {type(model).__name__} lacks: `build` must return the "
            "original model without gates."
        )
    return found
