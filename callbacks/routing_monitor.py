"""Follow where samples go: which experts of a mixture they use."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from dg_lightning.protocol import gate_layers
from dg_lightning.routing import RoutingStatistics
from dg_lightning.step_hooks import only_used_hooks

__all__ = ["RoutingMonitor"]


@only_used_hooks
class RoutingMonitor(pl.Callback):
    """Logs how the experts of a net are used, over a validation or test.

    It reads the forward pass of `validation_step` and `test_step`, which must return the class
    logits, as a tensor or under the key `logits`; the labels are the second part of the batch.

    Args:
        layers: Name patterns of the routers; all when None.

    | logged key | meaning |
    |---|---|
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
        self._routers: dict[str, Any] = {}
        self._statistics: dict[str, RoutingStatistics] = {}
        self._dropped: dict[str, Tensor] = {}
        self._capacity: dict[str, int] = {}
        self._batches = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        found = gate_layers(pl_module, self.layers)
        self._routers = {name: gate for name, gate in found.items() if hasattr(gate, "chosen")}
        if not self._routers:
            raise ValueError(
                "RoutingMonitor follows routers, as of SwitchMoE, and there are only the gates "
                f"{', '.join(found)}: GateMonitor follows those."
            )

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
        for name, router in self._routers.items():
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

    def _add(self, pl_module: pl.LightningModule, outputs: Any, batch: Any) -> None:
        logits = outputs.get("logits") if isinstance(outputs, dict) else outputs
        if not isinstance(logits, Tensor):
            raise TypeError(
                "RoutingMonitor needs the class logits: return them from `validation_step` and "
                f"`test_step`, as a tensor or under the key 'logits'; got {type(outputs).__name__}."
            )
        for name, router in self._routers.items():
            if name not in self._statistics:
                statistics = RoutingStatistics(router.experts, logits.shape[-1])
                self._statistics[name] = statistics.to(pl_module.device)
            self._statistics[name].update(router.chosen, router.probability, batch[1])

    def _log(self, pl_module: pl.LightningModule) -> None:
        for name, statistics in self._statistics.items():
            for key, value in statistics.compute().items():
                # On the module's device: NCCL takes no other.
                device_value = value.float().to(pl_module.device)
                pl_module.log(f"routing/{key}/{name}", device_value, sync_dist=True)

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._statistics = {}

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
