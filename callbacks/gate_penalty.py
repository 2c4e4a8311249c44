"""Penalty on expected gate usage, added to the loss of any LightningModule."""

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from typing_extensions import override

from dg_lightning.compute import linear_maps
from dg_lightning.penalties import expected_macs_usage, linear_usage, mean_probabilities
from dg_lightning.protocol import gate_layers, release

__all__ = ["GatePenalty"]


class GatePenalty(pl.Callback):
    """Adds the gradient of ``weight * usage`` to the one of the loss, for every backward pass.

    It acts in `on_before_backward`, so that the module needs to know nothing of gates; the value of
    the loss stays the module's own. The means are over the global batch: with gradient accumulation
    the usage is averaged over micro-batches, in mixed precision it is scaled as the loss is, and
    with several processes the means are taken over all of them.

    Args:
        weight: λ, the weight of the usage term.
        usage: `linear` is the sum over gates of the mean p (the paper's term); `expected_macs` the
            share of the dense MACs that the mean p let expect.
        layers: Name patterns of the gates to press on (``"hidden.*"``); all when None.

    Raises:
        ValueError: If the module has no gate, or a pattern fits none.

    | logged key | meaning |
    |---|---|
    | `gates/penalty` | the usage term, before the weight |
    | `gates/penalty_weight` | λ |

    >>> GatePenalty(weight=0.1, usage="expected_macs").weight
    0.1
    """

    def __init__(
        self,
        weight: float,
        usage: Literal["linear", "expected_macs"] = "linear",
        layers: list[str] | None = None,
    ) -> None:
        if not weight >= 0:
            raise ValueError(f"`weight` must be at least 0, got {weight}.")
        if usage not in ("linear", "expected_macs"):
            raise ValueError(f"`usage` must be linear or expected_macs, got {usage!r}.")
        self.weight = weight
        self.usage = usage
        self.layers = layers

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            gate_layers(pl_module, self.layers)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        usage = self.usage_of(trainer, pl_module)
        pl_module.log("gates/penalty", usage.detach())
        pl_module.log("gates/penalty_weight", self.weight)
        penalty = self.weight * usage
        if pl_module.automatic_optimization:
            penalty = penalty / trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            penalty = scaler.scale(penalty)
        # Only the gradient is added: the value, which the last operation of the loss may need for
        # its own backward pass, stays as it is, and so does its version.
        with _unsafe_preserve_version_counter((loss,)):
            loss.add_(penalty - penalty.detach())

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        release(pl_module)

    def usage_of(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Tensor:
        """Return the usage term of the last forward pass."""
        gates = gate_layers(pl_module, self.layers)
        local = mean_probabilities(gates)
        # The value over all processes with the gradient of this one; DDP averages the gradients.
        everywhere = trainer.strategy.reduce(local.detach().clone(), reduce_op="mean")
        assert isinstance(everywhere, torch.Tensor)
        means = local + (everywhere - local.detach())
        if self.usage == "linear":
            return linear_usage(means)
        return expected_macs_usage(means, list(gates.values()), linear_maps(pl_module))
