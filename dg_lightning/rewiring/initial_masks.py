"""Which layers of a module are made sparse, and the connections that they start with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zlib import crc32

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from dg_lightning.gates.protocol import connection_mask, matching, plain_name

from .drop_and_grow import largest_mask
from .imports import import_pruned, saved_masks
from .structures import TRANSPOSED, Structure

__all__ = [
    "Initial",
    "check_masks",
    "generator_for",
    "given_masks",
    "initial_mask",
    "masks_of",
    "sample_masks",
    "sparse_layers",
]


Initial: TypeAlias = Literal["random", "magnitude"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


def sparse_layers(
    module: nn.Module, layers: list[str] | None, without: set[nn.Module]
) -> dict[str, nn.Module]:
    """Return linear and convolution layers by name pattern, each weight once.

    Without patterns, frozen layers are left out.

    Raises:
        ValueError: If there is none, a pattern fits none, or a weight is not a plain parameter.
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if not isinstance(child, _LAYERS) or child in without:
            continue
        if layers is not None or child.weight.requires_grad:
            found[plain_name(name)] = child
    if not found:
        raise ValueError(
            f"There is no layer to make sparse in {type(module).__name__}: nn.Linear or nn.Conv* "
            "are looked for, outside of gates and not frozen."
        )
    chosen: dict[str, nn.Module] = {}
    for name, child in matching(found, layers, "layer").items():
        if not any(child.weight is other.weight for other in chosen.values()):
            chosen[name] = child
    for name, child in chosen.items():
        if "weight" not in dict(child.named_parameters(recurse=False)):
            raise ValueError(
                f"The weight of {name} is not a plain parameter: make a pruning permanent with "
                "torch.nn.utils.prune.remove (and take its masks along with masks_of_pruned), "
                "remove the parametrization, or leave the layer out with `layers`."
            )
    return chosen


def generator_for(seed: int | None, name: str, step: int, device: torch.device) -> torch.Generator:
    """Return the random generator for a layer and step, identical on all ranks."""
    generator = torch.Generator(device)
    generator.manual_seed(crc32(f"{seed} {name} {step}".encode()))
    return generator


def initial_mask(
    weight: Tensor, density: float, structure: Structure, generator: torch.Generator | None
) -> Tensor:
    """Return a random mask, or without a generator that of the largest weights."""
    if generator is None:
        return largest_mask(weight.detach().abs(), density, structure)
    scores = torch.rand(weight.shape, generator=generator, device=weight.device)
    return largest_mask(scores, density, structure)


def masks_of(state: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the masks in the saved state of a sparse callback, which must be of these layers."""
    masks = saved_masks({"callbacks": {"": state}})
    if set(masks) != set(layers):
        raise RuntimeError(
            f"The checkpoint has masks of {', '.join(masks)}, this run makes "
            f"{', '.join(layers)} sparse: give the same layers."
        )
    return masks


def given_masks(
    layers: Mapping[str, Any], masks: Mapping[str, Tensor] | None, path: str | None, name: str
) -> Mapping[str, Tensor]:
    """Return the given masks, else those of the checkpoint at a path, else those of the layers."""
    if masks is not None:
        return masks
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"`masks` must be a checkpoint file, there is none at {path}: give the "
                "path of one, or leave it out."
            )
        return saved_masks(path) or import_pruned(path)[1]
    found = {n: m for n, layer in layers.items() if (m := connection_mask(layer)) is not None}
    if found:
        rank_zero_info(f"{name} goes on with the masks of the model.")
    return found


def check_masks(
    masks: Mapping[str, Tensor], layers: Mapping[str, Any], structure: Structure
) -> dict[str, Tensor]:
    """Return the masks of layers among given ones; raise if one is missing or does not fit."""
    if not masks:
        return {}
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


def sample_masks(
    layers: Mapping[str, Any],
    densities: Mapping[str, float],
    structure: Structure,
    seed: int | None,
) -> dict[str, Tensor]:
    """Make the first masks of layers: random ones with a seed, else of the largest weights."""
    masks = {}
    for name, layer in layers.items():
        weight: nn.Parameter = layer.weight
        zeros = float((weight == 0).float().mean())
        if zeros > max((1 - densities[name]) / 2, 0.01):
            rank_zero_warn(
                f"{zeros:.0%} of the weights of {name} are 0 already, and there is no mask of "
                "them: if the model was sparse, take its masks along (`masks`, `use_masks`)."
            )
        generator = None if seed is None else generator_for(seed, name, 0, weight.device)
        masks[name] = initial_mask(weight, densities[name], structure, generator)
    return masks
