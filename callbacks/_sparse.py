"""What the sparse callbacks share: masks that hold in every step, change, travel and agree."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.averaging import mask_averages
from dg_lightning.compute import inside_gates
from dg_lightning.protocol import by_pattern, connection_mask
from dg_lightning.rewiring import (
    Connections,
    Distribution,
    Structure,
    announce_masks,
    densities,
    generator_for,
    import_pruned,
    initial_mask,
    saved_masks,
    sparse_layers,
)
from dg_lightning.schedules import Clock

from ._agreement import refuse_different_masks, refuse_sharded_parameters
from ._pressure import logs_now

__all__ = ["Initial", "Sparse", "all_finite"]

Initial = Literal["random", "magnitude"]


def all_finite(values: Iterable[Tensor]) -> bool:
    """Tell whether every entry of all tensors is a number; waits for the device once."""
    finite = [torch.isfinite(value).all() for value in values]
    return not finite or bool(torch.stack(finite).all())


class Sparse(pl.Callback):
    """Keeps the weights of missing connections, and what the optimizer knows of them, at 0.

    Gradients are masked before the optimizer's step, which then leaves missing connections at 0.
    An optimizer that does not work weight by weight is found out, and cleaned up after. A subclass
    says when connections change (`changes_after`) and how (`new_masks`).
    """

    def __init__(
        self,
        sparsity: float | dict[str, float],
        distribution: Distribution,
        layers: list[str] | None,
        structure: str,
        initial: Initial,
        masks: str | None,
        seed: int | None,
    ) -> None:
        for value in sparsity.values() if isinstance(sparsity, dict) else [sparsity]:
            if not 0 <= value < 1:
                raise ValueError(f"`sparsity` must be in [0, 1), got {value}.")
        if isinstance(sparsity, dict) and layers is not None:
            raise ValueError("`sparsity` by layer names the layers: leave `layers` out.")
        if distribution not in ("uniform", "er", "erk"):
            raise ValueError(f"`distribution` must be uniform, er or erk, got {distribution!r}.")
        if initial not in ("random", "magnitude"):
            raise ValueError(f"`initial` must be random or magnitude, got {initial!r}.")
        self.sparsity = sparsity
        self.distribution: Distribution = distribution
        self.layers = layers
        self.structure = Structure(structure)
        self.initial: Initial = initial
        self.masks = masks
        self.seed = seed
        self.connections: dict[str, Connections] = {}
        self._seed: int | None = None
        self.changed_at = 0
        self._fits = False
        self._given: dict[str, Tensor] | None = None
        self._saved: dict[str, Any] | None = None
        self._handles: list[Any] = []

    @cached_property  # Lightning asks for it at every hook
    @override
    def state_key(self) -> str:
        named = list(self.sparsity) if isinstance(self.sparsity, dict) else self.layers
        return self._generate_state_key(layers=named)

    # What a subclass says.

    def changes_after(self, step: int) -> bool:
        """Tell whether connections change after this optimizer step, counted from 1."""
        return False

    def new_masks(
        self, trainer: Any, step: int, mine: list[Connections]
    ) -> dict[Connections, Tensor]:
        """Return the new masks of layers, after the optimizer's step."""
        return {}

    def see_gradients(self, trainer: Any, optimizer: Optimizer, mine: list[Connections]) -> None:
        """Look at the dense gradients of layers, before they are masked."""

    def prepare(self, clock: Clock) -> str | None:
        """Resolve durations, when training starts; return what is to be warned of."""
        return None

    # Where masks come from.

    def use_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Start the next training from these connections, bool, by layer."""
        self._given = dict(masks)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._fits = stage == "fit"
        if not self._fits:
            return
        refuse_sharded_parameters(type(self).__name__, trainer, pl_module)
        self._layers = self._find_layers(pl_module)
        for name, layer in self._layers.items():
            self.structure.refuse_if_unfit(name, layer.weight)
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if other is not self and isinstance(other, Sparse):
                shared = set(self._layers) & set(other._find_layers(pl_module))
                if shared:
                    raise ValueError(
                        f"{type(self).__name__} and {type(other).__name__} both make "
                        f"{min(shared)} sparse: part them by `layers`."
                    )

    def _find_layers(self, module: nn.Module) -> dict[str, Any]:
        named = list(self.sparsity) if isinstance(self.sparsity, dict) else self.layers
        return sparse_layers(module, named, inside_gates(module))

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._fits:
            announce_masks(pl_module, saved_masks(checkpoint))
        elif self.state_key not in checkpoint["callbacks"]:
            raise RuntimeError(
                f"The checkpoint has no masks of {self.state_key}: it was trained without it. "
                "Start a new training from its weights, or resume without the callback."
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._seed is None:  # a resumed run goes on with its own
            seed = torch.initial_seed() % 2**32 if self.seed is None else self.seed
            self._seed = trainer.strategy.broadcast(seed)
        same = {n: c.layer for n, c in self.connections.items()} == self._layers
        self._fresh = self._saved is None and not same
        if self._saved is not None or self._given is not None or not same:
            masks = self._first_masks() if self._saved is None else self._masks_of(self._saved)
            self.connections = {
                name: Connections(name, layer, masks[name], self.structure)
                for name, layer in self._layers.items()
            }
        if self._saved is not None:
            for name, state in self._saved["connections"].items():
                self.connections[name].load_state_dict(state)
            self._saved = None
        for c in self.connections.values():
            c.move()
        mask_averages(pl_module, trainer, self.connections.values())
        refuse_different_masks(trainer, self.connections.values())

    def _masks_of(self, saved: dict[str, Any]) -> dict[str, Tensor]:
        masks = saved_masks({"callbacks": {self.state_key: saved}})
        if set(masks) != set(self._layers):
            raise RuntimeError(
                f"The checkpoint has masks of {', '.join(masks)}, this run makes "
                f"{', '.join(self._layers)} sparse: give the same layers."
            )
        return masks

    def _first_masks(self) -> dict[str, Tensor]:
        given, self._given = self._given, None
        if given is None and self.masks is not None:
            given = saved_masks(self.masks) or import_pruned(self.masks)[1]
        if given is None:
            given = {n: m for n, x in self._layers.items() if (m := connection_mask(x)) is not None}
            if given:
                rank_zero_info(f"{type(self).__name__} goes on with the masks of the model.")
        if not given:
            return self._made_masks()
        for name, layer in self._layers.items():
            if name not in given or given[name].shape != layer.weight.shape:
                had = f"of shape {tuple(given[name].shape)}" if name in given else "missing"
                raise ValueError(
                    f"The mask of {name} must have shape {tuple(layer.weight.shape)}, it is {had}; "
                    f"there are masks of {', '.join(given)}."
                )
        return given

    def _made_masks(self) -> dict[str, Tensor]:
        weights: dict[str, Any] = {n: layer.weight for n, layer in self._layers.items()}
        wanted = self._densities(weights)
        masks = {}
        for name, weight in weights.items():
            zeros = float((weight == 0).float().mean())
            if zeros > (1 - wanted[name]) / 2 and zeros > 0.01:
                rank_zero_warn(
                    f"{zeros:.0%} of the weights of {name} are 0 already, and there is no mask of "
                    "them: if the model was sparse, take its masks along (`masks`, `use_masks`)."
                )
            random = self.initial == "random"
            generator = self.generator(name, 0, weight.device) if random else None
            masks[name] = initial_mask(weight, wanted[name], self.structure, generator)
        return masks

    def generator(self, name: str, step: int, device: torch.device) -> torch.Generator:
        """Return what draws for one layer at one step, alike on all processes."""
        return generator_for(self._seed, name, step, device)

    def _densities(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        if isinstance(self.sparsity, dict):
            values = by_pattern("sparsity", self.sparsity, weights, 0.0)
            return {name: 1 - value for name, value in zip(weights, values, strict=True)}
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        return densities(shapes, 1 - self.sparsity, self.distribution)

    # What is done in training.

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fresh and trainer.global_step > 0:
            raise RuntimeError(
                f"Training goes on at step {trainer.global_step} without masks of "
                f"{type(self).__name__}: resume from a checkpoint that has them, or start anew."
            )
        warning = self.prepare(Clock.of(trainer))
        if warning is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(warning)
        self._logged_at = -1
        self._pending: int | None = None
        self._unclean: dict[Optimizer, bool] = {}
        self._mine: dict[Optimizer, list[Connections]] = {}
        for optimizer in trainer.optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._mine[optimizer] = [c for c in self.connections.values() if id(c.weight) in held]
            hook = self._after_step(trainer, pl_module)
            self._handles.append(optimizer.register_step_post_hook(hook))

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        step = trainer.global_step + 1
        mine = self._mine.get(optimizer, [])
        self._pending = step if mine and self.changes_after(step) else None
        self.see_gradients(trainer, optimizer, mine)
        for c in mine:
            c.mask_gradient()

    def _after_step(self, trainer: Any, pl_module: nn.Module) -> Any:
        """Return the hook that runs right after an optimizer's step, if the step is made at all."""

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            mine = self._mine[optimizer]
            if optimizer not in self._unclean:
                # Does it work weight by weight? One step tells.
                self._unclean[optimizer] = not all(c.is_clean(optimizer) for c in mine)
            if self._unclean[optimizer]:
                for c in mine:
                    c.clean(optimizer)
            if self._pending is not None:
                self._change(trainer, pl_module, optimizer, self._pending)

        return hook

    def _change(self, trainer: Any, pl_module: nn.Module, optimizer: Any, step: int) -> None:
        self._pending, self.changed_at = None, step
        masks = self.new_masks(trainer, step, self._mine[optimizer])
        for c, mask in masks.items():
            c.change(mask, optimizer)
        if masks:
            mask_averages(pl_module, trainer, masks)
            refuse_different_masks(trainer, masks)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Figures are new after a change only, and an epoch forgets what was logged before it.
        if batch_idx == 0 or (self._logged_at != self.changed_at and logs_now(trainer)):
            self._logged_at = self.changed_at
            for name, c in self.connections.items():
                for key, value in c.figures().items():
                    pl_module.log(f"rewire/{key}/{name}", value)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "connections": {name: c.state_dict() for name, c in self.connections.items()},
            "changed_at": self.changed_at,
            "seed": self._seed,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._fits:
            self._saved = state_dict
            self.changed_at, self._seed = state_dict["changed_at"], state_dict["seed"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": [], "_mine": {}, "_unclean": {}}
