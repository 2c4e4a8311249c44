"""GatedClassifier: a LightningModule that trains any net, gated or not, to classify."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from typing_extensions import override

from dg_lightning.averaging import keep_settings_live
from dg_lightning.checkpoint import TrustedLoading, preparation_in
from dg_lightning.compute_report import ComputeReport
from dg_lightning.log_steps import forget_logged, logs_now
from dg_lightning.metrics import ComputeLedger
from dg_lightning.protocol import GateLike, gate_layers, release
from dg_lightning.rewiring import announce_masks, forget_masks, saved_masks
from dg_lightning.spec import NetSpec, OptimizerSpec, SchedulerSpec, build
from dg_lightning.whole_net import CountWholeNet, WholeNet

__all__ = ["GatedClassifier"]

_SPARSE = (
    "The model was sparse, and no callback of this training keeps it so: its missing connections "
    "will come back; add StaticSparse, RigL or another."
)


class GatedClassifier(TrustedLoading):
    """Cross-entropy training of a net, with its accuracy and its executed MACs.

    Everything it is made of is a plain value, so that `load_from_checkpoint(path)` needs no further
    argument and no pickled code. Validation and test take accuracy and MACs from the same hard
    gates of the same forward passes.

    Args:
        net: The net, as class path and arguments. Of `in_features`, `input_shape` and `num_classes`
            it is given those that it has a parameter for and that are not set.
        input_shape: Shape of one sample; the command line takes it from the data.
        num_classes: Number of classes; the command line takes it from the data.
        optimizer: Class path and arguments; AdamW with a learning rate of 0.001 when None.
        lr_scheduler: Class path and arguments.
        lr_scheduler_interval: Whether the scheduler steps with every epoch or every optimizer step.
        lr_scheduler_monitor: The logged value that a `ReduceLROnPlateau` looks at.
        class_weights: Weight of each class in the loss; `balanced` takes those of the DataModule.
        label_smoothing: Share of the target that is spread over all classes.
        gate_lr_factor: Learning rate of gate parameters, as a multiple of the optimizer's. They
            have a group of their own, without weight decay, which would pull them to p = 0.5.
        gate_clip_norm: Largest norm of the gradient of all gate parameters together.

    | logged key | meaning |
    |---|---|
    | `train/loss` | what `training_step` returns: task and auxiliary loss |
    | `train/task_loss`, `train/aux_loss` | its parts, the second of nets with `auxiliary_loss()` |
    | `val/loss`, `val/accuracy`, `val/macro_f1`, `test/...` | with hard gates |
    | `compute/...` | the ledger of validation and test, see `ComputeReport.logged` |

    >>> net = {"class_path": "GatedMLP", "init_args": {"hidden": [16], "gate": {"kind": "static"}}}
    >>> GatedClassifier(net, input_shape=[64], num_classes=10)(torch.randn(2, 64)).shape
    torch.Size([2, 10])
    """

    releases_gates = True  # their graphs, when a batch ends: callbacks need not

    def __init__(
        self,
        net: NetSpec,
        input_shape: Sequence[int] | None = None,
        num_classes: int | None = None,
        optimizer: OptimizerSpec | None = None,
        lr_scheduler: SchedulerSpec | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        lr_scheduler_monitor: str = "val/loss",
        class_weights: list[float] | Literal["balanced"] | None = None,
        label_smoothing: float = 0.0,
        gate_lr_factor: float = 1.0,
        gate_clip_norm: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(net, nn.Module):
            raise TypeError(
                f"`net` must be a class path with its arguments, got a {type(net).__name__}: write "
                "net={'class_path': 'dg_lightning.GatedMLP', 'init_args': {...}}, so that a "
                "checkpoint can build it again."
            )
        self.save_hyperparameters()
        # LightningCLI needs it to read the other hyper-parameters back from a checkpoint.
        cls = type(self)
        self.save_hyperparameters({"_class_path": f"{cls.__module__}.{cls.__qualname__}"})
        if num_classes is None:
            num_classes = (net.get("init_args") or {}).get("num_classes")
        if num_classes is None:
            raise ValueError("`num_classes` is unknown: give it, or a DataModule that has it.")
        if num_classes < 2:
            raise ValueError(f"There must be at least 2 classes to tell apart, got {num_classes}.")
        self.num_classes = num_classes
        sizes: dict[str, Any] = {"num_classes": num_classes}
        if input_shape is not None:
            sizes |= {"input_shape": tuple(input_shape), "in_features": math.prod(input_shape)}
            self.example_input_array = torch.zeros(1, *input_shape)
        self.net = build(net, "net", nn.Module, **sizes)
        self.optimizer: OptimizerSpec = optimizer or {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": 1e-3},
        }
        self.lr_scheduler = lr_scheduler
        self.lr_scheduler_interval = lr_scheduler_interval
        self.lr_scheduler_monitor = lr_scheduler_monitor
        self.label_smoothing = label_smoothing
        self.gate_lr_factor = gate_lr_factor
        self.gate_clip_norm = gate_clip_norm
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"`label_smoothing` must be in [0, 1], got {label_smoothing}.")
        if gate_lr_factor < 0:
            raise ValueError(f"`gate_lr_factor` must be at least 0, got {gate_lr_factor}.")
        if gate_clip_norm is not None and gate_clip_norm <= 0:
            raise ValueError(f"`gate_clip_norm` must be above 0, got {gate_clip_norm}.")
        self.balanced = class_weights == "balanced"
        weights = [1.0] * num_classes if self.balanced else class_weights
        if weights is not None and len(weights) != num_classes:
            raise ValueError(
                f"`class_weights` must have {num_classes} entries, one a class, got {len(weights)}."
            )
        if isinstance(class_weights, list) and (min(class_weights) < 0 or not any(class_weights)):
            raise ValueError(
                f"`class_weights` must be at least 0, and one above, got {class_weights}."
            )
        # A buffer, so that a checkpoint evaluates with the weights that it was trained with.
        self.register_buffer("class_weights", None if weights is None else torch.tensor(weights))
        metrics = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(num_classes, average="micro"),
                "macro_f1": MulticlassF1Score(num_classes, average="macro"),
            }
        )
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")
        self.val_ledger = ComputeLedger(self.net)
        self.test_ledger = ComputeLedger(self.net)
        # Of the last validation or test; logged values are its figures rounded to float32.
        self.compute_report: ComputeReport | None = None
        # How the data that it was trained on became its inputs; brought by a checkpoint.
        self.preparation: dict[str, Any] | None = None
        self._gates: list[GateLike] = []
        self._whole_net: WholeNet | None = None  # counted in the first evaluation
        self._is_counted = False

    @override
    def setup(self, stage: str) -> None:
        self._is_counted = False  # inputs may be of another size
        if stage == "fit" and not self._keeps_masks() and forget_masks(self):
            rank_zero_warn(_SPARSE)
        data: Any = getattr(self.trainer, "datamodule", None)
        if stage != "fit" and self.preparation is not None and hasattr(data, "use_preparation"):
            data.use_preparation(self.preparation)
        for name in ("num_classes", "input_shape"):
            own, theirs = self.hparams.get(name), getattr(data, name, None)
            if own is not None and theirs is not None and _plain(own) != _plain(theirs):
                raise ValueError(
                    f"The model has {name} {_plain(own)}, {type(data).__name__} has "
                    f"{_plain(theirs)}: set model.{name}={_plain(theirs)}, or give the data that a "
                    "checkpoint was trained on."
                )
        if self.balanced and stage == "fit":
            weights = getattr(data, "class_weights", None)
            if weights is None:
                raise ValueError(
                    "`class_weights='balanced'` needs a DataModule with `class_weights`; "
                    "give the weights as a list instead."
                )
            assert isinstance(self.class_weights, Tensor)
            self.class_weights.copy_(torch.as_tensor(weights))

    def _keeps_masks(self) -> bool:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return any(hasattr(callback, "connections") for callback in callbacks)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the name of every hook that it calls, 48 times a step, and a module asks
        # of every attribute whether it is a parameter.
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def task_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy with class weights and label smoothing."""
        weight = self.class_weights
        assert weight is None or isinstance(weight, Tensor)
        return F.cross_entropy(logits, target, weight, label_smoothing=self.label_smoothing)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        task_loss = loss = self.task_loss(self(x), target)
        auxiliary_loss = getattr(self.net, "auxiliary_loss", None)
        auxiliary: Tensor | None = None if auxiliary_loss is None else auxiliary_loss()
        if auxiliary is not None:
            loss = loss + auxiliary
        # At the end of an epoch monitors look at it, else only loggers do.
        trainer: Any = self._trainer
        # A compiled step must not hang on the number of the batch: it would be compiled anew.
        always = torch.compiler.is_compiling()
        if trainer is not None and (always or logs_now(trainer) or trainer.is_last_batch):
            self.log("train/task_loss", task_loss.detach())
            if auxiliary is not None:
                self.log("train/aux_loss", auxiliary.detach())
            self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    @override
    def on_train_start(self) -> None:
        keep_settings_live(self, self.trainer)
        self._gates = list(gate_layers(self.net, required=False).values())

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        forget_logged(self.trainer, "train/loss", "train/task_loss", "train/aux_loss")

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        release(self._gates)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate(batch, "val", self.val_metrics, self.val_ledger)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate(batch, "test", self.test_metrics, self.test_ledger)

    def _evaluate(
        self,
        batch: tuple[Tensor, Tensor],
        stage: str,
        metrics: MetricCollection,
        ledger: ComputeLedger,
    ) -> dict[str, Tensor]:
        x, target = batch
        samples = len(target)
        known = self._is_counted or torch.compiler.is_compiling()
        with nullcontext() if known else CountWholeNet(self.net) as count:
            logits = self(x)
        if count is not None:
            self._whole_net, self._is_counted = count.whole(samples), True
        self.log(
            f"{stage}/loss", self.task_loss(logits, target), batch_size=samples, sync_dist=True
        )
        metrics.update(logits, target)
        for name, metric in metrics.items(keep_base=False, copy_state=False):
            self.log(name, metric, batch_size=samples, prog_bar=name == "val/accuracy")
        ledger.update(self.net, samples)
        return {"logits": logits}  # for callbacks

    @override
    def on_validation_epoch_start(self) -> None:
        self.val_ledger.reset()  # an interrupted evaluation may have left something

    @override
    def on_test_epoch_start(self) -> None:
        self.test_ledger.reset()

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_compute(self.val_ledger)

    def _log_compute(self, ledger: ComputeLedger) -> None:
        self.compute_report = ledger.report(self.net, self._whole_net)
        if self.compute_report.uncounted and not self.trainer.sanity_checking:
            rank_zero_warn(
                "The shares of compute/... are of the linear maps alone, without "
                f"{', '.join(self.compute_report.uncounted)}."
            )
        for key, value in self.compute_report.logged().items():
            self.log(key, value, sync_dist=True, prog_bar=key == "compute/macs_share")

    @override
    def on_test_epoch_end(self) -> None:
        self._log_compute(self.test_ledger)
        assert self.compute_report is not None
        if self.trainer.is_global_zero:
            import rich

            rich.print(self.compute_report.table())

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        probability = self(x).float().softmax(-1)
        return {"prediction": probability.argmax(-1), "probability": probability}

    def gate_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all gates."""
        gates = gate_layers(self.net, required=False).values()
        return [p for gate in gates if isinstance(gate, nn.Module) for p in gate.parameters()]

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        gate_parameters = self.gate_parameters()
        of_gates = {id(parameter) for parameter in gate_parameters}
        groups = [{"params": [p for p in self.net.parameters() if id(p) not in of_gates]}]
        if gate_parameters:
            groups.append({"params": gate_parameters})
        optimizer = build(self.optimizer, "optimizer", torch.optim.Optimizer, groups)
        for group in optimizer.param_groups[1:]:
            group["lr"] = group["lr"] * self.gate_lr_factor
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
        if self.lr_scheduler is None:
            return optimizer
        scheduler = build(self.lr_scheduler, "lr_scheduler", LRScheduler, optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
        if gate_parameters and not math.isclose(rates[1], rates[0] * self.gate_lr_factor):
            raise ValueError(
                f"{type(scheduler).__name__} sets learning rates itself and ignores "
                f"`gate_lr_factor={self.gate_lr_factor}`: give it a list, for weights and for "
                "gates, and leave the factor at 1."
            )
        config: dict[str, Any] = {"scheduler": scheduler, "interval": self.lr_scheduler_interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            config["monitor"] = getattr(scheduler, "monitor", self.lr_scheduler_monitor)
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The ledger must know missing connections where no sparse callback is there to say so.
        # A fit without that callback would fill them again.
        if self._trainer is None or self._trainer.state.fn != "fit":
            announce_masks(self, saved_masks(checkpoint))
        elif saved_masks(checkpoint) and not self._keeps_masks():
            rank_zero_warn(_SPARSE)
        self.preparation = preparation_in(checkpoint)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.gate_clip_norm is not None:
            clip_grad_norm_(self.gate_parameters(), self.gate_clip_norm)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def _plain(value: int | Sequence[int]) -> int | list[int]:
    return value if isinstance(value, int) else list(value)
