"""Which layers of a module are made sparse, and the connections that they start with."""

from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from dg_lightning.protocol import matching, plain_name

from .structures import Structure
from .update import largest_mask

__all__ = ["generator_for", "initial_mask", "sparse_layers"]


def sparse_layers(
    module: nn.Module, layers: list[str] | None, without: set[nn.Module]
) -> dict[str, nn.Module]:
    """Find linear and convolution layers by name pattern, each weight once.

    Without patterns, frozen ones are left out.

    Raises:
        ValueError: If there is none, a pattern fits none, or a weight is not a plain parameter.
    """
    found: dict[str, nn.Module] = {}
    weights: list[Any] = []
    for name, child in module.named_modules():
        kind = isinstance(child, nn.Linear | nn.modules.conv._ConvNd)
        if not kind or child in without:
            continue
        weight: Any = child.weight
        frozen = layers is None and not weight.requires_grad
        if not frozen and not any(weight is other for other in weights):
            weights.append(weight)
            found[plain_name(name)] = child
    if not found:
        raise ValueError(
            f"There is no layer to make sparse in {type(module).__name__}: nn.Linear or nn.Conv* "
            "are looked for, outside of gates and not frozen."
        )
    chosen = matching(found, layers, "layer")
    for name, child in chosen.items():
        if child._parameters.get("weight") is None:
            raise ValueError(
                f"The weight of {name} is not a plain parameter: make a pruning permanent with "
                "torch.nn.utils.prune.remove (and take its masks along with masks_of_pruned), "
                "remove the parametrization, or leave the layer out with `layers`."
            )
    return chosen


def generator_for(seed: int | None, name: str, step: int, device: torch.device) -> torch.Generator:
    """Return a generator that is the same on every process, for one layer at one step."""
    generator = torch.Generator(device)
    generator.manual_seed(crc32(f"{seed} {name} {step}".encode()))
    return generator


def initial_mask(
    weight: Tensor, density: float, structure: Structure, generator: torch.Generator | None
) -> Tensor:
    """Draw connections at random with a generator, or take those of the largest weights."""
    if generator is None:
        return largest_mask(weight.detach().abs(), density, structure)
    scores = torch.rand(weight.shape, generator=generator, device=weight.device)
    return largest_mask(scores, density, structure)
