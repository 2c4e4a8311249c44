"""GatedRegressor: a LightningModule for regression with any net, gated or not."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection, R2Score
from typing_extensions import override

from dg_lightning.training.module import GatedModule, unsaved_arguments
from dg_lightning.training.spec import NetConfig, OptimizerConfig, SchedulerConfig


class GatedRegressor(GatedModule):
    """Trains a regression net by least squares, and reports R² and executed MACs.

    The target is standardised by the mean and standard deviation in the DataModule's
    `target_scale`. Metrics and predictions are in the target's original units.

    Args:
        net: Class path and arguments of the net, or a module, which must be passed again to load a
            checkpoint. A class is also passed `in_features`, `input_shape` and `num_classes` (here
            1), unless it lacks the parameter or the argument is already set.
        input_shape: Shape of one sample. The command line reads it from the data.
        optimizer: Class path and arguments. The default is AdamW with a learning rate of 0.001.
        lr_scheduler: Class path and arguments. There is no scheduler by default.
        lr_scheduler_interval: Whether the scheduler steps every epoch or every optimizer step.
        lr_scheduler_monitor: Logged value that `ReduceLROnPlateau` monitors.
        gate_lr_factor: Learning rate of gate logits and biases, as a multiple of the optimizer's.
            Weight decay is not applied to them, because it would pull p to 0.5. Weight matrices in
            GateNets are trained like other weights.
        gate_clip_norm: Maximum gradient norm of all gate parameters together.
        cuda_graphs: Whether to replay training steps as CUDA graphs, see `CapturedSteps`. The
            optimizer is then `fused` if possible.

    | logged key | meaning |
    |---|---|
    | `train/loss` | mean squared error of the standardised target |
    | `val/loss`, `test/loss` | the same, with hard gates |
    | `val/r2`, `val/rmse`, `val/mae`, `test/...` | R² and errors, in the target's original units |
    | `compute/...` | MACs in validation and test, see `ComputeReport.metrics` |

    >>> net = {"class_path": "GatedMLP", "init_args": {"hidden": [16], "gate": {"kind": "static"}}}
    >>> GatedRegressor(net, input_shape=[8])(torch.randn(2, 8)).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        net: NetConfig,
        input_shape: Sequence[int] | None = None,
        optimizer: OptimizerConfig | None = None,
        lr_scheduler: SchedulerConfig | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        lr_scheduler_monitor: str = "val/loss",
        gate_lr_factor: float = 1.0,
        gate_clip_norm: float | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        errors = {"rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}
        super().__init__(
            net,
            input_shape,
            1,
            MetricCollection({"r2": R2Score(), **errors}),
            optimizer,
            lr_scheduler,
            lr_scheduler_interval,
            lr_scheduler_monitor,
            gate_lr_factor,
            gate_clip_norm,
            cuda_graphs,
        )
        self.save_hyperparameters(ignore=unsaved_arguments(net))
        self.num_classes = 0  # tells callbacks that there are no classes
        # Buffers, so that a loaded model predicts in the units of its training data.
        self.target_mean: Tensor
        self.target_std: Tensor
        self.register_buffer("target_mean", torch.tensor(0.0))
        self.register_buffer("target_std", torch.tensor(1.0))

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        if getattr(data, "class_names", None):
            raise ValueError(
                f"GatedRegressor predicts a number, but the labels of {type(data).__name__} are "
                "classes: use GatedClassifier, or set data.task=regression for a table."
            )
        if stage != "fit":
            return
        if (scale := getattr(data, "target_scale", None)) is None:
            rank_zero_warn(
                "GatedRegressor uses the raw target because the data has no `target_scale` (mean "
                "and standard deviation): the target should have mean 0 and standard deviation 1."
            )
        else:
            self.target_mean.fill_(scale[0])
            self.target_std.fill_(scale[1])

    def _in_units(self, output: Tensor) -> Tensor:
        return output.squeeze(-1).float() * self.target_std + self.target_mean

    @override
    def task_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error of the standardised target."""
        wanted = self._centred(target) / self.target_std
        return F.mse_loss(logits.squeeze(-1).float(), wanted)

    def _centred(self, target: Tensor) -> Tensor:
        if target.ndim == 2 and target.shape[1] == 1:
            target = target.squeeze(1)
        if target.ndim != 1:
            raise ValueError(
                f"The target must be one number per sample, got shape {list(target.shape)}."
            )
        return target.float() - self.target_mean

    @override
    def metric_inputs(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        # Subtracting the mean changes neither errors nor R², and keeps sums of squares exact.
        return logits.squeeze(-1).float() * self.target_std, self._centred(target)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        return {"prediction": self._in_units(self(x))}
