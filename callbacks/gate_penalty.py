"""Penalty on expected gate usage, added to the loss of any LightningModule."""

import math
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from typing_extensions import override

from dg_lightning.compute import LinearMap, linear_maps
from dg_lightning.penalties import (
    expected_macs_usage,
    linear_usage,
    mean_probabilities,
    without_a_price,
)
from dg_lightning.protocol import GateLike, gate_layers, release

__all__ = ["GatePenalty"]


class GatePenalty(pl.Callback):
    """Adds the gradient of ``weight * usage`` to the one of the loss, once for every forward pass.

    It acts in `on_before_backward`, so that the module needs to know nothing of gates; the value of
    the loss stays the module's own. In mixed precision the penalty is scaled as the loss is; with
    automatic optimization and gradient accumulation it is averaged over the micro-batches; with
    several processes the means are taken over all of them.

    A gate remembers its last forward pass only: where a step runs the net several times, the last
    one is penalised.

    Args:
        weight: λ, the weight of the usage term.
        usage: `linear` is the sum over gates of the mean p (the paper's term, which leaves a gate
            on the input out: see `layers`); `expected_macs` the share of the MACs of all linear
            maps of the module that the mean p let expect.
        layers: Name patterns of the gates to press on (``"*hidden.*"``); all when None.

    Raises:
        ValueError: If the module has no gate, a pattern fits none, or `expected_macs` does not know
            which linear map a gate belongs to.

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
        if not 0 <= weight < math.inf:
            raise ValueError(f"`weight` must be at least 0 and finite, got {weight}.")
        if usage not in ("linear", "expected_macs"):
            raise ValueError(f"`usage` must be linear or expected_macs, got {usage!r}.")
        self.weight = weight
        self.usage = usage
        self.layers = layers
        self._gates: dict[str, GateLike] = {}
        self._maps: list[LinearMap] = []
        self._penalised: list[Tensor | None] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._gates = gate_layers(pl_module, self.layers)
        self._maps = linear_maps(pl_module)
        if self.usage == "expected_macs" and (names := without_a_price(self._gates, self._maps)):
            raise ValueError(
                f"`usage='expected_macs'` knows no linear map of {', '.join(names)}: "
                "declare it in `feeds` of the gate, or use `usage='linear'`."
            )

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        forward_pass = [gate.probability for gate in self._gates.values()]
        if self._penalised and all(
            a is b for a, b in zip(forward_pass, self._penalised, strict=True)
        ):
            return  # another loss of a forward pass that has had its penalty
        self._penalised = forward_pass
        usage = self._usage(trainer)
        self._check(usage, loss)
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
        with _unsafe_preserve_version_counter(loss):
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
        release(self._gates.values())
        self._penalised = []

    def _usage(self, trainer: pl.Trainer) -> Tensor:
        """Return the usage term of the last forward pass."""
        means = mean_probabilities(self._gates)
        if self.usage == "linear":  # its gradient does not depend on the other processes
            return linear_usage(means)
        # The value over all processes with the gradient of this one; DDP averages the gradients.
        everywhere = trainer.strategy.reduce(means.detach().clone(), reduce_op="mean")
        assert isinstance(everywhere, Tensor)
        means = means + (everywhere - means.detach())
        return expected_macs_usage(means, list(self._gates.values()), self._maps)

    def _check(self, usage: Tensor, loss: Tensor) -> None:
        trainable = any(
            parameter.requires_grad
            for gate in self._gates.values()
            if isinstance(gate, nn.Module)
            for parameter in gate.parameters()
        )
        if trainable and not usage.requires_grad:
            raise RuntimeError(
                "GatePenalty found no graph behind the gates' last forward pass and could not act: "
                "run passes under no_grad before the one of the loss, and checkpoint activations "
                "with use_reentrant=False."
            )
        if loss.numel() != 1:
            raise ValueError(f"GatePenalty needs a scalar loss, got shape {tuple(loss.shape)}.")
