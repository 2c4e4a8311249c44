"""What processes, and callbacks of one kind, must agree on."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dg_lightning.protocol import gate_layers
from dg_lightning.rewiring import Connections

__all__ = [
    "mean_over_ranks",
    "refuse_different_masks",
    "refuse_sharded_parameters",
    "refuse_two_penalties",
    "refuse_two_writers",
    "shards_parameters",
]


def mean_over_ranks(trainer: Any, value: Tensor) -> Tensor:
    """Return the mean of a value over all processes, so that all of them decide the same."""
    if trainer.world_size == 1:
        return value
    mean: Tensor = trainer.strategy.reduce(value.clone(), reduce_op="mean")
    return mean


def refuse_different_masks(trainer: Any, layers: Iterable[Connections]) -> None:
    """Raise if processes do not have the same connections."""
    if trainer.world_size == 1:
        return
    own = [layer.checksum() for layer in layers]
    every: list[list[int]] = [[]] * trainer.world_size
    dist.all_gather_object(every, own)
    if any(other != own for other in every):
        raise RuntimeError(
            "Processes have different connections: their weights or gradients differ, as when a "
            "hook changes gradients on one of them."
        )


def refuse_sharded_parameters(name: str, trainer: Any, module: nn.Module) -> None:
    """Refuse strategies under which a process has a part of a weight only."""
    if shards_parameters(trainer, module):
        kind = type(trainer.strategy).__name__
        raise ValueError(
            f"{name} needs whole weights on every process, got {kind}, which shards them: use "
            "strategy='ddp' or a single device."
        )


def shards_parameters(trainer: Any, module: nn.Module) -> bool:
    """Tell whether a process has a part of a weight only."""
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    sharding = [k for k in kinds if k.startswith(("FSDP", "DeepSpeed", "ModelParallel"))]
    return bool(sharding) or any(isinstance(p, DTensor) for p in module.parameters())


def refuse_two_writers(callback: Any, trainer: Any, module: Any) -> None:
    """Refuse a second callback of the same kind that sets the same gates."""
    own = gate_layers(module, callback.layers)
    for other in trainer.callbacks:
        if other is not callback and type(other) is type(callback):
            shared = [name for name in gate_layers(module, other.layers) if name in own]
            if shared:
                raise ValueError(
                    f"Two {type(callback).__name__} set the gate {shared[0]}: "
                    "part them by `layers`."
                )


def refuse_two_penalties(callback: Any, trainer: Any) -> None:
    """Refuse a second owner of a penalty's weight, and a second penalty with the same keys."""
    for other in trainer.callbacks:
        if other is callback or not hasattr(other, "pressure"):
            continue
        names = f"{type(callback).__name__} and {type(other).__name__}"
        shared = [name for name in callback.pressure.gates if name in other.pressure.gates]
        if shared and (hasattr(callback, "budget") or hasattr(other, "budget")):
            raise ValueError(
                f"{names} both press on {shared[0]}: the weight of a penalty has one owner; remove "
                "one, or part them by `layers`."
            )
        if callback.name == other.name:
            had = "no `name`" if callback.name is None else f"the name {callback.name!r}"
            raise ValueError(
                f"{names} have {had}: give each a `name` of its own, which tells their logged keys "
                "apart."
            )
