"""Masks from elsewhere: torch.nn.utils.prune, Lightning's ModelPruning, our own checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.gates.protocol import connection_mask, plain_name, set_connections

from .sparse_layer import unpack_mask

__all__ = ["announce_masks", "forget_masks", "import_pruned", "masks_of_pruned", "saved_masks"]

STATE = "connections"  # where a callback's state has its layers


def masks_of_pruned(module: nn.Module) -> dict[str, Tensor]:
    """Return the masks of the weights that torch.nn.utils.prune has pruned, by layer.

    Take them before `prune.remove`, which makes the zeros permanent and forgets the mask.

    >>> from torch.nn.utils import prune
    >>> net = nn.Sequential(nn.Linear(4, 2))
    >>> masks_of_pruned(net)
    {}
    >>> _ = prune.l1_unstructured(net[0], "weight", amount=0.5)
    >>> masks_of_pruned(net)["0"].sum().item()
    4
    """
    return {
        plain_name(name): mask != 0
        for name, child in module.named_modules()
        if (mask := dict(child.named_buffers(recurse=False)).get("weight_mask")) is not None
    }


def import_pruned(
    checkpoint: str | Path | Mapping[str, Any], zeros: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read a model that torch.nn.utils.prune or Lightning's ModelPruning has pruned.

    Returns plain weights, which load strictly into the unpruned module, and the masks by layer.
    Hand the masks to `StaticSparse`, `RigL` or another sparse callback with `use_masks`.

    Args:
        checkpoint: A checkpoint's path or content, or a state dict.
        zeros: Whether a weight matrix with zeros and without a mask is taken as pruned where it is
            0: all that is left of a pruning that was made permanent.

    Raises:
        ValueError: If there is no mask in it.
    """
    content: Any = _loaded(checkpoint)
    state: Mapping[str, Tensor] = content.get("state_dict", content)
    weights: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for key, value in state.items():
        layer, _, kind = key.rpartition(".")
        if kind.endswith("_orig"):  # biases can be pruned too
            plain = kind.removesuffix("_orig")
            mask = state[f"{layer}.{plain}_mask"]
            weights[f"{layer}.{plain}"] = value * mask
            if plain == "weight":
                masks[plain_name(layer)] = mask != 0
        elif not kind.endswith("_mask") or f"{key.removesuffix('_mask')}_orig" not in state:
            weights[key] = value
            if zeros and kind == "weight" and value.ndim > 1 and bool((value == 0).any()):
                masks[plain_name(layer)] = value != 0
    if not masks:
        raise ValueError(
            "There is no mask in the checkpoint: a pruning that was made permanent leaves zeros "
            "only, which `zeros=True` takes for the mask."
        )
    return weights, masks


def saved_masks(checkpoint: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the masks of sparse callbacks in a checkpoint, by layer."""
    content = _loaded(checkpoint)
    masks: dict[str, Tensor] = {}
    for state in (content.get("callbacks") or {}).values():
        for name, layer in (state.get(STATE) or {}).items() if isinstance(state, dict) else ():
            masks[name] = unpack_mask(layer["mask"], layer["shape"])
    return masks


def announce_masks(module: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Announce the masks of a module's layers, for the compute ledger."""
    for name, child in module.named_modules():
        mask = masks.get(plain_name(name))
        if mask is None:
            continue
        announced = connection_mask(child)
        if announced is not None and announced.shape == mask.shape:
            announced.copy_(mask)  # a callback may hold it
        else:
            weight: Any = child.weight
            announced = mask.to(weight.device)
        set_connections(child, announced)


def forget_masks(module: nn.Module) -> bool:
    """Remove the announced masks of all layers; return True if there were any."""
    sparse = [child for child in module.modules() if connection_mask(child) is not None]
    for child in sparse:
        set_connections(child, None)
    return bool(sparse)


def _loaded(checkpoint: str | Path | Mapping[str, Any]) -> Any:
    if not isinstance(checkpoint, str | Path):
        return checkpoint
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (RuntimeError, ValueError, EOFError, LookupError, OSError, UnpicklingError) as error:
        raise ValueError(
            f"{str(checkpoint)!r} holds no masks that can be read: give a checkpoint of tensors "
            "and plain values."
        ) from error
