"""Initial masks: choose sparse layers and their densities, and import existing masks."""

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
    """Distribute a total density over layers according to their weight shapes.

    `uniform` gives all layers the same density. `er` uses densities proportional to
    ``(in + out) / (in * out)``, so that small layers stay dense. `erk` includes the kernel sizes of
    a convolution in the sum and the product. A layer that would exceed a density of 1 becomes
    dense, and the others are rescaled to keep the total.

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
    """Validate sparsity settings and their combination."""
    for value in sparsity.values() if isinstance(sparsity, Mapping) else [sparsity]:
        if not 0 <= value < 1:
            raise ValueError(f"`sparsity` must be in [0, 1), got {value}.")
    if isinstance(sparsity, Mapping) and layers is not None:
        raise ValueError(
            "`layers` needs a single `sparsity`, got a dict: name the layers in its keys."
        )
    if distribution not in ("uniform", "er", "erk"):
        raise ValueError(f"`distribution` must be uniform, er or erk, got {distribution!r}.")


def layer_densities(
    layers: Mapping[str, Any], sparsity: float | Mapping[str, float], distribution: Distribution
) -> dict[str, float]:
    """Return the density of each layer, from a total sparsity or one per name pattern."""
    if isinstance(sparsity, Mapping):
        values = values_by_pattern("sparsity", sparsity, layers, 0.0)
        return {name: 1 - value for name, value in zip(layers, values, strict=True)}
    shapes = {name: tuple(layer.weight.shape) for name, layer in layers.items()}
    return densities(shapes, 1 - sparsity, distribution)


def _raw(shape: Sequence[int], distribution: Distribution) -> float:
    axes = shape if distribution == "erk" else shape[:2]
    return sum(axes) / math.prod(axes)


STATE = "connections"  # key under which a callback's state stores its layers


def masks_of_pruned(module: nn.Module) -> dict[str, Tensor]:
    """Return the masks that torch.nn.utils.prune has applied to weights, by layer.

    Call this before `prune.remove`, which makes the zeros permanent and deletes the masks.

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
    """Read a model pruned by torch.nn.utils.prune or Lightning's ModelPruning.

    Returns plain weights, which load strictly into the unpruned module, and a mask for each layer.
    Pass the masks to `StaticSparse`, `RigL` or another sparse callback with `set_initial_masks`.

    Args:
        checkpoint: A checkpoint's path or content, or a state dict.
        zeros: Whether to derive missing masks from zeros in the weight matrices. Permanent pruning
            leaves zeros but no masks.

    Raises:
        ValueError: If the checkpoint has no masks, or cannot be read.
    """
    content: Any = _loaded(checkpoint)
    state: Mapping[str, Tensor] = content.get("state_dict", content)
    weights: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for key, value in state.items():
        layer, _, kind = key.rpartition(".")
        if kind.endswith("_orig"):  # biases may be pruned too
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
            "The checkpoint contains no masks. If pruning was made permanent, use `zeros=True` to "
            "derive the masks from zeros."
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
    """Set masks on a module's layers, so that the compute ledger can read them."""
    for name, child in module.named_modules():
        mask = masks.get(plain_name(name))
        if mask is None:
            continue
        announced = connection_mask(child)
        if announced is not None and announced.shape == mask.shape:
            announced.copy_(mask)  # in place, because a callback may hold it
        else:
            weight: Any = child.weight
            announced = mask.to(weight.device)
        set_connections(child, announced)


def forget_masks(module: nn.Module) -> bool:
    """Remove the masks of all layers. Return True if there were any."""
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
            f"Cannot read masks from {str(checkpoint)!r}: pass a checkpoint that contains only "
            "tensors and plain values."
        ) from error


MaskInit: TypeAlias = Literal["random", "magnitude"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


def sparse_layers(
    module: nn.Module, layers: list[str] | None, without: set[nn.Module]
) -> dict[str, nn.Module]:
    """Return the linear and convolution layers that match the name patterns.

    Layers that share a weight are returned once. Without patterns, frozen layers are skipped.
    Layers in `without` are always skipped.

    Raises:
        ValueError: If no layer remains, a pattern matches nothing, or a weight is not a plain
            parameter.
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if not isinstance(child, _LAYERS) or child in without:
            continue
        if layers is not None or child.weight.requires_grad:
            found[plain_name(name)] = child
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no layer to make sparse: it needs an nn.Linear or "
            "nn.Conv* that is trainable and not part of a gate."
        )
    chosen: dict[str, nn.Module] = {}
    for name, child in filter_by_name(found, layers, "layer").items():
        if not any(child.weight is other.weight for other in chosen.values()):
            chosen[name] = child
    for name, child in chosen.items():
        if "weight" not in dict(child.named_parameters(recurse=False)):
            raise ValueError(
                f"The weight of {name} is not a plain parameter: make pruning permanent with "
                "torch.nn.utils.prune.remove (save its masks with masks_of_pruned first), remove "
                "the parametrization, or exclude the layer with `layers`."
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
    """Return a random mask, or a mask of the largest weights if there is no generator."""
    if generator is None:
        return largest_mask(weight.detach().abs(), density, structure)
    scores = torch.rand(weight.shape, generator=generator, device=weight.device)
    return largest_mask(scores, density, structure)


def masks_of(state: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the masks in a sparse callback's saved state.

    Raises:
        RuntimeError: If the masks belong to other layers.
    """
    masks = saved_masks({"callbacks": {"": state}})
    if set(masks) != set(layers):
        raise RuntimeError(
            f"The checkpoint has masks for {', '.join(masks)}, but this run's sparse layers "
            f"are {', '.join(layers)}: use the same layers."
        )
    return masks


def given_masks(
    layers: Mapping[str, Any], masks: Mapping[str, Tensor] | None, path: str | None, name: str
) -> Mapping[str, Tensor]:
    """Return masks from the first available source.

    The sources are `masks`, the checkpoint at `path`, and the masks already set on the layers.

    Raises:
        FileNotFoundError: If there is no checkpoint at `path`.
    """
    if masks is not None:
        return masks
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"`masks` must be the path to a checkpoint file, but none exists at {path}: "
                "correct the path, or omit it."
            )
        return saved_masks(path) or import_pruned(path)[1]
    found = {n: m for n, layer in layers.items() if (m := connection_mask(layer)) is not None}
    if found:
        rank_zero_info(f"{name} continues with the model's current masks.")
    return found


def check_masks(
    masks: Mapping[str, Tensor], layers: Mapping[str, Any], structure: Structure
) -> dict[str, Tensor]:
    """Check the given masks, and return those for the layers.

    Raises:
        ValueError: If a mask is missing or does not fit its layer or the structure.
    """
    if not masks:
        return {}
    for name, layer in layers.items():
        if name not in masks or masks[name].shape != layer.weight.shape:
            had = f"of shape {tuple(masks[name].shape)}" if name in masks else "missing"
            raise ValueError(
                f"The mask of {name} must have shape {tuple(layer.weight.shape)}, but it is {had}. "
                f"Masks were given for {', '.join(masks)}: choose these layers, or pass all masks."
            )
        if not structure.has(masks[name]):
            raise ValueError(
                f"The mask of {name} must have `structure={structure.kind!r}`, but does not: pass "
                "another mask, or omit the structure."
            )
    return {name: masks[name] for name in layers}


def sample_masks(
    layers: Mapping[str, Any],
    densities: Mapping[str, float],
    structure: Structure,
    seed: int | None,
) -> dict[str, Tensor]:
    """Return random initial masks, or masks of the largest weights if there is no seed."""
    masks = {}
    for name, layer in layers.items():
        weight: nn.Parameter = layer.weight
        zeros = float((weight == 0).float().mean())
        if zeros > max((1 - densities[name]) / 2, 0.01):
            rank_zero_warn(
                f"{zeros:.0%} of the weights of {name} are already 0, but no mask was given. If "
                "the model is sparse, pass its masks with `masks` or `set_initial_masks`."
            )
        generator = None if seed is None else generator_for(seed, name, 0, weight.device)
        masks[name] = initial_mask(weight, densities[name], structure, generator)
    return masks
