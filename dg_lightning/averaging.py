"""Averages of weights (EMA, SWA) that leave the settings of gates alone.

Torch's `AveragedModel` averages buffers too. A temperature, a threshold or a floor that is averaged
over a schedule belongs to no moment of the training: what is deployed must be the live one.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dg_lightning.protocol import gate_layers
from dg_lightning.rewiring import Connections

__all__ = ["copy_gates_to_averages", "keep_settings_live", "mask_averages"]

_SETTINGS = ("temperature", "threshold", "min_open")


def keep_settings_live(module: nn.Module, trainer: Any) -> None:
    """Let every `AveragedModel` of a Trainer share the settings of the module's gates.

    The average then has the very tensors of the module, whoever swaps, saves or copies it.
    """
    live = gate_layers(module, required=False)
    for average in _averages(trainer):
        _share_settings(average, live)


@torch.no_grad()
def copy_gates_to_averages(module: nn.Module, trainer: Any) -> None:
    """Give every `AveragedModel` the parameters of the module's gates, once those stand still.

    An average of logits from before a landing would have other units open than have landed.
    """
    live = gate_layers(module, required=False)
    for average in _averages(trainer):
        for name, gate in gate_layers(average.module, required=False).items():
            if name in live and isinstance(gate, nn.Module):
                ours: Any = live[name]
                for their, our in zip(gate.parameters(), ours.parameters(), strict=True):
                    their.copy_(our)


@torch.no_grad()
def mask_averages(module: nn.Module, trainer: Any, layers: Iterable[Connections]) -> None:
    """Take the connections that a module has lost out of every average of it.

    Once is enough: as long as a weight is 0 in the module, its average stays 0.
    """
    copies = _copies(trainer)
    names = {child: name for name, child in module.named_modules()} if copies else {}
    for copy in copies:
        for layer in layers:
            theirs: Any = copy.get_submodule(names[layer.layer])
            theirs.connection_mask = layer.mask
            theirs.weight.masked_fill_(~layer.mask.to(theirs.weight.device), 0)


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
