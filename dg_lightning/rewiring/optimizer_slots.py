"""What an optimizer keeps for each weight, and how it starts anew for some of them."""

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .zeroing import keep_only

__all__ = ["WEIGHT_BY_WEIGHT", "parameter_slots", "reset_slots"]

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
    slots = dict(parameter_slots(optimizer, parameter))
    if not slots:
        return
    fresh = _fresh_slots(optimizer, parameter)
    keep_only((slot, but) for name, slot in slots.items() if not fresh.get(name))
    for name, slot in slots.items():
        if fresh.get(name):
            slot.masked_fill_(~but, fresh[name])


def _fresh_slots(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, float]:
    """Return the slots of a weight of 0 after a step with a gradient of 0.

    Asked of the optimizer itself, because not all of them are 0: Adagrad starts with
    `initial_accumulator_value`, Rprop with a step size.
    """
    accepted = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    settings = {key: value for key, value in group.items() if key != "params"}
    device = parameter.device
    if type(optimizer) in WEIGHT_BY_WEIGHT:  # a GPU would only be waited for
        device = torch.device("cpu")
        plain = dict.fromkeys({"foreach", "fused", "capturable"} & set(options), False)
        options, settings = options | plain, settings | plain
        settings = {k: float(v) if isinstance(v, Tensor) else v for k, v in settings.items()}
    weight = nn.Parameter(torch.zeros(1, 1, dtype=parameter.dtype, device=device))
    weight.grad = torch.zeros_like(weight)
    try:
        trial = type(optimizer)([weight], **options)
        trial.param_groups[0] |= settings
        with torch.enable_grad():
            trial.step()
    except TypeError:
        return {}  # it needs more than its defaults, or a closure; slots almost always start at 0
    return {name: float(value.flatten()[0]) for name, value in parameter_slots(trial, weight)}
