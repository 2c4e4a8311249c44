"""RigL: connections that are dropped by weight and grown by gradient (section 3.7 of the paper)."""

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.rewiring import (
    Connections,
    Distribution,
    OpenRates,
    all_finite,
)
from dg_lightning.rewiring.finite import all_finite_later
from dg_lightning.schedules import Duration
from dg_lightning.step_hooks import only_used_hooks, use_hooks

from ._agreement import mean_over_ranks
from ._masked_layers import Initial
from ._rewiring import DropShape, Rewiring

__all__ = ["RigL"]

_LEAST_RATE = 1e-3  # of samples with both ends of a connection open


@only_used_hooks
class RigL(Rewiring):
    """Trains a sparse net, and moves connections to where the gradient asks for them.

    Every so many optimizer steps, right after the step, each layer drops a share of its
    connections, those of the smallest weights, and grows as many where the gradient of the loss by
    the missing weight is largest. The gradient is the dense one of the whole step: over all
    micro-batches and processes, unscaled. New connections start at 0, with fresh optimizer state.
    What was just dropped may grow again and then keeps its weight, as in the original code. A step
    with a gradient that is not finite changes no connections.

    Masks travel in the checkpoint of this callback; the model's own state holds plain weights with
    zeros, and loads without us.

    (Evci, Gale, Menick, Castro, Elsen: "Rigging the Lottery: Making All Tickets Winners",
    arXiv:1911.11134.)

    Args:
        sparsity: The share of weights that are 0, over all layers or by name pattern.
        distribution: How it is shared out over layers: `uniform`, `er` or `erk`.
        layers: Name patterns of linear and convolution layers; all outside of gates when None.
        structure: `unstructured`; `block:16` for squares of 16 x 16; `2:4` for 2 of every 4 inputs;
            `fan_in` for the same number of inputs for every output.
        every_n_steps: Optimizer steps from one update to the next.
        drop_fraction: The share of connections that the first update drops.
        drop_shape: How that share falls until the last update.
        until: When connections come to rest.
        grow: `gradient` is the one of this step, `mean_gradient` a running mean, which takes as
            much memory as the weights.
        mean_decay: How much of the running mean stays from step to step.
        gate_aware: In a gated net, a closed unit starves the gradient of its connections. `grow`
            divides the gradient by the share of samples that had both ends open; `drop_and_grow`
            also multiplies the weight by it before the smallest are dropped; `no` is the paper's
            rule.
        exclude_just_dropped: Whether what was just dropped may not grow again at once.
        skip_optimizer_step: Whether an update takes the place of the optimizer's step, as in the
            original; counters and schedules go on.
        initial: The first connections: drawn at `random`, or of the largest weights.
        masks: A checkpoint to take the first masks from: of this package, or pruned by
            torch.nn.utils.prune or Lightning's ModelPruning.
        seed: Of what is drawn; the one of the whole run when None.

    | logged key | meaning |
    |---|---|
    | `rewire/density/<layer>` | share of connections that exist |
    | `rewire/churn/<layer>` | share of them that the last update has made |
    | `rewire/itop/<layer>` | share of positions that have ever had one |
    | `rewire/dead_inputs/<layer>`, `rewire/dead_outputs/<layer>` | units without any |

    >>> RigL(sparsity=0.9).every_n_steps
    100
    """

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
        grow: Literal["gradient", "mean_gradient"] = "gradient",
        mean_decay: float = 0.9,
        gate_aware: Literal["no", "grow", "drop_and_grow"] = "no",
        exclude_just_dropped: bool = False,
        skip_optimizer_step: bool = False,
        initial: Initial = "random",
        masks: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            sparsity=sparsity,
            distribution=distribution,
            layers=layers,
            structure=structure,
            initial=initial,
            masks=masks,
            seed=seed,
            every_n_steps=every_n_steps,
            drop_fraction=drop_fraction,
            drop_shape=drop_shape,
            until=until,
            exclude_just_dropped=exclude_just_dropped,
        )
        if grow not in ("gradient", "mean_gradient"):
            raise ValueError(f"`grow` must be gradient or mean_gradient, got {grow!r}.")
        if not 0 <= mean_decay < 1:
            raise ValueError(f"`mean_decay` must be in [0, 1), got {mean_decay}.")
        if gate_aware not in ("no", "grow", "drop_and_grow"):
            raise ValueError(f"`gate_aware` must be no, grow or drop_and_grow, got {gate_aware!r}.")
        self.grow = grow
        self.sees_all_gradients = self.sees_all_gradients or grow == "mean_gradient"
        self.mean_decay = mean_decay
        self.gate_aware = gate_aware
        self.skip_optimizer_step = skip_optimizer_step
        self._means: dict[str, Tensor] = {}
        self._scores: dict[Connections, Tensor] = {}
        self._open: OpenRates | None = None
        if gate_aware == "no":
            use_hooks(self, [], ["on_after_backward"])

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._open = None
        if self.gate_aware != "no":
            self._open = OpenRates(pl_module, {n: c.layer for n, c in self.connections.items()})
            if not self._open.maps:
                raise ValueError(
                    f"`gate_aware={self.gate_aware!r}` finds no gate at the layers that it "
                    "rewires: leave it out, or declare `feeds` of the gates."
                )

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Gradients add up over the micro-batches of a step, and so does what gates have closed.
        # With several optimizers, a backward pass may serve the steps of all of them.
        if self._open is None:
            return
        coming = range(trainer.global_step + 1, trainer.global_step + 1 + len(trainer.optimizers))
        last = min(c.changed_at for c in self.connections.values())
        if any(self.changes_after(step, last) for step in coming):
            self._open.see(trainer.global_step)

    @override
    @torch.no_grad()
    def see_gradients(
        self, trainer: Any, optimizer: Optimizer, mine: list[Connections], due: list[Connections]
    ) -> None:
        if self.grow == "mean_gradient":
            self._follow(trainer, optimizer, mine)
        grows = [c for c in due if c.weight.grad is not None and not c.full]
        mean = self.grow == "mean_gradient"
        scores: list[Any] = [self._means[c.name] if mean else c.weight.grad for c in grows]
        self._scores = dict(zip(grows, torch._foreach_abs(scores) if scores else [], strict=True))
        if due and self.checks_later(trainer):
            self.only_if = torch.ones((), dtype=torch.bool, device=due[0].weight.device)
            # Scores are looked at when their layers are rewired; others have all connections.
            others = [g for c in due if c not in self._scores and (g := c.weight.grad) is not None]
            if others:
                self.only_if.logical_and_(all_finite_later(others))
        if due and self.skip_optimizer_step:
            if self._unscales_itself(trainer, optimizer):
                raise ValueError(
                    "`skip_optimizer_step` needs an optimizer that is not fused, where a scaler "
                    "looks after gradients: write fused=False, or leave it out."
                )
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # which every optimizer passes over

    @staticmethod
    def _unscales_itself(trainer: Any, optimizer: Optimizer) -> bool:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)

    def _follow(self, trainer: Any, optimizer: Optimizer, mine: list[Connections]) -> None:
        """Follow the running mean of unscaled gradients."""
        late = self._unscales_itself(trainer, optimizer)
        for c in mine:
            gradient = c.weight.grad
            if gradient is None:
                continue
            if late:
                gradient = gradient / trainer.precision_plugin.scaler.get_scale()
            mean = self._means.setdefault(c.name, torch.zeros_like(gradient)).to(gradient.device)
            if all_finite([gradient]):
                self._means[c.name] = mean.lerp_(gradient, 1 - self.mean_decay)

    @override
    def checks_later(self, trainer: Any) -> bool:
        # Not where a scaler may leave the step out, where the update takes its place, or where
        # somebody's own rule would be given scores that are not finite.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        kind = type(self)
        ours = kind.rewire is Rewiring.rewire and kind.see_gradients is RigL.see_gradients
        plain = ours and self.grow == "gradient" and not self.skip_optimizer_step and not scaled
        devices = {c.weight.device for c in self.connections.values()}
        return plain and len(devices) == 1 and devices.pop().type == "cuda"

    @override
    @torch.no_grad()
    def new_masks(
        self, trainer: Any, step: int, due: list[Connections]
    ) -> dict[Connections, Tensor]:
        rates: dict[Any, Tensor] = {}
        if self._open is not None:
            seen = self._open.rates()
            rates = self._open.by_layer(None if seen is None else mean_over_ranks(trainer, seen))
        masks = {c: c.mask for c in due if c.full}
        if self.only_if is None and not all_finite(c.weight.detach() for c in self._scores):
            self.leave_out(due)
            self._scores = {}
            return {}
        for c, grow in self._scores.items():
            keep = self.keep_scores(c)
            if c.layer in rates:
                share = rates[c.layer].clamp_min(_LEAST_RATE)
                grow = grow / share
                keep = keep * share if self.gate_aware == "drop_and_grow" else keep
            masks[c] = self.rewire(step, c, keep, grow)
        self._scores = {}
        return masks

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "means": {n: m.cpu().clone() for n, m in self._means.items()},
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._saved is not None:
            self._means = dict(state_dict["means"])

    @override
    def start_anew(self) -> None:
        super().start_anew()
        self._means = {}
