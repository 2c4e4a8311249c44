"""SET: drop connections by weight, grow them at random."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.rewiring import (
    Distribution,
    DropSchedule,
    DropShape,
    Initial,
    SparseLayer,
    generator_for,
)
from dg_lightning.schedules import Duration

from ._sparse import NewMasks, Sparse

__all__ = ["SET"]


class SET(Sparse):
    """Trains a sparse net, and moves connections of small weight to random places.

    Like `RigL`, but without the gradient. Random places are identical on all ranks.

    (Mocanu, Mocanu, Stone, Nguyen, Gibescu, Liotta: "Scalable training of artificial neural
    networks with adaptive sparse connectivity inspired by network science", arXiv:1707.04780.)

    Args:
        sparsity: The share of weights that are 0, over all layers or by name pattern.
        distribution: How it is distributed over layers: `uniform`, `er` or `erk`.
        layers: Name patterns of linear and convolution layers; None for all outside of gates.
        structure: `unstructured`, `block:16`, `2:4` or `fan_in`, see `RigL`.
        every_n_steps: Optimizer steps between updates.
        drop_fraction: The share of connections that an update drops.
        drop_shape: How that share falls until the last update.
        until: When updates end.
        exclude_just_dropped: Whether connections that were just dropped may not grow again.
        initial: The first connections: `random`, or those of the largest weights (`magnitude`).
        masks: A checkpoint to take the first masks from, see `RigL`.
        seed: Seed of the random places; None for the seed of the run.

    Logs the same keys as `RigL`.

    >>> SET(sparsity=0.9).schedule.drop_fraction
    0.3
    """

    @checked
    def __init__(
        self,
        sparsity: float | dict[str, float] = 0.9,
        distribution: Distribution = "erk",
        layers: list[str] | None = None,
        structure: str = "unstructured",
        every_n_steps: int = 100,
        drop_fraction: float = 0.3,
        drop_shape: DropShape = "cosine",
        until: Duration = 0.75,
        exclude_just_dropped: bool = False,
        initial: Initial = "random",
        masks: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(sparsity, distribution, layers, structure, initial, masks, seed)
        self.schedule: DropSchedule = DropSchedule(every_n_steps, drop_fraction, drop_shape, until)
        self.exclude_just_dropped = exclude_just_dropped

    @override
    @torch.no_grad()
    def new_masks(self, trainer: Any, step: int, due: list[SparseLayer]) -> NewMasks:
        masks, scores = {}, []
        for layer in due:
            keep = layer.weight.detach().abs()
            generator = generator_for(self._seed, layer.name, step, keep.device)
            grow = torch.rand(keep.shape, generator=generator, device=keep.device)
            scores.append(keep)
            masks[layer] = self.rewire(step, layer, keep, grow)
        return masks, scores

    def rewire(self, step: int, layer: SparseLayer, keep: Tensor, grow: Tensor) -> Tensor:
        """Return the new mask of a layer, from the scores for keeping and for growing."""
        fraction = self.schedule.fraction(step)
        return layer.rewired(keep, grow, fraction, self.exclude_just_dropped)
