"""Weight averaging (EMA, SWA) that leaves the settings of gates alone.

Torch's `AveragedModel` averages buffers too, but an averaged temperature, threshold or floor
belongs to no step of the training run: averages must use the live values.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dg_lightning.gates import gate_layers, set_connections
from dg_lightning.rewiring import SparseLayer

_SETTINGS = ("temperature", "threshold", "min_open")


def keep_settings_live(module: nn.Module, trainer: Any) -> None:
    """Make every `AveragedModel` of a Trainer share the gate settings (tensors) of the module."""
    live = gate_layers(module, required=False)
    for average in _averages(trainer):
        _share_settings(average, live)


@torch.no_grad()
def copy_gates_to_averages(module: nn.Module, trainer: Any) -> None:
    """Copy the parameters of the module's frozen gates to every average of it.

    An average of logits from before the landing would open other units.
    """
    live = gate_layers(module, required=False)
    for copy in _copies(trainer):
        for name, gate in gate_layers(copy, required=False).items():
            if name in live and isinstance(gate, nn.Module):
                ours: Any = live[name]
                for their, our in zip(gate.parameters(), ours.parameters(), strict=True):
                    their.copy_(our)


@torch.no_grad()
def mask_averages(module: nn.Module, trainer: Any, layers: Iterable[SparseLayer]) -> None:
    """Zero the missing connections of a module in every average of it, after a mask has changed."""
    copies = _copies(trainer)
    names = {child: name for name, child in module.named_modules()} if copies else {}
    for copy in copies:
        for layer in layers:
            theirs: Any = copy.get_submodule(names[layer.layer])
            set_connections(theirs, layer.mask, layer.count)
            theirs.weight.masked_fill_(~layer.mask.to(theirs.weight.device), 0)


def has_averages(trainer: Any) -> bool:
    """Return True if a callback holds an average of the model."""
    return bool(_copies(trainer))


def _copies(trainer: Any) -> list[nn.Module]:
    """Find the averages that callbacks hold: `AveragedModel`s, and the one of Lightning's SWA."""
    swa = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
    averages = [average.module for average in _averages(trainer)]
    modules = [v for v in swa if isinstance(v, nn.Module)]
    return averages + [module for module in modules if not isinstance(module, AveragedModel)]


def _averages(trainer: Any) -> list[AveragedModel]:
    held = [vars(callback).values() for callback in trainer.callbacks]
    return [value for values in held for value in values if isinstance(value, AveragedModel)]


def _share_settings(average: AveragedModel, live: dict[str, Any]) -> None:
    shared: list[Tensor] = []
    for name, gate in gate_layers(average.module, required=False).items():
        if name not in live:
            continue
        for setting in _SETTINGS:
            if getattr(gate, setting) is getattr(live[name], setting):
                return  # done before, in this fit
            setattr(gate, setting, getattr(live[name], setting))
            shared.append(getattr(gate, setting))
    update = average.update_parameters

    @torch.no_grad()
    def update_all_but_settings(model: nn.Module) -> None:
        values = [setting.clone() for setting in shared]  # averaged with itself, it may be rounded
        update(model)
        for setting, value in zip(shared, values, strict=True):
            setting.copy_(value)

    average.update_parameters = update_all_but_settings  # type: ignore[method-assign]


def check_no_running_state(module: nn.Module, trainer: Any, callback: object) -> None:
    """Raise ValueError if a model holds what changes whatever is protected."""
    name = type(callback).__name__
    if any(getattr(child, "running_mean", None) is not None for child in module.modules()):
        raise ValueError(
            f"{name} cannot protect running statistics, as of a batch norm, which every task "
            "changes: use a layer norm, or none."
        )
    if has_averages(trainer):
        raise ValueError(
            f"{name} keeps weights as they are, and an average of weights (EMA, SWA) moves on: "
            "leave one of them out."
        )
