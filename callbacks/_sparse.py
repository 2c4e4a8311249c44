"""What the sparse callbacks share: masks that hold in every step, change, travel and agree."""

from collections.abc import Iterable, Mapping
from functools import cached_property, partial
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
    WEIGHT_BY_WEIGHT,
    Connections,
    Distribution,
    Structure,
    announce_masks,
    densities,
    generator_for,
    import_pruned,
    saved_masks,
    sparse_layers,
)
from dg_lightning.schedules import Clock

from ._agreement import refuse_different_masks, refuse_sharded_parameters
from ._first_masks import checked, drawn
from ._pressure import logs_now

__all__ = ["Initial", "Sparse", "all_finite"]

Initial = Literal["random", "magnitude"]


def all_finite(values: Iterable[Tensor]) -> bool:
    """Tell whether every entry of all tensors is a number; waits for the device once."""
    finite = [torch.isfinite(value).all() for value in values]
    return not finite or bool(torch.stack(finite).all())


class Sparse(pl.Callback):
    """Keeps the weights of missing connections, and what the optimizer knows of them, at 0.

    Gradients are masked before the optimizer's step, which then leaves missing connections at 0:
    those of torch that work weight by weight do. After all others it is cleaned up. A subclass says
    when connections change (`changes_after`) and how (`new_masks`).
    """

    puts_off = False  # whether a change that a step did not allow is made after the next one

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
        self._fits = False
        self._given: dict[str, Tensor] | None = None
        self._saved: dict[str, Any] | None = None
        self._fresh = False
        self._layers: dict[str, Any] = {}
        self._handles: list[Any] = []
        # By optimizer: how many parameters it has, and which of them are ours.
        self._mine: dict[Optimizer, tuple[int, list[Connections]]] = {}
        self._due: list[Connections] = []
        self._step = 0
        self._logged_at = -1

    @cached_property  # Lightning asks for it at every hook
    @override
    def state_key(self) -> str:
        named = list(self.sparsity) if isinstance(self.sparsity, dict) else self.layers
        return self._generate_state_key(layers=named)

    # What a subclass says.

    def changes_after(self, step: int, last: int) -> bool:
        """Tell whether a layer changes after this optimizer step, counted from 1.

        `last` is the one after which it changed before. A layer is stepped by its own optimizer,
        and with several of those it sees some of the steps only.
        """
        return False

    def new_masks(
        self, trainer: Any, step: int, due: list[Connections]
    ) -> dict[Connections, Tensor]:
        """Return the new masks of layers, after the optimizer's step."""
        return {}

    def see_gradients(
        self, trainer: Any, optimizer: Optimizer, mine: list[Connections], due: list[Connections]
    ) -> None:
        """Look at the dense gradients of layers, before they are masked."""

    def start_anew(self) -> None:
        """Forget an earlier training."""
        for c in self.connections.values():
            c.changed_at = 0

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
            self.structure.refuse_if_unfit(name, layer)
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
        saved, given = self._saved, self._given
        self._saved = self._given = None
        same = {n: c.layer for n, c in self.connections.items()} == self._layers
        self._fresh = saved is None and not same
        if saved is not None or given is not None or not same:
            masks = self._first_masks(given) if saved is None else self._masks_of(saved)
            self.connections = {
                name: Connections(name, layer, masks[name], self.structure)
                for name, layer in self._layers.items()
            }
        for name, c in self.connections.items():
            if saved is not None:
                c.load_state_dict(saved["connections"][name])
            c.move()
            c.apply()
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

    def _first_masks(self, given: dict[str, Tensor] | None) -> dict[str, Tensor]:
        if given is None and self.masks is not None:
            given = saved_masks(self.masks) or import_pruned(self.masks)[1]
        if given is None:
            given = {n: m for n, x in self._layers.items() if (m := connection_mask(x)) is not None}
            if given:
                rank_zero_info(f"{type(self).__name__} goes on with the masks of the model.")
        if given:
            return checked(given, self._layers, self.structure)
        return self.made_masks()

    def made_masks(self) -> dict[str, Tensor]:
        """Return the first masks of a model that has none."""
        wanted = self.densities({n: layer.weight for n, layer in self._layers.items()})
        draws = partial(self.generator, step=0) if self.initial == "random" else None
        return drawn(self._layers, wanted, self.structure, draws)

    def generator(self, name: str, device: torch.device, step: int) -> torch.Generator:
        """Return what draws for one layer at one step, alike on all processes."""
        return generator_for(self._seed, name, step, device)

    def densities(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the density of each layer."""
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
        if trainer.global_step == 0:
            self.start_anew()
        self._logged_at = -1
        self._mine = {}

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        mine = self._layers_of(trainer, pl_module, optimizer)
        self._step = trainer.global_step + 1
        self._due = [c for c in mine if self.changes_after(self._step, c.changed_at)]
        if not all_finite(g for c in self._due if (g := c.weight.grad) is not None):
            self._leave_out()
        self.see_gradients(trainer, optimizer, mine, self._due)
        for c in mine:
            c.mask_gradient()

    def _layers_of(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> list[Connections]:
        """Return the layers that an optimizer steps, which may become more while it trains."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._mine.get(optimizer)
        if known is None:
            hook = optimizer.register_step_post_hook(self._after_step(trainer, pl_module))
            self._handles.append(hook)
        if known is None or known[0] != count:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = [c for c in self.connections.values() if id(c.weight) in held]
            self._mine[optimizer] = known = (count, mine)
        return known[1]

    def _leave_out(self) -> None:
        """Make no change after this step."""
        if not self.puts_off:
            rank_zero_warn(
                f"{type(self).__name__} leaves the update of step {self._step} out: a gradient is "
                "not finite."
            )
            for c in self._due:
                c.changed_at = self._step
        self._due = []

    def _after_step(self, trainer: Any, pl_module: nn.Module) -> Any:
        """Return the hook that runs right after an optimizer's step, if the step is made at all."""

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if type(optimizer) not in WEIGHT_BY_WEIGHT:
                for c in self._mine[optimizer][1]:
                    c.clean(optimizer)
            if self._due:
                self._change(trainer, pl_module, optimizer)

        return hook

    def _change(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        due, self._due = self._due, []
        masks = self.new_masks(trainer, self._step, due)
        for c, mask in masks.items():
            c.change(mask, optimizer)
            c.changed_at = self._step
        mask_averages(pl_module, trainer, masks)
        refuse_different_masks(trainer, due)

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
        changed_at = max(c.changed_at for c in self.connections.values())
        if batch_idx == 0 or (self._logged_at != changed_at and logs_now(trainer)):
            self._logged_at = changed_at
            for name, c in self.connections.items():
                for key, value in c.figures().items():
                    pl_module.log(f"rewire/{key}/{name}", value)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._let_go()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._let_go()

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._mine, self._due = [], {}, []

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "connections": {name: c.state_dict() for name, c in self.connections.items()},
            "seed": self._seed,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A search for a learning rate saves, and loads, what was there before training.
        if self._fits and state_dict["connections"]:
            self._saved, self._seed = state_dict, state_dict["seed"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": [], "_mine": {}}
