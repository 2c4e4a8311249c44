"""SET: connections that are dropped by weight and grown at random."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dg_lightning.rewiring import Connections, all_finite
from dg_lightning.step_hooks import only_used_hooks

from ._rewiring import Rewiring

__all__ = ["SET"]


@only_used_hooks
class SET(Rewiring):
    """Trains a sparse net, and moves connections of small weight to random places.

    As `RigL`, but without the gradient. What is drawn is the same on all processes.

    (Mocanu, Mocanu, Stone, Nguyen, Gibescu, Liotta: "Scalable training of artificial neural
    networks with adaptive sparse connectivity inspired by network science", arXiv:1707.04780.)

    Args:
        sparsity: The share of weights that are 0, over all layers or by name pattern.
        distribution: How it is shared out over layers: `uniform`, `er` or `erk`.
        layers: Name patterns of linear and convolution layers; all outside of gates when None.
        structure: `unstructured`, `block:16`, `2:4` or `fan_in`, see `RigL`.
        every_n_steps: Optimizer steps from one update to the next.
        drop_fraction: The share of connections that an update drops.
        drop_shape: How that share falls until the last update.
        until: When connections come to rest.
        exclude_just_dropped: Whether what was just dropped may not grow again at once.
        initial: The first connections: drawn at `random`, or of the largest weights.
        masks: A checkpoint to take the first masks from, see `RigL`.
        seed: Of what is drawn; the one of the whole run when None.

    | logged key | meaning |
    |---|---|
    | `rewire/...` | as of `RigL` |

    >>> SET(sparsity=0.9).drop_fraction
    0.3
    """

    @override
    @torch.no_grad()
    def new_masks(
        self, trainer: Any, step: int, due: list[Connections]
    ) -> dict[Connections, Tensor]:
        masks = {}
        for c in due:
            keep = self.keep_scores(c)
            generator = self.generator(c.name, keep.device, step)
            grow = torch.rand(keep.shape, generator=generator, device=keep.device)
            if all_finite([keep]):
                masks[c] = self.rewire(step, c, keep, grow)
        return masks
