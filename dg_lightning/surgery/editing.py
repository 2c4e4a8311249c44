"""Changes of a model's layers that can be undone."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from dg_lightning.compute.maps import weight_axes
from dg_lightning.surgery.probing import Units

__all__ = ["Edit"]

_MAKES = ("out_features", "out_channels", "nf")  # attributes of maps: their outputs, their inputs
_READS = ("in_features", "in_channels", "nx")


# Words in the names of attributes that count units or heads.
_COUNT_WORDS = ("channel", "dim", "embd", "embed", "feature", "ffn", "filter", "group", "head")
_WIDTH_WORDS = ("hidden", "inner", "inter", "mid", "nf", "plane", "size", "unit", "width")
_PREFIXES = ("d_", "n_")
# Words in the names of attributes that may be equal to such a number by chance.
_OTHER_WORDS = (
    "bucket",
    "ctx",
    "idx",
    "index",
    "kernel",
    "layer",
    "len",
    "pos",
    "stride",
    "window",
)


class _Change(NamedTuple):
    """What a module's attribute was before; for a tensor, the axis and indices that are kept."""

    name: str
    key: str
    old: Any
    kept: tuple[int, Tensor] | None = None


class Edit:
    """Changes of a model that can be undone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changes: list[_Change] = []

    def shrink(self, units: Units, is_open: Tensor) -> None:
        """Take closed blocks out of the maps around units, and of what lies between."""
        self._cut_map(units.consumer, 1, is_open.repeat_interleave(units.block_size), _READS)
        for name, blocks in units.producers.items():
            self._cut_map(name, 0, is_open[blocks], _MAKES)
        # Of each width between the maps, what is kept.
        kept = {len(blocks): is_open[blocks] for blocks in reversed(units.producers.values())}
        for name in units.between:
            module = self.model.get_submodule(name)
            for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor.ndim and len(tensor) in kept:
                    self._cut(name, key, 0, kept[len(tensor)])
            for key, number in _numbers(module):
                if number in kept or number == units.blocks:
                    self.set_number(name, key, int(kept.get(number, is_open).sum()))

    def numbers_to_follow(self, units: Units, is_open: Tensor) -> dict[tuple[str, str], int]:
        """Return numbers of the modules around the maps that may be those of units."""
        widths = [units.size, *(len(blocks) for blocks in units.producers.values())]

        def follows(number: int) -> bool:  # so many for each block: heads, their units
            return number % units.blocks == 0 and any(width % number == 0 for width in widths)

        return {
            (name, key): number // units.blocks * int(is_open.sum())
            for name in _homes(units)
            for key, number in _numbers(self.model.get_submodule(name))
            if number > 0 and follows(number)
        }

    def counts(self, units: Units, among: set[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return which of some numbers are, by value and name, those of all heads or units.

        The name decides because nothing else can: the example does not need these numbers.
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
        """Undo all changes but the first ones."""
        while len(self.changes) > count:
            change = self.changes.pop()
            setattr(self.model.get_submodule(change.name), change.key, change.old)

    def report(self, kept: dict[str, list[tuple[int, Tensor]]], attributes: dict[str, int]) -> None:
        """Add what is kept of tensors, and the numbers that have changed."""
        for name, key, _, part in self.changes:
            full = f"{name}.{key}" if name else key
            if part is not None:
                kept.setdefault(full, []).append(part)
            else:
                attributes[full] = getattr(self.model.get_submodule(name), key)


def _is_count(key: str) -> bool:
    """Return whether the name of an attribute says that it counts units or heads.

    Llama's `num_key_value_groups` is the number of heads that share a key.
    """
    if "key_value_group" in key or any(word in key for word in _OTHER_WORDS):
        return False
    words = (*_COUNT_WORDS, *_WIDTH_WORDS)
    return key.startswith(_PREFIXES) or any(word in key for word in words)


def _numbers(module: nn.Module) -> list[tuple[str, int]]:
    return [(key, value) for key, value in vars(module).items() if type(value) is int]


def _homes(units: Units) -> list[str]:
    """Return the modules around the maps, up to the innermost one that holds them all."""
    names = [*units.producers, units.consumer]
    parents = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(p) > shared for p in parents) and len({p[shared] for p in parents}) == 1:
        shared += 1
    homes = {".".join(p[:n]) for p in parents for n in range(shared, len(p) + 1)}
    return sorted(homes)
