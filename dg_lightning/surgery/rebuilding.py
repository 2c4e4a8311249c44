"""Find the settings with which a model's own class builds its compact version.

Settings have other names in every class. So those with a matching name or value are tried, and a
change is accepted only if the class then builds weights of the same shapes, with the same outputs.
"""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from dg_lightning.compute.macs import as_matrix
from dg_lightning.surgery.finding import Units
from dg_lightning.surgery.watching import OutputComparison

_RATIO_WORDS = ("expansion", "factor", "mult", "ratio")
_UNIT_WORDS = ("ff", "hidden_dim", "inner", "intermediate", "mlp")
_MAX_CANDIDATES = 8
_MAX_CHANGED = 3  # settings that one group of layers changes together


class Rebuilder(ABC):
    """Builds models of the same class with other settings."""

    def __init__(self) -> None:
        self.changes: dict[str, Any] = {}  # the settings found so far, and their new values
        self._device = "meta"  # where shapes are computed

    @abstractmethod
    def candidates(self, width: int, units: Units, count: int) -> dict[str, Any]:
        """Return settings that may fit another number of units, with their new values.

        Args:
            width: Number of inputs of the layers that produce the units.
            units: The units before.
            count: Number of blocks of units that are kept.
        """

    @abstractmethod
    def build(self, changes: dict[str, Any]) -> nn.Module:
        """Build a model with these changed settings."""

    def check(self, model: nn.Module, source: str) -> None:
        """Raise ValueError if the unchanged settings build other weights than the model's."""
        built, own = self.shapes({}), _shapes_of(model)
        if built is None:  # some constructors need real numbers
            self._device = "cpu"
            built = self.shapes({})
        if built is None:
            raise ValueError(f"`uniform` cannot rebuild the model: {source} raises an error.")
        if differ := sorted(k for k in {*built, *own} if built.get(k) != own.get(k)):
            raise ValueError(
                f"`uniform` needs a model that {source} builds, but {differ[0]} differs: load "
                "adapters and other changes later, or pass `build`."
            )

    def shapes(self, changes: dict[str, Any]) -> dict[str, Any] | None:
        """Return the shapes of the weights, or None if settings do not fit each other."""
        try:
            with torch.random.fork_rng(), torch.device(self._device):
                return _shapes_of(self.build(changes))
        except Exception:  # a constructor may raise anything
            return None

    def follow(self, watch: OutputComparison, units: Units, count: int) -> bool:
        """Find settings that build the compact model as it is now, and record them.

        Args:
            watch: The compact model and its examples.
            units: The units of one of the layers that have changed, as they were before.
            count: Number of blocks that each of these layers has kept.
        """
        producer: Any = watch.model.get_submodule(next(iter(units.producers)))
        width = as_matrix(producer, producer.weight).shape[1]
        wanted, expected = _shapes_of(watch.model), watch.look()
        for chosen in _subsets(self.candidates(width, units, count)):
            changes = self.changes | chosen
            if self.shapes(changes) != wanted:
                continue
            with torch.random.fork_rng():
                built = self.build(changes)
            built.load_state_dict(watch.model.state_dict(), assign=True)
            if watch.of(built.eval()).is_same(expected):
                self.changes = changes
                return True
        return False


class ConfigRebuilder(Rebuilder):
    """Builds a Hugging Face model from its config.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.kind: Any = type(model)
        self.config: Any = model.config
        self.check(model, f"the config of {self.kind.__name__}")

    @override
    def candidates(self, width: int, units: Units, count: int) -> dict[str, Any]:
        new: dict[str, Any] = {}
        heads = getattr(self.config, "num_attention_heads", None)
        if units.kind == "heads" and type(heads) is int and units.size % heads == 0:
            new["head_dim"] = units.size // heads  # else computed from the number of heads
        for name, value in _settings(self.config):
            value, key = self.changes.get(name, value), name.rpartition(".")[2]
            if value is None and any(word in key for word in _UNIT_WORDS):
                new[name] = count * units.block_size
            elif type(value) is int and (
                value in (units.size, units.blocks) or ("head" in key and value > 0)
            ):
                if value % units.blocks == 0:
                    new[name] = value // units.blocks * count
            elif type(value) in (int, float) and any(word in key for word in _RATIO_WORDS):
                new[name] = _simplest(value * count / units.blocks)
        return new

    @override
    def build(self, changes: dict[str, Any]) -> nn.Module:
        """Build a model with these changed settings, as it would be read from a file."""
        config = copy.deepcopy(self.config)
        _change(config, changes)
        model: nn.Module = self.kind(type(config).from_dict(config.to_dict()))
        return model

    def apply(self) -> None:
        """Change the config of the model itself."""
        _change(self.config, self.changes)


class CallRebuilder(Rebuilder):
    """Builds a model by a function that takes the settings of its class.

    Args:
        model: The model.
        function: Returns the original model, and takes other settings as keyword arguments.
    """

    def __init__(self, model: nn.Module, function: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.function = function
        parameters = inspect.signature(type(model)).parameters.values()
        self.given = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.given |= function.keywords if isinstance(function, partial) else {}
        self.names = [p.name for p in parameters]
        self.check(model, "`build`")

    @override
    def candidates(self, width: int, units: Units, count: int) -> dict[str, Any]:
        size, new = count * units.block_size, {}
        for name in self.names:
            value = self.given.get(name)
            if any(word in name for word in _RATIO_WORDS):
                new[name] = _simplest(size / width)
            elif type(value) is int and value in (units.size, units.blocks):
                new[name] = value // units.blocks * count
            elif any(word in name for word in _UNIT_WORDS):
                new[name] = size
        return new

    @override
    def build(self, changes: dict[str, Any]) -> nn.Module:
        return self.function(**changes)


def find_rebuilder(model: nn.Module, build: Callable[..., nn.Module] | None) -> Rebuilder | None:
    """Return what builds models of this class, or None if nothing is known to.

    Raises:
        ValueError: If the model that it builds has other weights.
    """
    if build is not None:
        return CallRebuilder(model, build)
    if hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "to_dict"):
        return ConfigRebuilder(model)
    return None


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config and of the configs in it."""
    for key, value in vars(config).items():
        if key.startswith("_"):
            continue
        if hasattr(value, "to_dict"):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _change(config: Any, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        *path, key = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, key, value)


def _simplest(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _subsets(candidates: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return combinations of candidates, small ones first."""
    items: Sequence[Any] = list(candidates.items())[:_MAX_CANDIDATES]
    sizes = range(1, _MAX_CHANGED + 1)
    return (dict(some) for some in chain.from_iterable(combinations(items, n) for n in sizes))


def _shapes_of(model: nn.Module) -> dict[str, Any]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
