"""What several processes must agree on."""

from typing import Any

from torch import Tensor

__all__ = ["mean_over_ranks"]


def mean_over_ranks(trainer: Any, value: Tensor) -> Tensor:
    """Return the mean of a value over all processes, so that all of them decide the same."""
    if trainer.world_size == 1:
        return value
    mean: Tensor = trainer.strategy.reduce(value.clone(), reduce_op="mean")
    return mean
