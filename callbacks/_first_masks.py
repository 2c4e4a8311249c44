"""Where the connections of a training come from."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from dg_lightning.rewiring import Structure, initial_mask

__all__ = ["checked", "drawn"]


def checked(
    masks: Mapping[str, Tensor], layers: Mapping[str, Any], structure: Structure
) -> dict[str, Tensor]:
    """Return the masks of layers among given ones; raise if one is missing or does not fit."""
    for name, layer in layers.items():
        if name not in masks or masks[name].shape != layer.weight.shape:
            had = f"of shape {tuple(masks[name].shape)}" if name in masks else "missing"
            raise ValueError(
                f"The mask of {name} must have shape {tuple(layer.weight.shape)}, it is {had}; "
                f"there are masks of {', '.join(masks)}: name these layers, or give all masks."
            )
        if not structure.has(masks[name]):
            raise ValueError(
                f"The mask of {name} does not keep to `structure={structure.kind!r}`: give one "
                "that does, or leave the structure out."
            )
    return {name: masks[name] for name in layers}


def drawn(
    layers: Mapping[str, Any],
    densities: Mapping[str, float],
    structure: Structure,
    generator: Callable[[str, torch.device], torch.Generator] | None,
) -> dict[str, Tensor]:
    """Make masks, at random with generators or of the largest weights."""
    masks = {}
    for name, layer in layers.items():
        weight: nn.Parameter = layer.weight
        zeros = float((weight == 0).float().mean())
        if zeros > max((1 - densities[name]) / 2, 0.01):
            rank_zero_warn(
                f"{zeros:.0%} of the weights of {name} are 0 already, and there is no mask of "
                "them: if the model was sparse, take its masks along (`masks`, `use_masks`)."
            )
        draws = None if generator is None else generator(name, weight.device)
        masks[name] = initial_mask(weight, densities[name], structure, draws)
    return masks
