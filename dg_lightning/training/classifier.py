"""GatedClassifier: a LightningModule for classification with any net, gated or not."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from typing_extensions import override

from dg_lightning.training.module import (
    GatedModule,
    balanced_weights,
    check_class_weights,
    known_num_classes,
    unsaved_arguments,
)
from dg_lightning.training.spec import NetConfig, OptimizerConfig, SchedulerConfig, as_config


class GatedClassifier(GatedModule):
    """Trains a net with cross-entropy, and reports its accuracy and executed MACs.

    Args:
        net: Class path and arguments of the net, or a module, which must be passed again to load a
            checkpoint. A class is also passed `in_features`, `input_shape` and `num_classes`,
            unless it lacks the parameter or the argument is already set.
        input_shape: Shape of one sample. The command line reads it from the data.
        num_classes: Number of classes. The command line reads it from the data.
        optimizer: Class path and arguments. The default is AdamW with a learning rate of 0.001.
        lr_scheduler: Class path and arguments. There is no scheduler by default.
        lr_scheduler_interval: Whether the scheduler steps every epoch or every optimizer step.
        lr_scheduler_monitor: Logged value that `ReduceLROnPlateau` monitors.
        class_weights: Weight of each class in the loss. `balanced` uses the DataModule's weights.
        label_smoothing: Share of the target that is spread over all classes.
        gate_lr_factor: Learning rate of gate logits and biases, as a multiple of the optimizer's.
            Weight decay is not applied to them, because it would pull p to 0.5. Weight matrices in
            GateNets are trained like other weights.
        gate_clip_norm: Maximum gradient norm of all gate parameters together.
        cuda_graphs: Whether to replay training steps as CUDA graphs, see `CapturedSteps`. The
            optimizer is then `fused` if possible.

    | logged key | meaning |
    |---|---|
    | `train/loss` | training loss: sum of task and auxiliary loss |
    | `train/task_loss`, `train/aux_loss` | its terms; `aux_loss` only with `auxiliary_loss()` |
    | `val/loss`, `val/accuracy`, `val/macro_f1`, `test/...` | computed with hard gates |
    | `compute/...` | MACs in validation and test, see `ComputeReport.metrics` |

    >>> net = {"class_path": "GatedMLP", "init_args": {"hidden": [16], "gate": {"kind": "static"}}}
    >>> GatedClassifier(net, input_shape=[64], num_classes=10)(torch.randn(2, 64)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        net: NetConfig,
        input_shape: Sequence[int] | None = None,
        num_classes: int | None = None,
        optimizer: OptimizerConfig | None = None,
        lr_scheduler: SchedulerConfig | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        lr_scheduler_monitor: str = "val/loss",
        class_weights: list[float] | Literal["balanced"] | None = None,
        label_smoothing: float = 0.0,
        gate_lr_factor: float = 1.0,
        gate_clip_norm: float | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        classes = known_num_classes(num_classes, as_config(net))
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"`label_smoothing` must be in [0, 1], got {label_smoothing}.")
        metrics = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(classes, average="micro"),
                "macro_f1": MulticlassF1Score(classes, average="macro"),
            }
        )
        super().__init__(
            net,
            input_shape,
            classes,
            metrics,
            optimizer,
            lr_scheduler,
            lr_scheduler_interval,
            lr_scheduler_monitor,
            gate_lr_factor,
            gate_clip_norm,
            cuda_graphs,
        )
        self.save_hyperparameters(ignore=unsaved_arguments(net))
        self.label_smoothing = label_smoothing
        self.balanced = class_weights == "balanced"
        weights = [1.0] * classes if class_weights == "balanced" else class_weights
        check_class_weights(weights, classes)
        # A buffer, so that a loaded model is evaluated with the class weights from its training.
        self.register_buffer("class_weights", None if weights is None else torch.tensor(weights))

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.balanced and stage == "fit":
            assert isinstance(self.class_weights, Tensor)
            data: Any = getattr(self.trainer, "datamodule", None)
            self.class_weights.copy_(balanced_weights(data))

    @override
    def task_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy with class weights and label smoothing."""
        weight: Any = self.class_weights
        return F.cross_entropy(logits, target, weight, label_smoothing=self.label_smoothing)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        probability = self(x).float().softmax(-1)
        return {"prediction": probability.argmax(-1), "probability": probability}
