"""Prune small weights, in one shot or gradually, and keep them at 0."""

from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.rewiring import (
    SparseLayer,
    change_connections,
    largest,
    largest_mask,
    layer_densities,
)
from dg_lightning.schedules import Clock, Duration, check_duration
from dg_lightning.training import mask_averages

from ._shared import check_equal_masks
from .sparse import NewMasks, SparseCallback


class MagnitudePruning(SparseCallback):
    """Prunes the smallest weights and keeps them at 0.

    By default, it prunes in one shot, either before training (`begin: 0`) or later
    (`begin: 15 epochs`), and the remaining steps fine-tune the net. If `until` is later than
    `begin`, it prunes gradually: sparsity follows a cubic schedule (Zhu, Gupta: "To prune, or not
    to prune", arXiv:1710.01878).

    Args:
        sparsity: Final share of weights that are 0, for all layers together or by name pattern.
        scope: `global` ranks the weights of all layers together. `layer` prunes each layer to the
            given sparsity.
        begin: When pruning begins.
        until: When the final sparsity is reached (default: at `begin`, in one shot).
        every_n_steps: Optimizer steps between updates when pruning gradually.
        layers: Name patterns of linear and convolution layers (default: all outside gates).
        structure: `unstructured`. With `scope: layer`, also `block:16`, `2:4` or `fan_in` (see
            `RigL`).
        masks: A checkpoint that provides the initial masks (see `RigL`).

    Logs the same keys as `RigL`.

    >>> MagnitudePruning(sparsity=0.4, begin="15 epochs").scope
    'global'
    """

    @checked
    def __init__(
        self,
        sparsity: float | dict[str, float] = 0.5,
        scope: Literal["global", "layer"] = "global",
        begin: Duration = 0,
        until: Duration | None = None,
        every_n_steps: int = 100,
        layers: list[str] | None = None,
        structure: str = "unstructured",
        masks: str | None = None,
    ) -> None:
        super().__init__(sparsity, "uniform", layers, structure, "magnitude", masks, None)
        if scope == "global" and (isinstance(sparsity, dict) or structure != "unstructured"):
            raise ValueError(
                "`scope: global` needs one `sparsity` for all layers and no `structure`: use "
                "`scope: layer` instead."
            )
        if self.structure.density is not None and until is not None:
            raise ValueError(
                f"`structure={structure!r}` cannot be pruned gradually: leave `until` out."
            )
        if every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {every_n_steps}.")
        check_duration("begin", begin)
        if until is not None:
            check_duration("until", until)
        self.scope = scope
        self.begin = begin
        self.until = until
        self.every_n_steps = every_n_steps

    retry_skipped = True

    @override
    def made_masks(self) -> dict[str, Tensor]:
        return {n: torch.ones_like(x.weight, dtype=torch.bool) for n, x in self._layers.items()}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._until == 0 and trainer.global_step == 0:  # before the first step
            masks, scores = self.new_masks(trainer, 0, list(self.connections.values()))
            change_connections(masks, None, scores)
            mask_averages(pl_module, trainer, self.connections.values())
            check_equal_masks(trainer, self.connections.values())

    @override
    def prepare(self, clock: Clock) -> str | None:
        self._begin = clock.steps(self.begin, "begin")
        self._until = self._begin if self.until is None else clock.steps(self.until, "until")
        if self._until < self._begin:
            raise ValueError(
                f"`until` must not be before `begin`, got {self.until!r} (step {self._until}) and "
                f"{self.begin!r} (step {self._begin})."
            )
        if clock.total_steps is None or self._until < clock.total_steps:
            return None
        return (
            f"MagnitudePruning ends at step {self._until} of {clock.total_steps} and leaves "
            "no steps for fine-tuning: begin earlier, or train longer."
        )

    @override
    def changes_after(self, step: int, last: int) -> bool:
        if step < self._begin or last >= self._until:
            return False
        if step >= self._until or last < self._begin:
            return True
        return step - last >= self.every_n_steps

    def progress(self, step: int) -> float:
        """Return the share of the final sparsity reached at a step."""
        if step >= self._until:
            return 1.0
        return 1 - (1 - (step - self._begin) / (self._until - self._begin)) ** 3

    @override
    @torch.no_grad()
    def new_masks(self, trainer: Any, step: int, due: list[SparseLayer]) -> NewMasks:
        # Pruned weights stay pruned.
        scores = {x.name: x.weight.detach().abs().masked_fill(~x.mask, -1) for x in due}
        masks = self._pruned(scores, self.progress(step))
        return {x: masks[x.name] & x.mask for x in due}, list(scores.values())

    def _pruned(self, scores: Mapping[str, Tensor], progress: float) -> dict[str, Tensor]:
        if self.scope == "layer":
            wanted = layer_densities(self._layers, self.sparsity, self.distribution)
            return {
                name: largest_mask(score, 1 - progress * (1 - wanted[name]), self.structure)
                for name, score in scores.items()
            }
        assert isinstance(self.sparsity, float | int)
        together = torch.cat([score.flatten() for score in scores.values()])
        count = len(together) - round(progress * self.sparsity * len(together))
        sizes = [score.numel() for score in scores.values()]
        parts = largest(together, count).split(sizes)
        if empty := [n for n, part in zip(scores, parts, strict=True) if not bool(part.any())]:
            rank_zero_warn(
                f"MagnitudePruning has left no connection in {', '.join(empty)}, where weights are "
                "smaller than in other layers: use `scope: layer`, or lower `sparsity`."
            )
        return {n: part.reshape(scores[n].shape) for n, part in zip(scores, parts, strict=True)}
