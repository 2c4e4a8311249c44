"""Train with connections that never change."""

from dg_lightning.rewiring import Distribution
from dg_lightning.step_hooks import only_used_hooks

from ._masked_layers import Initial
from ._sparse import Sparse

__all__ = ["StaticSparse"]


@only_used_hooks
class StaticSparse(Sparse):
    """Trains a sparse net whose connections are drawn once: what rewiring must beat.

    Also the way to go on training a net that was pruned elsewhere, see `masks`.

    Args:
        sparsity: The share of weights that are 0, over all layers or by name pattern.
        distribution: How it is shared out over layers: `uniform`, `er` or `erk`.
        layers: Name patterns of linear and convolution layers; all outside of gates when None.
        structure: `unstructured`, `block:16`, `2:4` or `fan_in`, see `RigL`.
        initial: The connections: drawn at `random`, or of the largest weights.
        masks: A checkpoint to take the masks from, see `RigL`.
        seed: Of what is drawn; the one of the whole run when None.

    | logged key | meaning |
    |---|---|
    | `rewire/...` | as of `RigL` |

    >>> StaticSparse(sparsity={"fc1": 0.8}).sparsity
    {'fc1': 0.8}
    """

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
