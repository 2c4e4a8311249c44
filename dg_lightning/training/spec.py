"""Classes as plain values: a class path with its arguments, as YAML and checkpoints hold it.

A class path is looked up, checked to be a class of the kind that is wanted, and only then called.
What a checkpoint names must also come from a trusted package: importing a module runs its code.
"""

import importlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Required, TypeAlias, TypedDict, TypeVar

from torch import nn, optim

T = TypeVar("T")
_MAX_VALUES, _MAX_DEPTH = 100_000, 100  # of plain values
_PLACES_OF_BARE_NAMES = ["dg_lightning", "torch.optim", "torch.optim.lr_scheduler"]
_trusted = {"dg_lightning", "torch.nn", "torch.optim"}


class ClassConfig(TypedDict, total=False):
    """A class to be built later: `class_path` and the arguments that are known now."""

    class_path: Required[str]
    init_args: dict[str, Any]


class NetBuilder(Protocol):
    """A net whose sizes are still open; it takes those that it has a parameter for."""

    def __call__(self, *, input_shape: Any, in_features: int, num_classes: int) -> nn.Module:
        """Build it."""


class OptimizerFactory(Protocol):
    """An optimizer whose parameters are still open."""

    def __call__(self, params: Any) -> optim.Optimizer:
        """Build it."""


class SchedulerFactory(Protocol):
    """A learning-rate scheduler whose optimizer is still open."""

    def __call__(self, optimizer: optim.Optimizer) -> optim.lr_scheduler.LRScheduler:
        """Build it."""


# For the program these are class specs. The command line reads the annotations too, and shall check
# the arguments of the class that is named: from a factory it learns which ones are still open,
# while a `ClassConfig` would let a misspelt one pass.
if TYPE_CHECKING:
    NetConfig: TypeAlias = ClassConfig | nn.Module
    OptimizerConfig: TypeAlias = ClassConfig
    SchedulerConfig: TypeAlias = ClassConfig
else:
    NetConfig, OptimizerConfig, SchedulerConfig = NetBuilder, OptimizerFactory, SchedulerFactory


def as_config(value: Any) -> Any:
    """Return a class config in place of a factory that LightningCLI has made of one."""
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
    """Let checkpoints name classes of these packages, or of these modules of a package.

    Our own nets and `torch.nn`, `torch.optim` are trusted from the start. The environment variable
    DG_TRUST, names joined by commas, does the same for a command.

    >>> trust("my_models")
    """
    _trusted.update(packages)


def check_size(values: Any, source: object) -> None:
    """Raise ValueError for plain values that hold themselves, or very many values.

    Lists can share their items, so that a small file asks for more than a computer can hold.

    Args:
        values: Dicts and lists, as a checkpoint or a config holds them.
        source: Where they come from, to be named in the message.

    >>> nested = [1]
    >>> nested.append(nested)
    >>> check_size(nested, "a.ckpt")
    Traceback (most recent call last):
    ...
    ValueError: a.ckpt holds values that are nested too deeply or too many: give another file.
    """
    known: dict[int, tuple[int, int]] = {}  # values in a container, with repetitions; its height

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
                        f"{source} holds values that are nested too deeply or too many: give "
                        "another file."
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
    """Return the modules of all classes that plain values name.

    >>> modules_named({"net": {"class_path": "my_models.Net"}, "gates": [1, {"class_path": "X"}]})
    {'my_models'}
    """
    paths = [path for path in _class_paths(values) if isinstance(path, str)]
    return {path.rpartition(".")[0] for path in paths} - {""}


def check_trusted(values: Any, source: object, also: Iterable[str] = ()) -> None:
    """Refuse plain values that name a class outside of the trusted packages; import nothing.

    Args:
        values: Dicts and lists, as a checkpoint or a config holds them.
        source: Where they come from, to be named in the message.
        also: Further packages or modules that are trusted this time.

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
            raise ValueError(f"{source}: a class path must be text, got {kind}: give another file.")
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
    """Refuse plain values whose class paths name anything but a class.

    The parser of the command line would call a function, such as `os.system`, to see what it
    returns. One that says by its annotation that it returns an object of a class may be named.

    >>> check_classes({"net": {"class_path": "os.system"}})
    Traceback (most recent call last):
    ...
    ValueError: 'os.system' must be a class, and is not: give a path as package.module.Class.
    """
    check_size(values, "The config")
    for path in _class_paths(values):
        module, _, name = str(path).rpartition(".")
        found = getattr(importlib.import_module(module), name, None) if module else object
        returned = getattr(found, "__annotations__", {}).get("return")
        if not isinstance(found, type) and not isinstance(returned, type):
            raise ValueError(
                f"{path!r} must be a class, and is not: give a path as package.module.Class."
            )


def import_class(class_path: str, kind: type[T]) -> type[T]:
    """Return the class of a dotted path, which must be a subclass of `kind`.

    A bare name is looked for in `dg_lightning` and torch.

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
            f"There is no class {class_path!r}; give its full path, as package.module.Class."
        )
    if not issubclass(found, kind):
        raise ValueError(f"{class_path!r} must be a subclass of {kind.__name__}, and is not.")
    return found


def build(spec: Any, role: str, kind: type[T], *args: Any, **open_arguments: Any) -> T:
    """Build the class that `spec` names from its own arguments and those that were left open.

    Of `open_arguments` it gets the ones that it has a parameter for and does not set itself. An
    argument that is itself a class path is built too, and must be an `nn.Module`.

    Args:
        spec: A `ClassConfig`.
        role: What it is for, to be named in messages.
        kind: What it must be a subclass of; nothing else is called.
        *args: Positional arguments to put first.
        **open_arguments: Arguments that the class may have left open.

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
            f"{cls.__name__} has no argument {unknown[0]!r}; it has {', '.join(parameters)}."
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
        raise ValueError(f"`{role}`: {cls.__name__} says: {error}") from error
