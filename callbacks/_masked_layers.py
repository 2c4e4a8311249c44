"""Which layers are sparse, with which masks, from one training to the next."""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
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
    saved_masks,
    sparse_layers,
)

from ._agreement import refuse_different_masks, refuse_sharded_parameters
from ._first_masks import checked, drawn

__all__ = ["Initial", "MaskedLayers"]

Initial = Literal["random", "magnitude"]


class MaskedLayers(pl.Callback):
    """Knows the layers that are sparse, where their first masks come from, and saves them."""

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

    @cached_property  # Lightning asks for it at every hook
    @override
    def state_key(self) -> str:
        named = list(self.sparsity) if isinstance(self.sparsity, dict) else self.layers
        return self._generate_state_key(layers=named)

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
        fixed = self.structure.density
        if fixed is not None and self.sparsity != 1 - fixed:
            rank_zero_info(
                f"{type(self).__name__} leaves out {1 - fixed:.0%} of the weights, as "
                f"`structure={self.structure.kind!r}` says; `sparsity={self.sparsity}` is not used."
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if other is not self and isinstance(other, MaskedLayers):
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
            if not Path(self.masks).is_file():
                raise FileNotFoundError(
                    f"`masks` must be a checkpoint file, there is none at {self.masks}: give the "
                    "path of one, or leave it out."
                )
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
