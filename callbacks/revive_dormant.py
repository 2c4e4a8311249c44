"""Revive dormant units with fresh weights."""

from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.continual.dormant import WatchedUnits, find_watched
from dg_lightning.gates.protocol import filter_by_name
from dg_lightning.rewiring import generator_for
from dg_lightning.surgery.recording import check_example, first_inputs, offered_example
from dg_lightning.training import log_step

from ._shared import (
    DeferredStateCallback,
    check_step_counting,
    check_whole_weights,
    mean_over_ranks,
    state_key,
)


class Revival(DeferredStateCallback):
    """Base class of `ReviveDormant` and `ContinualBackprop`.

    A revived unit gets fresh incoming weights, zero outgoing weights, and fresh optimizer state.
    Its old mean contribution is added to the bias of the layer that reads the unit. Units between
    linear layers or convolutions are found by running the model. Units that a finished task uses
    are skipped (see `TaskGates`).

    Args:
        threshold: A unit is dormant if its mean output is at most this share of the layer's mean.
        every_n_steps: Optimizer steps between counts of dormant units.
        maturity: Number of forward passes before a unit may be revived.
        decay: Decay of the units' running means.
        layers: Name patterns of the layers that read the units (default: all).
        example: Example inputs for the LightningModule (see `AddGates`).
        seed: Seed for fresh weights (default: the run's seed).
    """

    @checked
    def __init__(
        self,
        threshold: float = 0.025,
        every_n_steps: int = 1000,
        maturity: int = 100,
        decay: float = 0.99,
        layers: list[str] | None = None,
        example: Any = None,
        seed: int | None = None,
    ) -> None:
        if not 0 <= threshold < 1:
            raise ValueError(f"`threshold` must be in [0, 1), got {threshold}.")
        if every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {every_n_steps}.")
        for name, value in (("maturity", maturity), ("seed", seed or 0)):
            if value < 0:
                raise ValueError(f"`{name}` must be at least 0, got {value}.")
        check_example(example)
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be in [0, 1), got {decay}.")
        self.threshold, self.every_n_steps = threshold, every_n_steps
        self.maturity, self.decay = maturity, decay
        self.layers, self.example, self.seed = layers, example, seed
        self.units: dict[str, WatchedUnits] = {}
        self._handles: list[Any] = []

    def is_due(self, name: str, step: int) -> bool:
        """Return True if units in a layer may be revived after this step."""
        return step % self.every_n_steps == 0

    def choose(self, name: str, figures: Tensor, dormant: Tensor, mature: Tensor) -> Tensor:
        """Return a mask of the units to revive."""
        raise NotImplementedError

    @cached_property  # Lightning reads it in every hook of every step
    @override
    def state_key(self) -> str:
        return state_key(self, layers=self.layers)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_whole_weights(self, trainer, pl_module)
        example = self.example
        if example is None and offered_example(pl_module) is None:
            example = first_inputs(getattr(trainer, "datamodule", None), pl_module, "fit")
        found = find_watched(pl_module, example, self.decay)
        self.units = filter_by_name(found, self.layers, "layer with units")
        self._handles = [units.watch() for units in self.units.values()]
        self._pending = dict.fromkeys(self.units, 0.0)  # number of units due, may be fractional
        self._revived = dict.fromkeys(self.units, 0)
        self._shares = dict.fromkeys(self.units, 0.0)
        seed = torch.initial_seed() % 2**32 if self.seed is None else self.seed
        self._seed = trainer.strategy.broadcast(seed)
        self._seen_at = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        check_step_counting(self, trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        step = trainer.global_step
        if step != self._seen_at:
            self._seen_at = step
            self._share_means(trainer)
            for name in self.units:
                self._look_after(trainer, name)
        log_step(pl_module, {f"dormant/share/{n}": share for n, share in self._shares.items()})
        revived = {f"dormant/revived/{n}": float(count) for n, count in self._revived.items()}
        log_step(pl_module, revived)

    def _share_means(self, trainer: Any) -> None:
        """Average the running means over ranks, so that checkpoints do not depend on the rank."""
        if trainer.world_size > 1:
            means = [units.means() for units in self.units.values()]
            shared = mean_over_ranks(trainer, torch.cat(means, dim=1))
            parts = shared.split([mean.shape[1] for mean in means], dim=1)
            for units, part in zip(self.units.values(), parts, strict=True):
                units.set_means(part)

    def _look_after(self, trainer: Any, name: str) -> None:
        units, step = self.units[name], self._seen_at
        if not self.is_due(name, step):
            return
        figures = units.figures()
        dormant = units.is_dormant(figures, self.threshold)
        self._shares[name] = float(dormant.float().mean())
        mature = (figures[2] > self.maturity) & units.is_free()
        chosen = self.choose(name, figures, dormant, mature)
        if count := int(chosen.sum()):
            generator = generator_for(self._seed, name, step, torch.device("cpu"))
            with torch.random.fork_rng():
                torch.manual_seed(generator.initial_seed())
                units.revive(chosen, figures, trainer.optimizers)
            self._revived[name] += count

    @override
    def current_state(self) -> dict[str, Any]:
        return {
            "units": {name: units.state_dict() for name, units in self.units.items()},
            "pending": self._pending,
            "revived": self._revived,
            "seed": self._seed,
            "seen_at": self._seen_at,
        }

    @override
    def restore(self, state: dict[str, Any]) -> None:
        for name, units in self.units.items():
            units.load_state_dict(state["units"][name])
        self._pending, self._revived = dict(state["pending"]), dict(state["revived"])
        self._seed, self._seen_at = state["seed"], state["seen_at"]

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}


class ReviveDormant(Revival):
    """Revives dormant units regularly to keep a net plastic.

    A unit is dormant if its mean output is at most `threshold` times the layer's mean (Sokar et
    al., "The dormant neuron phenomenon in deep reinforcement learning", arXiv:2302.12902). The
    callback takes the same arguments as `Revival`.

    | logged key | meaning |
    |---|---|
    | `dormant/share/<layer>` | share of dormant units |
    | `dormant/revived/<layer>` | number of units revived so far |

    >>> ReviveDormant(threshold=0.1).every_n_steps
    1000
    """

    @override
    def choose(self, name: str, figures: Tensor, dormant: Tensor, mature: Tensor) -> Tensor:
        chosen = dormant & mature
        if count := int(chosen.sum()):
            rank_zero_info(
                f"ReviveDormant revives {count} units in {name} at step {self._seen_at}."
            )
        return chosen


class ContinualBackprop(Revival):
    """Revives the least useful units at a steady rate to keep a net plastic.

    In every step, a share `rate` of the units becomes due. The mature units with the smallest
    product of mean output and outgoing weights are revived (Dohare et al., "Loss of plasticity in
    deep continual learning", Nature 632, 2024). The logged keys are those of `ReviveDormant`.

    Args:
        rate: Share of units to revive in every step.
        maturity: Number of forward passes before a unit may be revived.
        decay: Decay of the units' running means.
        layers: Name patterns of the layers that read the units (default: all).
        example: Example inputs for the LightningModule (see `AddGates`).
        seed: Seed for fresh weights (default: the run's seed).

    >>> ContinualBackprop(rate=1e-3).maturity
    100
    """

    @checked
    def __init__(
        self,
        rate: float = 1e-4,
        maturity: int = 100,
        decay: float = 0.99,
        layers: list[str] | None = None,
        example: Any = None,
        seed: int | None = None,
    ) -> None:
        options: dict[str, Any] = {"decay": decay, "layers": layers, "example": example}
        super().__init__(maturity=maturity, seed=seed, **options)
        if not 0 <= rate <= 1:
            raise ValueError(f"`rate` must be in [0, 1], got {rate}.")
        self.rate = rate

    @override
    def is_due(self, name: str, step: int) -> bool:
        self._pending[name] += self.rate * self.units[name].size
        return super().is_due(name, step) or self._pending[name] >= 1

    @override
    def choose(self, name: str, figures: Tensor, dormant: Tensor, mature: Tensor) -> Tensor:
        utility = self.units[name].utility(figures)
        count = min(int(self._pending[name]), int(mature.sum()))
        self._pending[name] -= int(self._pending[name])
        order = utility.masked_fill(~mature, torch.inf).argsort(stable=True)[:count]
        return torch.zeros_like(mature).index_fill_(0, order, True)
