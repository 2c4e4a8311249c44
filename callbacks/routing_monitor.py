"""Follow where samples go: which experts they use, and whether hard samples open more units."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from dg_lightning.protocol import GateLike, gate_layers
from dg_lightning.routing import ActivityCorrelation, RoutingStatistics

from ._hooks import only_used_hooks

__all__ = ["RoutingMonitor"]


@only_used_hooks
class RoutingMonitor(pl.Callback):
    """Logs how the experts and gates of a net are used, over a validation or test.

    It reads the forward pass of `validation_step` and `test_step`, which must return the class
    logits, as a tensor or under the key `logits`; the labels are the second part of the batch.

    Args:
        layers: Name patterns of routers and gates that depend on the input; all when None.

    | logged key | meaning |
    |---|---|
    | `gates/hardness_correlation` | of hardness (1 - largest class probability) and activity |
    | `gates/active_ratio` | mean share of units open, over all gates followed |
    | `routing/entropy/<layer>` | of the experts' use, in nats |
    | `routing/cv/<layer>` | coefficient of variation of the experts' use |
    | `routing/mutual_information/<layer>` | of first expert and class, in nats |
    | `routing/dropped/<layer>` | choices of an epoch that found no room, in training |
    | `routing/capacity/<layer>` | samples that an expert takes in, mean over batches of training |

    >>> RoutingMonitor(layers=["net.router"]).layers
    ['net.router']
    """

    def __init__(self, layers: list[str] | None = None) -> None:
        self.layers = layers
        self._gates: dict[str, GateLike] = {}
        self._statistics: dict[str, RoutingStatistics] = {}
        self._correlation = ActivityCorrelation()
        self._dropped: dict[str, Tensor] = {}
        self._capacity: dict[str, int] = {}
        self._batches = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        found = gate_layers(pl_module, self.layers)
        self._gates = {name: gate for name, gate in found.items() if gate.input_dependent}
        if not self._gates:
            raise ValueError(
                "RoutingMonitor follows gates that depend on the input, and there are only static "
                f"ones, {', '.join(found)}: use `kind: dynamic`, or leave it out."
            )

    def _routers(self) -> dict[str, Any]:
        return {name: gate for name, gate in self._gates.items() if hasattr(gate, "chosen")}

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._dropped, self._capacity, self._batches = {}, {}, 0

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batches += 1
        for name, router in self._routers().items():
            dropped = router.dropped.sum()
            self._dropped[name] = (
                self._dropped[name] + dropped if name in self._dropped else dropped
            )
            self._capacity[name] = self._capacity.get(name, 0) + router.capacity

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, dropped in self._dropped.items():
            pl_module.log(
                f"routing/dropped/{name}", dropped.float(), sync_dist=True, reduce_fx="sum"
            )
            capacity = self._capacity[name] / self._batches
            pl_module.log(f"routing/capacity/{name}", capacity, sync_dist=True)

    def _start(self, pl_module: pl.LightningModule) -> None:
        self._statistics = {}
        self._correlation = ActivityCorrelation().to(pl_module.device)

    def _add(self, pl_module: pl.LightningModule, outputs: Any, batch: Any) -> None:
        logits = outputs.get("logits") if isinstance(outputs, dict) else outputs
        if not isinstance(logits, Tensor):
            raise TypeError(
                "RoutingMonitor needs the class logits: return them from `validation_step` and "
                f"`test_step`, as a tensor or under the key 'logits'; got {type(outputs).__name__}."
            )
        hardness = 1 - logits.float().softmax(-1).amax(-1)
        shares, units = torch.zeros_like(hardness), 0
        for gate in self._gates.values():
            assert gate.gate is not None
            shares = shares + (gate.gate != 0).float().mean(-1) * gate.units
            units += gate.units
        self._correlation.update(hardness, shares / units)
        for name, router in self._routers().items():
            if name not in self._statistics:
                statistics = RoutingStatistics(router.experts, logits.shape[-1])
                self._statistics[name] = statistics.to(pl_module.device)
            self._statistics[name].update(router.chosen, router.probability, batch[1])

    def _log(self, pl_module: pl.LightningModule) -> None:
        found = {f"gates/{key}": value for key, value in self._correlation.compute().items()}
        for name, statistics in self._statistics.items():
            found |= {f"routing/{key}/{name}": v for key, v in statistics.compute().items()}
        for key, value in found.items():
            if value.isfinite():  # a constant activity has no correlation
                # On the module's device: NCCL takes no other.
                pl_module.log(key, value.float().to(pl_module.device), sync_dist=True)

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(pl_module)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._add(pl_module, outputs, batch)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(pl_module)

    # A test is looked at in the same way.
    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
