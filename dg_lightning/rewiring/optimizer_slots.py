"""What an optimizer keeps for each weight, and how it starts anew for some of them."""

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .zeroing import keep_only

__all__ = ["WEIGHT_BY_WEIGHT", "fresh_slots", "parameter_slots", "reset_slots"]

# Those that leave a weight of 0 alone whose gradient and slots are 0; a subclass may not.
WEIGHT_BY_WEIGHT = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
# Of these it is known that all slots are 0 then.
START_AT_ZERO = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.SGD,
    }
)


def parameter_slots(optimizer: Optimizer, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """Give the slots of a parameter that have its shape: one value for each weight."""
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            yield name, value


@torch.no_grad()
def reset_slots(optimizer: Optimizer, parameter: nn.Parameter, but: Tensor) -> None:
    """Bring every slot to what it is for a weight that starts at 0, but those of some weights.

    `but` marks the weights whose slots stay.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> reset_slots(optimizer, weight, but=torch.tensor([False, True]))
    >>> optimizer.state[weight]["momentum_buffer"].tolist()
    [0.0, 1.0]
    """
    fresh = fresh_slots(optimizer, parameter)
    keep_only((slot, but) for slot, start in fresh if not start)
    for slot, start in fresh:
        if start:
            slot.masked_fill_(~but, start)


def fresh_slots(optimizer: Optimizer, parameter: nn.Parameter) -> list[tuple[Tensor, float]]:
    """Return the slots of a parameter, each with what it is for a weight that starts at 0."""
    slots = dict(parameter_slots(optimizer, parameter))
    if not slots or type(optimizer) in START_AT_ZERO:
        return [(slot, 0.0) for slot in slots.values()]
    starts = _starts(optimizer, parameter)
    return [(slot, starts.get(name, 0.0)) for name, slot in slots.items()]


def _starts(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, float]:
    """Return the slots of a weight of 0 after a step with a gradient of 0.

    Asked of the optimizer itself, because not all of them are 0: Adagrad starts with
    `initial_accumulator_value`, Rprop with a step size.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    kind: Any = type(optimizer)
    accepted = _arguments_of(kind)
    settings = {k: _plain(group[k]) for k in optimizer.defaults if k in accepted and k in group}
    # The device of the weight would only be waited for; but who knows where others can run.
    device = torch.device("cpu") if kind in WEIGHT_BY_WEIGHT else parameter.device
    arguments = kind, tuple(settings.items()), parameter.dtype, device
    try:
        hash(arguments)
    except TypeError:
        return _tried.__wrapped__(*arguments)
    return _tried(*arguments)


@lru_cache(maxsize=16)  # slow to find out, and asked for each layer of every update
def _arguments_of(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind).parameters)


def _plain(value: Any) -> Any:
    """Return a setting as it can be compared: a learning rate may be a tensor, which changes."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.clone()
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=16)  # the layers of a net have the same settings, and often keep them
def _tried(
    kind: Any, settings: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    plain = {"foreach": False, "fused": False, "capturable": False} if device.type == "cpu" else {}
    weight = nn.Parameter(torch.zeros(1, 1, dtype=dtype, device=device))
    weight.grad = torch.zeros_like(weight)
    try:
        trial = kind([weight], **{key: plain.get(key, value) for key, value in settings})
        with torch.enable_grad():
            trial.step()
    except TypeError:
        return {}  # it needs more than its defaults, or a closure; slots almost always start at 0
    return {name: float(value.flatten()[0]) for name, value in parameter_slots(trial, weight)}
