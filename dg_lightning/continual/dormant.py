"""Find dormant or low-utility units and reinitialise them."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dg_lightning.compute.macs import as_matrix, unit_axis
from dg_lightning.gates.protocol import (
    GateLike,
    connection_mask,
    deployed_gate,
    gate_layers,
    plain_name,
    protected_mask,
)
from dg_lightning.rewiring.sparse_layer import reset_state
from dg_lightning.surgery import find_units
from dg_lightning.surgery.recording import first_tensor


class WatchedUnits:
    """Activity and utility of the units that a layer consumes.

    Both are based on running means over training passes.

    Args:
        consumer: The layer that reads the units.
        producers: The layers that compute the units, with the unit index of each output.
        decay: Decay of the running means.
        gate: The gate of the units, if any.
    """

    def __init__(
        self,
        consumer: Any,
        producers: Mapping[nn.Module, Tensor],
        decay: float = 0.99,
        gate: GateLike | None = None,
    ) -> None:
        self.consumer, self.gate = consumer, gate
        self.producers = dict(producers)
        self.decay = decay
        weight = as_matrix(self.consumer, self.consumer.weight)
        self.size = weight.shape[1]
        # Running means of |h| and h without bias correction, and the number of passes.
        # In half precision, means would stop changing and ages would stop at 2,048.
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.activity, self.mean, self.age = weight.new_zeros(3, self.size, dtype=wide).unbind()

    def watch(self) -> Any:
        """Start recording training passes. Remove the returned handle to stop."""
        return self.consumer.register_forward_pre_hook(self._look, with_kwargs=True)

    @torch.no_grad()
    def _look(self, consumer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not consumer.training:
            return
        x = first_tensor(args, kwargs).detach().movedim(unit_axis(consumer), -1)
        rows = x.reshape(-1, self.size).to(self.activity.dtype)
        if not len(rows):
            return
        self.activity, self.mean, self.age = (
            values.to(rows.device) for values in (self.activity, self.mean, self.age)
        )
        self.activity.lerp_(rows.abs().mean(0), 1 - self.decay)
        self.mean.lerp_(rows.mean(0), 1 - self.decay)
        self.age += 1

    def means(self) -> Tensor:
        """Return the raw running means of |h| and h, and the ages, as float64."""
        return torch.stack([self.activity, self.mean, self.age]).double()

    def set_means(self, means: Tensor) -> None:
        """Replace the running means and ages."""
        self.activity, self.mean, self.age = means.to(self.activity.dtype).unbind()

    def figures(self) -> Tensor:
        """Return the bias-corrected means of |h| and h, and the ages, for all units."""
        started = (1 - self.decay**self.age).clamp_min(1e-12)
        return torch.stack([self.activity / started, self.mean / started, self.age])

    @torch.no_grad()
    def utility(self, figures: Tensor) -> Tensor:
        """Return each unit's mean |h| times the magnitude of its outgoing weights."""
        weight = as_matrix(self.consumer, self.consumer.weight)
        return figures[0] * weight.to(figures.dtype).abs().sum((0, 2))

    def is_dormant(self, figures: Tensor, threshold: float) -> Tensor:
        """Return which units have at most `threshold` times the mean activity in their layer.

        >>> units = WatchedUnits(nn.Linear(3, 1), {})
        >>> units.is_dormant(torch.tensor([[0.0, 1.0, 2.0]]), 0.1).tolist()
        [True, False, False]
        """
        return figures[0] <= threshold * figures[0].mean()

    def is_free(self) -> Tensor:
        """Return units that no finished task uses and that are open for at least one sample."""
        free = torch.ones(self.size, dtype=torch.bool, device=self.activity.device)
        if self.gate is not None:
            opened = deployed_gate(self.gate).reshape(-1, self.size // self.gate.block_size).any(0)
            free &= opened.repeat_interleave(self.gate.block_size).to(free.device)
        for producer, units in self.producers.items():
            if (mask := protected_mask(producer)) is not None:
                rows = as_matrix(producer, mask).flatten(1).any(1)
                free[units[rows.to(units.device)].to(free.device)] = False
        return free

    @torch.no_grad()
    def revive(self, units: Tensor, figures: Tensor, optimizers: Iterable[Optimizer]) -> None:
        """Reinitialise the incoming weights of units and zero their outgoing weights.

        The units' mean contribution is added to the consumer's bias. The optimizer state of the
        changed weights is reset.

        Args:
            units: A bool mask of the units to revive.
            figures: The result of `figures`.
            optimizers: The optimizers that hold the weights.
        """
        changed: dict[nn.Parameter, Tensor] = {}
        for producer, unit_of_row in self.producers.items():
            rows = units[unit_of_row.to(units.device)]
            fresh: Any = deepcopy(producer)
            fresh.reset_parameters()
            for name, parameter in producer.named_parameters(recurse=False):
                where = torch.zeros_like(parameter, dtype=torch.bool)
                (as_matrix(producer, where) if name == "weight" else where)[rows] = True
                if name == "weight" and (mask := connection_mask(producer)) is not None:
                    where &= mask
                parameter.copy_(torch.where(where, getattr(fresh, name), parameter))
                changed[parameter] = where
        weight = self.consumer.weight
        outgoing = torch.zeros_like(weight, dtype=torch.bool)
        as_matrix(self.consumer, outgoing)[:, units] = True
        if self.consumer.bias is not None:
            matrix = as_matrix(self.consumer, weight).to(figures.dtype)
            lost = (matrix.sum(-1) @ (figures[1] * units)).to(weight.dtype)
            if (protected := protected_mask(self.consumer)) is not None:
                lost = lost * ~as_matrix(self.consumer, protected).flatten(1).any(1)
            self.consumer.bias += lost
        weight.masked_fill_(outgoing, 0)
        changed[weight] = outgoing | changed[weight] if weight in changed else outgoing
        for optimizer in optimizers:
            for parameter, where in changed.items():
                reset_state(optimizer, parameter, keep=~where)
        for values in (self.activity, self.mean, self.age):
            values.masked_fill_(units, 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running means and ages."""
        return {"activity": self.activity, "mean": self.mean, "age": self.age}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state from `state_dict`."""
        wide = self.activity.dtype
        self.activity, self.mean, self.age = (
            state[key].to(wide, copy=True) for key in ("activity", "mean", "age")
        )


def find_watched(model: nn.Module, example: Any, decay: float) -> dict[str, WatchedUnits]:
    """Find the independent units in a model, keyed by the name of the layer that reads them.

    Args:
        model: The model.
        example: Example inputs for the model.
        decay: Decay of the running means.

    Raises:
        ValueError: If the model has no such units.
    """
    found = find_units(model, example)
    names = {child: name for name, child in model.named_modules()}
    watched: dict[str, WatchedUnits] = {}
    for name, units in found.units.items():
        if units.block_size == 1:
            producers = {model.get_submodule(n): rows for n, rows in units.producers.items()}
            consumer = model.get_submodule(units.consumer)
            watched[plain_name(name)] = WatchedUnits(consumer, producers, decay)
    for gate in gate_layers(model, required=False).values():  # units that already have a gate
        if gate.feeds.skips_rows and not gate.feeds.rows:
            producers = dict.fromkeys(gate.feeds.producers, torch.arange(gate.units))
            for consumer in gate.feeds.consumers:
                watched[plain_name(names[consumer])] = WatchedUnits(
                    consumer, producers, decay, gate
                )
    # Some layers, such as Conv1D in Hugging Face's GPT-2, cannot be reinitialised.
    watched = {
        name: units
        for name, units in watched.items()
        if all(hasattr(producer, "reset_parameters") for producer in units.producers)
    }
    if not watched:
        raise ValueError(
            f"{type(model).__name__} has no units to revive: "
            f"{'; '.join(found.reasons()) or 'no linear map ran'}."
        )
    return watched
