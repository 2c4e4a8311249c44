"""Weight averaging (EMA, SWA) with live gate settings.

Torch's `AveragedModel` averages buffers too, but an averaged temperature, threshold or floor was
never used in training. Averages therefore share the live values.
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
    """Share the module's gate settings with every `AveragedModel` of the Trainer."""
    live = gate_layers(module, required=False)
    for average in _averages(trainer):
        _share_settings(average, live)


@torch.no_grad()
def copy_gates_to_averages(module: nn.Module, trainer: Any) -> None:
    """Copy the module's frozen gate parameters to its averaged models.

    Logits averaged over earlier steps would open other units.
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
    """Zero a module's missing connections in its averaged models after a mask has changed."""
    copies = _copies(trainer)
    names = {child: name for name, child in module.named_modules()} if copies else {}
    for copy in copies:
        for layer in layers:
            theirs: Any = copy.get_submodule(names[layer.layer])
            set_connections(theirs, layer.mask, layer.count)
            theirs.weight.masked_fill_(~layer.mask.to(theirs.weight.device), 0)


def has_averages(trainer: Any) -> bool:
    """Return True if a callback holds an averaged model."""
    return bool(_copies(trainer))


def _copies(trainer: Any) -> list[nn.Module]:
    """Return the averaged models that callbacks hold, including Lightning's SWA model."""
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
                return  # already shared in this fit
            setattr(gate, setting, getattr(live[name], setting))
            shared.append(getattr(gate, setting))
    update = average.update_parameters

    @torch.no_grad()
    def update_all_but_settings(model: nn.Module) -> None:
        values = [setting.clone() for setting in shared]  # averaging may round them
        update(model)
        for setting, value in zip(shared, values, strict=True):
            setting.copy_(value)

    average.update_parameters = update_all_but_settings  # type: ignore[method-assign]


def check_no_running_state(module: nn.Module, trainer: Any, callback: object) -> None:
    """Reject models with running statistics or averaged weights."""
    name = type(callback).__name__
    if any(getattr(child, "running_mean", None) is not None for child in module.modules()):
        raise ValueError(
            f"{name} cannot protect the running statistics of a batch norm: use a layer norm, or "
            "no norm."
        )
    if has_averages(trainer):
        raise ValueError(
            f"{name} protects weights, but averaged weights (EMA, SWA) keep changing: "
            "remove one of the two callbacks."
        )
