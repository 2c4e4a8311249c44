"""How many connections each layer gets: uniform, Erdős-Rényi, Erdős-Rényi kernel."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from dg_lightning.gates.protocol import by_pattern

__all__ = ["Distribution", "check_sparsity", "densities", "layer_densities"]

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
        values = by_pattern("sparsity", sparsity, layers, 0.0)
        return {name: 1 - value for name, value in zip(layers, values, strict=True)}
    shapes = {name: tuple(layer.weight.shape) for name, layer in layers.items()}
    return densities(shapes, 1 - sparsity, distribution)


def _raw(shape: Sequence[int], distribution: Distribution) -> float:
    axes = shape if distribution == "erk" else shape[:2]
    return sum(axes) / math.prod(axes)
