"""Classes as plain values: a class path with its arguments, as YAML and checkpoints hold it."""

import importlib
import inspect
from typing import TYPE_CHECKING, Any, Protocol, Required, TypeAlias, TypedDict

from torch import nn, optim

__all__ = ["ClassSpec", "NetSpec", "OptimizerSpec", "SchedulerSpec", "build", "import_class"]


_PLACES_OF_BARE_NAMES = ["dg_lightning", "torch.optim", "torch.optim.lr_scheduler"]


class ClassSpec(TypedDict, total=False):
    """A class to be built later: `class_path` and the arguments that are known now."""

    class_path: Required[str]
    init_args: dict[str, Any]


class NetFactory(Protocol):
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
# while a `ClassSpec` would let a misspelt one pass.
if TYPE_CHECKING:
    NetSpec: TypeAlias = ClassSpec
    OptimizerSpec: TypeAlias = ClassSpec
    SchedulerSpec: TypeAlias = ClassSpec
else:
    NetSpec, OptimizerSpec, SchedulerSpec = NetFactory, OptimizerFactory, SchedulerFactory


def import_class(class_path: str) -> type[Any]:
    """Return the class of a dotted path; a bare name is looked for in `dg_lightning` and torch.

    >>> import_class("AdamW").__module__
    'torch.optim.adamw'
    """
    module_name, _, name = class_path.rpartition(".")
    places = [module_name] if module_name else _PLACES_OF_BARE_NAMES
    for place in places:
        found = getattr(importlib.import_module(place), name, None)
        if isinstance(found, type):
            return found
    raise ValueError(
        f"There is no class {class_path!r}; give its full path, as package.module.Class."
    )


def build(spec: Any, role: str, *args: Any, **open_arguments: Any) -> Any:
    """Build the class that `spec` names from its own arguments and those that were left open.

    Of `open_arguments` it gets the ones that it has a parameter for and does not set itself. An
    argument that is itself a class path is built too.

    Args:
        spec: A `ClassSpec`.
        role: What it is for, to be named in messages.
        *args: Positional arguments to put first.
        **open_arguments: Arguments that the class may have left open.

    >>> build({"class_path": "torch.nn.Linear", "init_args": {"out_features": 2}}, "net",
    ...       in_features=3, num_classes=5)
    Linear(in_features=3, out_features=2, bias=True)
    """
    if not isinstance(spec, dict) or not isinstance(spec.get("class_path"), str):
        raise TypeError(
            f"`{role}` must be a class path with its arguments, got {type(spec).__name__}: write "
            f"{role}={{'class_path': 'package.Class', 'init_args': {{...}}}}, so that a checkpoint "
            "can build it again."
        )
    cls = import_class(spec["class_path"])
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
        arguments[key] = build(value, f"{role}.{key}") if nested else value
    try:
        return cls(*args, **arguments)
    except (TypeError, ValueError) as error:
        if not cls.__module__.startswith("torch."):
            raise
        raise ValueError(f"`{role}`: {cls.__name__} says: {error}") from error
