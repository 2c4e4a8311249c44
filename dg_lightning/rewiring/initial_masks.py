"""Initial masks: which layers become sparse, how dense each is, and masks of other packages."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, TypeAlias
from zlib import crc32

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from dg_lightning.gates.protocol import (
    connection_mask,
    filter_by_name,
    plain_name,
    set_connections,
    values_by_pattern,
)

from .drop_and_grow import TRANSPOSED, Structure, largest_mask
from .sparse_layer import unpack_mask

Distribution: TypeAlias = Literal["uniform", "er", "erk"]


def densities(
    shapes: Mapping[str, Sequence[int]], density: float, distribution: Distribution = "erk"
) -> dict[str, float]:
    """Share a total density out over layers, by the shapes of their weights.

    `uniform` gives all the same. `er` gives a layer a density in proportion to
    ``(in + out) / (in * out)``, so that small layers stay dense; `erk` has the sizes of a
    convolution's kernel in the sum and the product too. A layer that would need a density above 1
    is made dense, and the others are solved again, so that the total is what was asked for.

    (Evci, Gale, Menick, Castro, Elsen: "Rigging the Lottery: Making All Tickets Winners",
    arXiv:1911.11134.)

    >>> found = densities({"a": (300, 784), "b": (100, 300), "c": (10, 100)}, 0.1)
    >>> {name: round(value, 4) for name, value in found.items()}
    {'a': 0.0796, 'b': 0.2302, 'c': 1.0}
    """
    if not 0 < density <= 1:
        raise ValueError(f"`density` must be in (0, 1], got {density}.")
    if distribution not in ("uniform", "er", "erk"):
        raise ValueError(f"`distribution` must be uniform, er or erk, got {distribution!r}.")
    if distribution == "uniform":
        return dict.fromkeys(shapes, density)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: _raw(shape, distribution) for name, shape in shapes.items()}
    dense: set[str] = set()
    while len(dense) < len(shapes):
        left = density * sum(sizes.values()) - sum(sizes[name] for name in dense)
        free = [name for name in shapes if name not in dense]
        scale = left / sum(raw[name] * sizes[name] for name in free)
        full = max(free, key=lambda name: raw[name])
        if scale * raw[full] <= 1:
            return {name: 1.0 if name in dense else scale * raw[name] for name in shapes}
        dense |= {name for name in free if raw[name] == raw[full]}
    return dict.fromkeys(shapes, 1.0)


def check_sparsity(
    sparsity: float | Mapping[str, float], distribution: Distribution, layers: Sequence[str] | None
) -> None:
    """Refuse values that make no sense, or not together."""
    for value in sparsity.values() if isinstance(sparsity, Mapping) else [sparsity]:
        if not 0 <= value < 1:
            raise ValueError(f"`sparsity` must be in [0, 1), got {value}.")
    if isinstance(sparsity, Mapping) and layers is not None:
        raise ValueError("`sparsity` by layer names the layers: leave `layers` out.")
    if distribution not in ("uniform", "er", "erk"):
        raise ValueError(f"`distribution` must be uniform, er or erk, got {distribution!r}.")


def layer_densities(
    layers: Mapping[str, Any], sparsity: float | Mapping[str, float], distribution: Distribution
) -> dict[str, float]:
    """Return the density of each layer, for one sparsity of all or for one by name pattern."""
    if isinstance(sparsity, Mapping):
        values = values_by_pattern("sparsity", sparsity, layers, 0.0)
        return {name: 1 - value for name, value in zip(layers, values, strict=True)}
    shapes = {name: tuple(layer.weight.shape) for name, layer in layers.items()}
    return densities(shapes, 1 - sparsity, distribution)


def _raw(shape: Sequence[int], distribution: Distribution) -> float:
    axes = shape if distribution == "erk" else shape[:2]
    return sum(axes) / math.prod(axes)


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
    Hand the masks to `StaticSparse`, `RigL` or another sparse callback with `set_initial_masks`.

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


MaskInit: TypeAlias = Literal["random", "magnitude"]

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
    for name, child in filter_by_name(found, layers, "layer").items():
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
                f"{zeros:.0%} of the weights of {name} are already 0, but no mask was given: if "
                "the model was sparse, pass its masks with `masks` or `set_initial_masks`."
            )
        generator = None if seed is None else generator_for(seed, name, 0, weight.device)
        masks[name] = initial_mask(weight, densities[name], structure, generator)
    return masks
