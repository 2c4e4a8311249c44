"""Describe classes by plain values, a class path and arguments, as in YAML and checkpoints.

A class is imported, checked to be a subclass of the expected one, and only then called. A class
named in a checkpoint must also come from a trusted package, because importing runs code.
"""

import importlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Required, TypeAlias, TypedDict, TypeVar

from torch import nn, optim

T = TypeVar("T")
_MAX_VALUES, _MAX_DEPTH = 100_000, 100  # limits for nested plain values
_PLACES_OF_BARE_NAMES = ["dg_lightning", "torch.optim", "torch.optim.lr_scheduler"]
_trusted = {"dg_lightning", "torch.nn", "torch.optim"}


class ClassConfig(TypedDict, total=False):
    """A class to build later: `class_path` and the arguments known so far."""

    class_path: Required[str]
    init_args: dict[str, Any]


class NetBuilder(Protocol):
    """Builds a net from the sizes that it has parameters for."""

    def __call__(self, *, input_shape: Any, in_features: int, num_classes: int) -> nn.Module:
        """Build the net."""


class OptimizerFactory(Protocol):
    """Builds an optimizer for given parameters."""

    def __call__(self, params: Any) -> optim.Optimizer:
        """Build the optimizer."""


class SchedulerFactory(Protocol):
    """Builds a learning-rate scheduler for a given optimizer."""

    def __call__(self, optimizer: optim.Optimizer) -> optim.lr_scheduler.LRScheduler:
        """Build the scheduler."""


# At run time these are class configs, but the command line reads the annotations to check
# arguments. A factory type shows which arguments are added later, while `ClassConfig` would accept
# misspelt ones.
if TYPE_CHECKING:
    NetConfig: TypeAlias = ClassConfig | nn.Module
    OptimizerConfig: TypeAlias = ClassConfig
    SchedulerConfig: TypeAlias = ClassConfig
else:
    NetConfig, OptimizerConfig, SchedulerConfig = NetBuilder, OptimizerFactory, SchedulerFactory


def as_config(value: Any) -> Any:
    """Convert LightningCLI's factory for a class back to a class config."""
    if not isinstance(value, partial):
        return value
    cls = next((part for part in (*value.args, value.func) if isinstance(part, type)), None)
    if cls is None:
        return value
    return {
        "class_path": f"{cls.__module__}.{cls.__qualname__}",
        "init_args": dict(value.keywords),
    }


def trust(*packages: str) -> None:
    """Allow checkpoints to name classes from these packages or modules.

    `dg_lightning`, `torch.nn` and `torch.optim` are trusted by default. On the command
    line, set the environment variable DG_TRUST to a comma-separated list of names.

    >>> trust("my_models")
    """
    _trusted.update(packages)


def check_size(values: Any, source: object) -> None:
    """Reject plain values that are recursive, too deeply nested or too many.

    Lists can share items, so a small file could expand to more than memory can hold.

    Args:
        values: Dicts and lists from a checkpoint or a config.
        source: Where the values come from, for the error message.

    >>> nested = [1]
    >>> nested.append(nested)
    >>> check_size(nested, "a.ckpt")
    Traceback (most recent call last):
    ...
    ValueError: a.ckpt has too many or too deeply nested values: use another file.
    """
    known: dict[int, tuple[int, int]] = {}  # container id -> (number of values, height)

    def measure(value: Any, depth: int) -> tuple[int, int]:
        if not isinstance(value, Mapping | list | tuple):
            return 1, 0
        if id(value) not in known:
            count, height = 1, 0
            for item in value.values() if isinstance(value, Mapping) else value:
                more, below = (_MAX_VALUES, 0) if depth >= _MAX_DEPTH else measure(item, depth + 1)
                count, height = count + more, max(height, below + 1)
                if count > _MAX_VALUES or height > _MAX_DEPTH:
                    raise ValueError(
                        f"{source} has too many or too deeply nested values: use another file."
                    )
            known[id(value)] = count, height
        return known[id(value)]

    measure(values, 0)


def _class_paths(values: Any) -> Iterator[Any]:
    """Yield every `class_path` in plain values, unvalidated."""
    pending, seen = [values], set()
    while pending:
        value = pending.pop()
        if not isinstance(value, Mapping | list | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            yield from (value[key] for key in ("class_path", "_class_path") if key in value)
        pending.extend(value.values() if isinstance(value, Mapping) else value)


def modules_named(values: Any) -> set[str]:
    """Return the modules of all classes named in plain values.

    >>> modules_named({"net": {"class_path": "my_models.Net"}, "gates": [1, {"class_path": "X"}]})
    {'my_models'}
    """
    paths = [path for path in _class_paths(values) if isinstance(path, str)]
    return {path.rpartition(".")[0] for path in paths} - {""}


def check_trusted(values: Any, source: object, also: Iterable[str] = ()) -> None:
    """Reject plain values that name untrusted classes, without importing them.

    Args:
        values: Dicts and lists from a checkpoint or a config.
        source: Where the values come from, for the error message.
        also: Further packages or modules to trust in this call.

    >>> check_trusted({"net": {"class_path": "os.system"}}, "a.ckpt")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: a.ckpt names the class 'os.system', whose package is not trusted: ...
    """
    check_size(values, source)
    named = {name.strip() for name in os.environ.get("DG_TRUST", "").split(",")} - {""}
    known = {*_trusted, *named, *also}
    for path in _class_paths(values):
        if not isinstance(path, str):
            kind = type(path).__name__
            raise ValueError(f"{source}: a class path must be text, got {kind}: use another file.")
        module = path.rpartition(".")[0]
        is_known = any(f"{module}.".startswith(f"{name}.") for name in known)
        if module and not is_known:
            package = module.partition(".")[0]
            raise ValueError(
                f"{source} names the class {path!r}, whose package is not trusted: if you trust "
                f"its code, set DG_TRUST={package}, or call dg_lightning.trust({package!r}) in "
                "Python."
            )


def check_classes(values: Any) -> None:
    """Reject plain values with class paths that do not name a class.

    The command-line parser would call a function such as `os.system` to see what it returns.
    Functions are allowed only if their return annotation is a class.

    >>> check_classes({"net": {"class_path": "os.system"}})
    Traceback (most recent call last):
    ...
    ValueError: 'os.system' is not a class: write a path as package.module.Class.
    """
    check_size(values, "The config")
    for path in _class_paths(values):
        module, _, name = str(path).rpartition(".")
        found = getattr(importlib.import_module(module), name, None) if module else object
        returned = getattr(found, "__annotations__", {}).get("return")
        if not isinstance(found, type) and not isinstance(returned, type):
            raise ValueError(f"{path!r} is not a class: write a path as package.module.Class.")


def import_class(class_path: str, kind: type[T]) -> type[T]:
    """Import a subclass of `kind` by its dotted path.

    A name without a module is looked up in `dg_lightning` and torch.

    >>> import_class("AdamW", optim.Optimizer).__module__
    'torch.optim.adamw'
    """
    module_name, _, name = class_path.rpartition(".")
    places = [module_name] if module_name else _PLACES_OF_BARE_NAMES
    found = None
    for place in places:
        found = found or getattr(importlib.import_module(place), name, None)
    if not isinstance(found, type):
        raise ValueError(
            f"No class found at {class_path!r}: write its full path, as package.module.Class."
        )
    if not issubclass(found, kind):
        raise ValueError(f"{class_path!r} must be a subclass of {kind.__name__}: use another one.")
    return found


def build(spec: Any, role: str, kind: type[T], *args: Any, **open_arguments: Any) -> T:
    """Build the class that `spec` names, adding arguments that `spec` leaves open.

    An entry of `open_arguments` is passed if the class has a parameter for it and `spec` does not
    set it. Arguments with a class path are built too, and must be modules.

    Args:
        spec: A `ClassConfig`.
        role: Name of the argument that `spec` was passed as, for messages.
        kind: Required base class. No other class is called.
        *args: Positional arguments to put first.
        **open_arguments: Arguments that `spec` may leave open.

    >>> build({"class_path": "torch.nn.Linear", "init_args": {"out_features": 2}}, "net",
    ...       nn.Module, in_features=3, num_classes=5)
    Linear(in_features=3, out_features=2, bias=True)
    """
    if not isinstance(spec, dict) or not isinstance(spec.get("class_path"), str):
        raise TypeError(
            f"`{role}` must be a class path with its arguments, got {type(spec).__name__}: write "
            f"{role}={{'class_path': 'package.Class', 'init_args': {{...}}}}, so that a checkpoint "
            "can build it again."
        )
    cls = import_class(spec["class_path"], kind)
    given = dict(spec.get("init_args") or {})
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := sorted(set(given) - set(parameters))):
        raise ValueError(
            f"{cls.__name__} has no argument {unknown[0]!r}: use {', '.join(parameters)}."
        )
    arguments = {key: value for key, value in open_arguments.items() if key in parameters}
    for key, value in given.items():
        nested = isinstance(value, dict) and "class_path" in value
        arguments[key] = build(value, f"{role}.{key}", nn.Module) if nested else value
    try:
        return cls(*args, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if not cls.__module__.startswith("torch."):
            raise
        raise ValueError(f"`{role}`: {cls.__name__} failed: {error}") from error
