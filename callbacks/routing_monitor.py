"""Log how samples are routed to the experts of a mixture."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.gates.protocol import gate_layers
from dg_lightning.monitoring.activity import RoutingStatistics


class RoutingMonitor(pl.Callback):
    """Logs expert usage during validation and testing.

    `validation_step` and `test_step` must return the class logits, as a tensor or under the key
    `logits`, and the labels must be the second item of the batch.

    Args:
        layers: Name patterns of the routers (default: all).

    | logged key | meaning |
    |---|---|
    | `routing/entropy/<layer>` | entropy of expert usage, in nats |
    | `routing/cv/<layer>` | coefficient of variation of expert usage |
    | `routing/mutual_information/<layer>` | mutual information of first expert and class, in nats |
    | `routing/dropped/<layer>` | assignments dropped per training epoch, for lack of capacity |
    | `routing/capacity/<layer>` | mean expert capacity over training batches, in samples |

    >>> RoutingMonitor(layers=["net.router"]).layers
    ['net.router']
    """

    @checked
    def __init__(self, layers: list[str] | None = None) -> None:
        self.layers = layers
        self._routers: dict[str, Any] = {}
        self._statistics: dict[str, RoutingStatistics] = {}
        self._dropped: dict[str, Tensor] = {}
        self._capacity: dict[str, int] = {}
        self._batches = 0

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gates = gate_layers(pl_module, self.layers)
        self._routers = {name: gate for name, gate in gates.items() if hasattr(gate, "chosen")}
        if not self._routers:
            raise ValueError(
                "RoutingMonitor found no router, such as SwitchMoE's, only the gates "
                f"{', '.join(gates)}: use GateMonitor instead."
            )

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._dropped, self._capacity, self._batches = {}, {}, 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
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
                "RoutingMonitor needs `validation_step` and `test_step` to return the class logits "
                f"as a tensor or under the key 'logits', got {type(outputs).__name__}."
            )
        for name, router in self._routers.items():
            if name not in self._statistics:
                statistics = RoutingStatistics(router.experts, logits.shape[-1])
                self._statistics[name] = statistics.to(pl_module.device)
            self._statistics[name].update(router.chosen, router.probability, batch[1].flatten())

    def _log(self, pl_module: pl.LightningModule) -> None:
        for name, statistics in self._statistics.items():
            for key, value in statistics.compute().items():
                # NCCL requires tensors on the module's device.
                device_value = value.float().to(pl_module.device)
                pl_module.log(f"routing/{key}/{name}", device_value, sync_dist=True)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":
            self.on_fit_start(trainer, pl_module)

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

    # Tests are monitored like validation.
    on_test_start = on_validation_start
    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
