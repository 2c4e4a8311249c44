"""Train with connections that never change."""

from dg_lightning.arguments import checked
from dg_lightning.rewiring import Distribution, Initial

from ._sparse import Sparse

__all__ = ["StaticSparse"]


class StaticSparse(Sparse):
    """Trains a sparse net with fixed random connections: the baseline of rewiring.

    Also continues the training of a net that was pruned elsewhere, see `masks`.

    Args:
        sparsity: The share of weights that are 0, over all layers or by name pattern.
        distribution: How it is distributed over layers: `uniform`, `er` or `erk`.
        layers: Name patterns of linear and convolution layers; None for all outside of gates.
        structure: `unstructured`, `block:16`, `2:4` or `fan_in`, see `RigL`.
        initial: The connections: `random`, or those of the largest weights (`magnitude`).
        masks: A checkpoint to take the masks from, see `RigL`.
        seed: Seed of the random masks; None for the seed of the run.

    Logs the same keys as `RigL`.

    >>> StaticSparse(sparsity={"fc1": 0.8}).sparsity
    {'fc1': 0.8}
    """

    @checked
    def __init__(
        self,
        sparsity: float | dict[str, float] = 0.9,
        distribution: Distribution = "erk",
        layers: list[str] | None = None,
        structure: str = "unstructured",
        initial: Initial = "random",
        masks: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(sparsity, distribution, layers, structure, initial, masks, seed)
