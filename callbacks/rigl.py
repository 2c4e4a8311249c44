"""RigL: drop connections by weight, grow them by gradient (section 3.7 of the paper)."""

from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.rewiring import (
    Distribution,
    DropShape,
    MaskInit,
    OpenRates,
    SparseLayer,
)
from dg_lightning.schedules import Duration
from dg_lightning.training.optimizers import has_fused_unscale

from ._shared import mean_over_ranks
from .sparse import NewMasks, Rewiring

_MIN_RATE = 1e-3  # lower bound on the share of samples that open both ends of a connection


class RigL(Rewiring):
    """Trains a sparse net and moves connections to where the gradient is largest.

    Every `every_n_steps` optimizer steps, right after the step, each layer drops the connections
    with the smallest weights. It grows as many new ones where the missing weights have the largest
    gradients. These gradients are dense and unscaled, and cover all micro-batches and ranks of the
    step. New connections start at 0, with fresh optimizer state. A connection that was just dropped
    may grow again and then keeps its weight, as in the original code. A step with a non-finite
    gradient changes no connections.

    Masks are part of this callback's state. The model's own state contains plain weights with
    zeros, so it loads without this package. Missing weights are exactly 0 after every optimizer
    step. A frozen copy of the net within the module, such as a mean teacher, is not masked. Where
    connections were dropped, the weights of the copy fade but are not exactly 0.

    (Evci, Gale, Menick, Castro, Elsen: "Rigging the Lottery: Making All Tickets Winners",
    arXiv:1911.11134.)

    Args:
        sparsity: Share of weights that are 0, for all layers together or by name pattern.
        distribution: How sparsity is distributed over layers: `uniform`, `er` or `erk`.
        layers: Name patterns of linear and convolution layers (default: all outside gates).
        structure: `unstructured`, `block:16` (squares of 16 x 16 weights), `2:4` (2 of every 4
            inputs) or `fan_in` (the same number of inputs for every output).
        every_n_steps: Optimizer steps between updates.
        drop_fraction: Share of connections to drop in the first update.
        drop_shape: How this share decreases until the last update.
        until: When updates end.
        grow: `gradient` uses the gradient of the current step. `mean_gradient` uses a running mean,
            which takes as much memory as the weights.
        mean_decay: Decay of the running mean.
        gate_aware: Whether to correct for closed units, whose connections get little gradient. `no`
            is the paper's rule. `grow` divides the gradient by the share of samples that open both
            ends of the connection. `drop_and_grow` also multiplies the weight by that share before
            the smallest are dropped.
        exclude_just_dropped: Whether dropped connections cannot grow again in the same update.
        skip_optimizer_step: Whether an update replaces the optimizer's step, as in the original
            code. Counters and schedules still advance.
        initial: The initial connections: `random`, or those with the largest weights (`magnitude`).
        masks: A checkpoint that provides the initial masks, either saved by this package or pruned
            with torch.nn.utils.prune or Lightning's ModelPruning.
        seed: Seed for the random masks (default: the run's seed).

    | logged key | meaning |
    |---|---|
    | `rewiring/density/<layer>` | share of connections that exist |
    | `rewiring/churn/<layer>` | share of connections that the last update grew |
    | `rewiring/explored/<layer>` | share of positions that have ever had a connection |
    | `rewiring/dead_inputs/<layer>`, `rewiring/dead_outputs/<layer>` | units without connections |

    >>> RigL(sparsity=0.9).schedule.every_n_steps
    100
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
        until: Duration = "75%",
        grow: Literal["gradient", "mean_gradient"] = "gradient",
        mean_decay: float = 0.9,
        gate_aware: Literal["no", "grow", "drop_and_grow"] = "no",
        exclude_just_dropped: bool = False,
        skip_optimizer_step: bool = False,
        initial: MaskInit = "random",
        masks: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            sparsity, distribution, layers, structure, every_n_steps, drop_fraction, drop_shape,
            until, exclude_just_dropped, initial, masks, seed,
        )  # fmt: skip
        if not 0 <= mean_decay < 1:
            raise ValueError(f"`mean_decay` must be in [0, 1), got {mean_decay}.")
        self.grow = grow
        self.sees_all_gradients = self.sees_all_gradients or grow == "mean_gradient"
        self.mean_decay = mean_decay
        self.gate_aware = gate_aware
        self.skip_optimizer_step = skip_optimizer_step
        self._means: dict[str, Tensor] = {}
        self._gradients: dict[SparseLayer, Tensor] = {}  # gradient magnitudes of layers that change
        self._open: OpenRates | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._open = None
        if self.gate_aware != "no":
            self._open = OpenRates(pl_module, [x.layer for x in self.connections.values()])
            if not self._open.gates:
                raise ValueError(
                    f"`gate_aware={self.gate_aware!r}` found no gate on the layers to rewire: "
                    "leave it out, or declare the `feeds` of the gates."
                )

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Like gradients, open rates cover all micro-batches of a step. With several optimizers, one
        # backward pass may serve all their steps.
        if self._open is None:
            return
        coming = range(trainer.global_step + 1, trainer.global_step + 1 + len(trainer.optimizers))
        last = min(layer.changed_at for layer in self.connections.values())
        if any(self.changes_after(step, last) for step in coming):
            self._open.add(trainer.global_step)

    @override
    @torch.no_grad()
    def see_gradients(
        self, trainer: Any, optimizer: Optimizer, layers: list[SparseLayer], due: list[SparseLayer]
    ) -> None:
        if self.grow == "mean_gradient":
            self._update_means(trainer, optimizer, layers)
        self._gradients = {}
        for layer in due:
            gradient = layer.weight.grad
            if gradient is not None:
                mean = self.grow == "mean_gradient"
                self._gradients[layer] = (self._means[layer.name] if mean else gradient).abs()
        if due and self.skip_optimizer_step:
            if has_fused_unscale(trainer, optimizer):
                raise ValueError(
                    "With a gradient scaler, `skip_optimizer_step` needs an optimizer that is not "
                    "fused: set fused=False, or leave `skip_optimizer_step` out."
                )
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # optimizers skip parameters without a gradient

    def _update_means(self, trainer: Any, optimizer: Optimizer, layers: list[SparseLayer]) -> None:
        """Update the running mean of unscaled gradients."""
        late = has_fused_unscale(trainer, optimizer)
        for layer in layers:
            gradient = layer.weight.grad
            if gradient is None:
                continue
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if late:
                gradient = gradient / trainer.precision_plugin.scaler.get_scale()
            known = self._means.get(layer.name)
            mean = torch.zeros_like(gradient) if known is None else known.to(gradient)
            new = mean.lerp(gradient, 1 - self.mean_decay)
            # Keep the old mean if the gradient is not finite, without waiting for the device.
            self._means[layer.name] = mean.copy_(torch.where(gradient.isfinite().all(), new, mean))

    @override
    @torch.no_grad()
    def new_masks(self, trainer: Any, step: int, due: list[SparseLayer]) -> NewMasks:
        shares: dict[Any, Tensor] = {}
        if self._open is not None:
            shares = self._open.shares(partial(mean_over_ranks, trainer))
        masks, scores = {}, []
        for layer, grow in self._gradients.items():
            keep = layer.weight.detach().abs()
            if layer.layer in shares:
                share = shares[layer.layer].clamp_min(_MIN_RATE)
                grow = grow / share
                keep = keep * share if self.gate_aware == "drop_and_grow" else keep
            scores += [keep, grow]
            masks[layer] = self.rewire(step, layer, keep, grow)
        self._gradients = {}
        return masks, scores

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "means": {n: m.cpu().clone() for n, m in self._means.items()},
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._loaded_state is not None:
            self._means = dict(state_dict["means"])

    @override
    def reset(self) -> None:
        super().reset()
        self._means = {}
