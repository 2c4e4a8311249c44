"""Train with sparse connections: the base class, fixed masks and SET."""

from collections.abc import Hashable, Mapping
from functools import cached_property, partial
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.compute import gate_submodules
from dg_lightning.rewiring import (
    Distribution,
    DropSchedule,
    DropShape,
    MaskInit,
    SparseLayer,
    Structure,
    announce_masks,
    change_connections,
    check_masks,
    check_sparsity,
    generator_for,
    given_masks,
    layer_densities,
    masks_of,
    sample_masks,
    saved_masks,
    sparse_layers,
    zero_outside,
)
from dg_lightning.schedules import Clock, Duration
from dg_lightning.training import log_step, mask_averages

from ._shared import (
    check_equal_masks,
    check_no_other_masks,
    check_step_counting,
    check_whole_weights,
    state_key,
)

# New masks, and the scores behind them, which must all be finite.
NewMasks: TypeAlias = tuple[dict[SparseLayer, Tensor], list[Tensor]]


class SparseCallback(pl.Callback):
    """Keeps the weights of missing connections at exactly 0.

    Gradients are masked before the optimizer's step and weights after it, even if something else
    changed them. A subclass decides when connections change (`changes_after`) and how
    (`new_masks`).

    Args:
        sparsity: Share of weights that are 0, for all layers together or by name pattern.
        distribution: How sparsity is distributed over layers: `uniform`, `er` or `erk`.
        layers: Name patterns of linear and convolution layers (default: all outside gates).
        structure: `unstructured`, `block:16`, `2:4` or `fan_in` (see `RigL`).
        initial: Initial connections: `random`, or those with the largest weights (`magnitude`).
        masks: A checkpoint that provides the initial masks (see `RigL`).
        seed: Seed for the random masks (default: the run's seed).
    """

    sees_all_gradients = False  # whether `see_gradients` runs in every step or only before changes
    retry_skipped = False  # whether a skipped change is retried after the next step

    @checked
    def __init__(
        self,
        sparsity: float | dict[str, float] = 0.9,
        distribution: Distribution = "erk",
        layers: list[str] | None = None,
        structure: str = "unstructured",
        initial: MaskInit = "random",
        masks: str | None = None,
        seed: int | None = None,
    ) -> None:
        check_sparsity(sparsity, distribution, layers)
        if seed is not None and seed < 0:
            raise ValueError(f"`seed` must be at least 0, got {seed}.")
        self.sparsity = sparsity
        self.distribution: Distribution = distribution
        self.layers = list(sparsity) if isinstance(sparsity, dict) else layers
        self.structure = Structure(structure)
        self.initial: MaskInit = initial
        self.masks, self.seed = masks, seed
        self.connections: dict[str, SparseLayer] = {}
        self._layers: dict[str, Any] = {}
        self._seed: int | None = None
        self._fits = False
        self._is_new = False  # whether masks were created for this training run
        self._user_masks: dict[str, Tensor] | None = None
        self._loaded_state: dict[str, Any] | None = None
        self._step = 0
        self._due: list[SparseLayer] = []  # layers that change after this step
        self._handles: dict[Optimizer, Any] = {}

    @cached_property  # Lightning reads it in every hook of every step
    @override
    def state_key(self) -> str:
        return state_key(self, layers=self.layers)

    def set_initial_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Set boolean masks, by layer name, for the start of the next training run."""
        self._user_masks = dict(masks)

    def changes_after(self, step: int, last: int) -> bool:
        """Return True if a layer that last changed after step `last` must change after `step`.

        Steps are counted from 1.
        """
        return False

    def new_masks(self, trainer: Any, step: int, due: list[SparseLayer]) -> NewMasks:
        """Return new masks for the layers that are due. Called after the optimizer's step."""
        return {}, []

    def see_gradients(
        self, trainer: Any, optimizer: Optimizer, layers: list[SparseLayer], due: list[SparseLayer]
    ) -> None:
        """Read the dense gradients before they are masked."""

    def prepare(self, clock: Clock) -> str | None:
        """Resolve durations when training starts. Return a warning, or None."""
        return None

    def reset(self) -> None:
        """Discard the state of an earlier training run."""
        for layer in self.connections.values():
            layer.changed_at = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._fits = stage == "fit"

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_whole_weights(self, trainer, pl_module)
        check_no_other_masks(self, trainer, pl_module)
        self._layers = self.find_layers(pl_module)
        for name, layer in self._layers.items():
            self.structure.check_layer(name, layer)
        if note := self.structure.note_on(self.sparsity):
            rank_zero_info(f"{type(self).__name__} {note}")
        self._connect(trainer, pl_module)

    def find_layers(self, module: nn.Module) -> dict[str, Any]:
        """Return the layers to make sparse, by name."""
        return sparse_layers(module, self.layers, gate_submodules(module))

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._fits:
            announce_masks(pl_module, saved_masks(checkpoint))
        elif self.state_key not in checkpoint["callbacks"]:
            raise RuntimeError(
                f"The checkpoint has no masks for {self.state_key}: start a new training run from "
                "its weights, or resume without this callback."
            )

    def _connect(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the masks from a checkpoint or from the user, or create new ones."""
        if self._seed is None:  # a resumed run keeps its seed
            seed = torch.initial_seed() % 2**32 if self.seed is None else self.seed
            self._seed = trainer.strategy.broadcast(seed)
        saved, given, self._loaded_state, self._user_masks = (
            self._loaded_state,
            self._user_masks,
            None,
            None,
        )
        now = {n: (id(x), id(x.weight)) for n, x in self._layers.items()}
        same = now == {n: (id(c.layer), id(c.weight)) for n, c in self.connections.items()}
        self._is_new = saved is None and not same
        if saved is not None or given is not None or not same:
            if saved is not None:
                masks = masks_of(saved, self._layers)
            else:
                known = given_masks(self._layers, given, self.masks, type(self).__name__)
                masks = check_masks(known, self._layers, self.structure) or self.made_masks()
            self.connections = {
                name: SparseLayer(name, layer, masks[name], self.structure)
                for name, layer in self._layers.items()
            }
        for name, layer in self.connections.items():
            layer.move()
            if saved is not None:
                layer.load_state_dict(saved["connections"][name])
            layer.apply()
        mask_averages(pl_module, trainer, self.connections.values())
        check_equal_masks(trainer, self.connections.values())

    def made_masks(self) -> dict[str, Tensor]:
        """Create initial masks for a model that has none."""
        wanted = layer_densities(self._layers, self.sparsity, self.distribution)
        seed = self._seed if self.initial == "random" else None
        return sample_masks(self._layers, wanted, self.structure, seed)

    @override
    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if self._loaded_state is not None:  # loaded late, as in a learning-rate search
            self._connect(trainer, pl_module)
        if self._is_new and trainer.global_step > 0:
            raise RuntimeError(
                f"Training continues at step {trainer.global_step}, but there are no masks for "
                f"{type(self).__name__}: resume from a checkpoint that has masks, or start over."
            )
        check_step_counting(self, trainer, pl_module)
        if (warning := self.prepare(Clock.from_trainer(trainer))) and not trainer.fast_dev_run:
            rank_zero_warn(warning)
        if trainer.global_step == 0:
            self.reset()

    def prepare_step(self, trainer: pl.Trainer) -> Hashable:
        """Return the graph key (see `CapturedSteps`), or None if connections change next."""
        layers, step = self.connections.values(), trainer.global_step + 1
        due = self._due or any(self.changes_after(step, layer.changed_at) for layer in layers)
        return None if due else tuple(layer.full for layer in layers)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if optimizer not in self._handles:
            after_step = partial(self._after_step, trainer, pl_module)
            self._handles[optimizer] = optimizer.register_step_post_hook(after_step)
        step = trainer.global_step + 1
        if self._due and step != self._step:  # for example, a loss scaler skipped the last step
            self._skip(self._due)
        layers = self._layers_of(optimizer)
        self._step = step
        self._due = [layer for layer in layers if self.changes_after(step, layer.changed_at)]
        if self._due or self.sees_all_gradients:
            self.see_gradients(trainer, optimizer, layers, self._due)
        pairs = [(x.weight.grad, x.mask) for x in layers if not x.full]
        zero_outside((gradient, mask) for gradient, mask in pairs if gradient is not None)

    def _layers_of(self, optimizer: Optimizer) -> list[SparseLayer]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [layer for layer in self.connections.values() if id(layer.weight) in held]

    def _after_step(
        self, trainer: Any, pl_module: Any, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        """Change connections right after the optimizer's step."""
        for layer in self._layers_of(optimizer):
            layer.check_not_replaced()
            layer.clean(optimizer)
        due, self._due = self._due, []
        if not due:
            return
        masks, scores = self.new_masks(trainer, self._step, due)
        found_inf = getattr(optimizer, "found_inf", None)  # 1 if a scaler skips a fused step
        if found_inf is not None:
            scores = [*scores, found_inf / (1 - found_inf)]
        if not change_connections(masks, optimizer, scores):
            self._skip(due)
            return
        for layer in masks:
            layer.changed_at = self._step
        mask_averages(pl_module, trainer, masks)
        check_equal_masks(trainer, due)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        live = set(pl_module.modules())
        for layer in self.connections.values():
            layer.check_not_replaced(live)

    def _skip(self, due: list[SparseLayer]) -> None:
        """Skip a change, and warn unless it is retried after the next step."""
        if self.retry_skipped:
            return
        for layer in due:
            layer.changed_at = self._step
        rank_zero_warn(
            f"{type(self).__name__} skipped the update at step {self._step}: a gradient or a "
            "weight is not finite."
        )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        for layer in self.connections.values():
            layer.apply_if_changed()  # by an `optimizer_step` of the module, for example
        every = [(name, layer.figures()) for name, layer in self.connections.items()]
        figures = {f"rewiring/{key}/{n}": v for n, of_one in every for key, v in of_one.items()}
        changed = any(x.changed_at == trainer.global_step for x in self.connections.values())
        log_step(pl_module, figures, always=changed)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._due = {}, []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}, "_due": []}

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._loaded_state or {  # loaded, but training has not started
            "connections": {name: layer.state_dict() for name, layer in self.connections.items()},
            "seed": self._seed,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._fits and state_dict["connections"]:
            self._loaded_state, self._seed = state_dict, state_dict["seed"]


class StaticSparse(SparseCallback):
    """Trains a sparse net with fixed random connections, as a baseline for rewiring.

    It can also train a net that was pruned elsewhere (see `masks`). It takes the same arguments as
    `SparseCallback` and logs the same keys as `RigL`.

    >>> StaticSparse(sparsity={"fc1": 0.8}).sparsity
    {'fc1': 0.8}
    """


class Rewiring(SparseCallback):
    """Base class of `RigL` and `SET`, which drop connections and grow as many new ones.

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
        exclude_just_dropped: Whether dropped connections cannot grow again in the same update.
        initial: The initial connections: `random`, or those with the largest weights (`magnitude`).
        masks: A checkpoint that provides the initial masks, either saved by this package or pruned
            with torch.nn.utils.prune or Lightning's ModelPruning.
        seed: Seed for random connections (default: the run's seed).
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
        exclude_just_dropped: bool = False,
        initial: MaskInit = "random",
        masks: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(sparsity, distribution, layers, structure, initial, masks, seed)
        self.schedule = DropSchedule(every_n_steps, drop_fraction, drop_shape, until)
        self.exclude_just_dropped = exclude_just_dropped

    @override
    def changes_after(self, step: int, last: int) -> bool:
        return self.schedule.is_due(step, last)

    @override
    def prepare(self, clock: Clock) -> str | None:
        return self.schedule.resolve(clock, type(self).__name__)

    def rewire(self, step: int, layer: SparseLayer, keep: Tensor, grow: Tensor) -> Tensor:
        """Return a layer's new mask, given its keep and grow scores."""
        fraction = self.schedule.fraction(step)
        return layer.rewired_mask(keep, grow, fraction, self.exclude_just_dropped)


class SET(Rewiring):
    """Trains a sparse net and moves connections with small weights to random positions.

    It works like `RigL`, but grows connections at random and ignores the gradient. All ranks draw
    the same positions. It takes the same arguments as `Rewiring` and logs the same keys as `RigL`.

    (Mocanu, Mocanu, Stone, Nguyen, Gibescu, Liotta: "Scalable training of artificial neural
    networks with adaptive sparse connectivity inspired by network science", arXiv:1707.04780.)

    >>> SET(sparsity=0.9).schedule.drop_fraction
    0.3
    """

    @override
    @torch.no_grad()
    def new_masks(self, trainer: Any, step: int, due: list[SparseLayer]) -> NewMasks:
        masks, scores = {}, []
        for layer in due:
            keep = layer.weight.detach().abs()
            generator = generator_for(self._seed, layer.name, step, keep.device)
            grow = torch.rand(keep.shape, generator=generator, device=keep.device)
            scores.append(keep)
            masks[layer] = self.rewire(step, layer, keep, grow)
        return masks, scores
