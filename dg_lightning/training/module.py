"""GatedModule: the base class of this package's LightningModules."""

import inspect
import math
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Literal, cast

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torchmetrics import MetricCollection
from typing_extensions import override

from dg_lightning.compute.metric import ComputeLedger, ComputeReport
from dg_lightning.compute.whole_net import FlopRecorder, WholeNet
from dg_lightning.gates.protocol import GateLike, detach_graph, gate_layers
from dg_lightning.rewiring import announce_masks, forget_masks, saved_masks
from dg_lightning.surgery import restore_gates
from dg_lightning.training.averaging import keep_settings_live
from dg_lightning.training.captured import CapturedSteps
from dg_lightning.training.checkpoint import (
    TrustedLoading,
    check_weights,
    preparation_in,
    warn_unfinished_epoch,
)
from dg_lightning.training.optimizers import (
    build_optimizers,
    enable_fused,
    has_fused_unscale,
    may_be_fused,
    warn_scheduler_length,
)
from dg_lightning.training.spec import (
    NetConfig,
    OptimizerConfig,
    SchedulerConfig,
    as_config,
    build,
)


def unsaved_arguments(net: Any) -> list[str]:
    """Return the arguments to leave out of checkpoints: a net passed as a module."""
    return ["net"] if isinstance(net, nn.Module) else []


def known_num_classes(num_classes: int | None, net: Any) -> int:
    """Return the number of classes, from the net's arguments if not given."""
    if num_classes is None and isinstance(net, Mapping):
        num_classes = (net.get("init_args") or {}).get("num_classes")
    if num_classes is None:
        raise ValueError(
            "`num_classes` is not set: pass it. On the command line, the DataModule can define it."
        )
    if num_classes < 2:
        raise ValueError(
            f"`num_classes` must be at least 2, got {num_classes}: use GatedRegressor for "
            "regression."
        )
    return num_classes


def check_settings(gate_lr_factor: float, gate_clip_norm: float | None) -> None:
    """Check that the gate settings are in range."""
    if gate_lr_factor < 0:
        raise ValueError(f"`gate_lr_factor` must be at least 0, got {gate_lr_factor}.")
    if gate_clip_norm is not None and gate_clip_norm <= 0:
        raise ValueError(f"`gate_clip_norm` must be above 0, got {gate_clip_norm}.")


def check_sizes(
    hparams: Mapping[str, Any], data: Any, names: Sequence[str] = ("num_classes", "input_shape")
) -> None:
    """Check that the data has the model's number of classes and input shape."""
    for name in names:
        own, theirs = hparams.get(name), getattr(data, name, None)
        if own is not None and theirs is not None and _size_as_list(own) != _size_as_list(theirs):
            raise ValueError(
                f"The model has {name} {_size_as_list(own)}, but {type(data).__name__} "
                f"has {_size_as_list(theirs)}: set model.{name}={_size_as_list(theirs)}, or use "
                "the data that the checkpoint was trained on."
            )


def check_class_weights(weights: Sequence[float] | None, num_classes: int) -> None:
    """Check that class weights match the classes and are not negative or all 0."""
    if weights is None:
        return
    if len(weights) != num_classes:
        raise ValueError(
            f"`class_weights` must have {num_classes} entries, one per class, got {len(weights)}."
        )
    if min(weights) < 0 or not any(weights):
        raise ValueError(f"`class_weights` must be at least 0, and not all 0, got {weights}.")


def balanced_weights(data: Any) -> Tensor:
    """Return the class weights that a DataModule provides."""
    weights = getattr(data, "class_weights", None)
    if weights is None:
        raise ValueError(
            "`class_weights='balanced'` needs a DataModule with `class_weights`: use one, or pass "
            "a list of weights."
        )
    return torch.as_tensor(weights)


def _size_as_list(value: int | Sequence[int]) -> int | list[int]:
    return value if isinstance(value, int) else list(value)


def check_unscaled_gradients(trainer: Any, optimizer: Any) -> None:
    """Reject `gate_clip_norm` if gradients stay scaled until the optimizer step."""
    if has_fused_unscale(trainer, optimizer):
        raise ValueError(
            "`gate_clip_norm` needs unscaled gradients, but a fused optimizer unscales them in its "
            "step: set fused=False, or train without a loss scaler."
        )


_SPARSE = (
    "The model was sparse, but no callback keeps it sparse, so its missing connections will "
    "return: add StaticSparse, RigL or another sparse callback."
)


class GatedModule(CapturedSteps, TrustedLoading):
    """Trains a net, gated or not, and counts its executed MACs.

    All arguments are plain values, so `load_from_checkpoint(path)` needs no further arguments and
    no pickled code. Only a net passed as a module must be passed again. In validation and test,
    metrics and MACs come from the same forward passes with hard gates. A subclass calls
    `save_hyperparameters` and defines `task_loss(logits, target)`.

    Args:
        net: Class path and arguments of the net, or a module. A class is also passed
            `in_features`, `input_shape` and `num_classes`, unless it lacks the parameter or the
            argument is already set.
        input_shape: Shape of one sample. The command line reads it from the data.
        num_classes: Number of classes. The command line reads it from the data.
        metrics: Metrics to compute from logits and targets, by logged name.
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
    """

    input_dtype = torch.float32  # dtype of samples

    def __init__(
        self,
        net: NetConfig,
        input_shape: Sequence[int] | None,
        num_classes: int,
        metrics: MetricCollection,
        optimizer: OptimizerConfig | None = None,
        lr_scheduler: SchedulerConfig | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        lr_scheduler_monitor: str = "val/loss",
        gate_lr_factor: float = 1.0,
        gate_clip_norm: float | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        sizes: dict[str, Any] = {"num_classes": num_classes}
        if input_shape is not None:
            sizes |= {"input_shape": tuple(input_shape), "in_features": math.prod(input_shape)}
            self.example_input_array = torch.zeros(1, *input_shape, dtype=self.input_dtype)
        if not isinstance(net, nn.Module):
            net = build(as_config(net), "net", nn.Module, **sizes)
        self.net = net
        adam: OptimizerConfig = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}
        self.optimizer: OptimizerConfig = as_config(optimizer) or adam
        self.lr_scheduler: SchedulerConfig | None = as_config(lr_scheduler)
        self.lr_scheduler_interval = lr_scheduler_interval
        self.lr_scheduler_monitor = lr_scheduler_monitor
        self.gate_lr_factor = gate_lr_factor
        self.gate_clip_norm, self.cuda_graphs = gate_clip_norm, cuda_graphs
        check_settings(gate_lr_factor, gate_clip_norm)
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")
        self.val_ledger = ComputeLedger(self.net)
        self.test_ledger = ComputeLedger(self.net)
        # Report on the last validation or test. The logged values are its figures in float32.
        self.compute_report: ComputeReport | None = None
        # How the training data was prepared, as loaded from a checkpoint.
        self.preparation: dict[str, Any] | None = None
        self._stage: str | None = None  # stage of the Trainer
        self._gates: list[GateLike] = []
        self._whole_net: WholeNet | None = None  # set in the first evaluation
        self._is_counted = False

    @override
    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save plain values only, not modules or values that LightningCLI adds."""
        caller = frame or cast(FrameType, inspect.currentframe()).f_back
        super().save_hyperparameters(*args, ignore=ignore, frame=caller, logger=logger)
        # Remove LightningCLI's instantiator, because `load_from_checkpoint` would call it. If there
        # is one, LightningCLI has already added the class path where it is needed.
        if self.hparams.pop("_instantiator", None) is None:
            path = f"{type(self).__module__}.{type(self).__qualname__}"
            self.hparams.setdefault("_class_path", path)
        for name, value in list(self.hparams.items()):
            self.hparams[name] = as_config(value)

    def task_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch, without auxiliary losses."""
        raise NotImplementedError(f"{type(self).__name__} must define `task_loss`.")

    def num_samples(self, target: Tensor) -> int:
        """Return the number of samples in a batch."""
        return len(target)

    def metric_inputs(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predictions and targets for the metrics."""
        return logits, target

    def required_sizes(self, stage: str) -> tuple[str, ...]:
        """Return the sizes that a stage's data must share with the training data."""
        return ("num_classes", "input_shape")

    @override
    def setup(self, stage: str) -> None:
        self._stage = stage
        self._is_counted = False  # inputs may have another size
        if stage == "fit" and not self._keeps_masks() and forget_masks(self):
            rank_zero_warn(_SPARSE)
        data: Any = getattr(self.trainer, "datamodule", None)
        if stage != "fit" and self.preparation is not None and hasattr(data, "use_preparation"):
            data.use_preparation(self.preparation)
        check_sizes(self.hparams, data, self.required_sizes(stage))

    def _keeps_masks(self) -> bool:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return any(hasattr(callback, "connections") for callback in callbacks)

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    @override
    def losses(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, target = batch
        task_loss = self.task_loss(self(x), target)
        auxiliary: Tensor | None = getattr(self.net, "auxiliary_loss", lambda: None)()
        if auxiliary is None:
            return {"task_loss": task_loss, "loss": task_loss}
        return {"task_loss": task_loss, "aux_loss": auxiliary, "loss": task_loss + auxiliary}

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        keep_settings_live(self, self.trainer)
        warn_scheduler_length(self.trainer)
        self._gates = list(gate_layers(self.net, required=False).values())

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        detach_graph(self._gates)

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
        samples = self.num_samples(target)
        if self._is_counted or torch.compiler.is_compiling():
            logits = self(x)
        else:
            logits = self._count(x, samples)
        loss = self.task_loss(logits, target)
        self.log(f"{stage}/loss", loss, batch_size=samples, sync_dist=True)
        metrics.update(*self.metric_inputs(logits, target))
        for name, metric in metrics.items(keep_base=False, copy_state=False):
            is_shown = name in ("val/accuracy", "val/r2")
            self.log(name, metric, batch_size=samples, prog_bar=is_shown)
        ledger.update(self.net, samples)
        return {"logits": logits}  # for callbacks

    def _count(self, x: Tensor, samples: int) -> Tensor:
        """Return the logits, and count the MACs of the whole net."""
        self._is_counted = True
        try:
            with FlopRecorder(self.net) as count:
                logits: Tensor = self(x)
        except Exception as error:
            logits = self(x)  # fails again if the net caused the error, not the counter
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            rank_zero_warn(f"The MACs of the whole net cannot be counted ({reason}).")
            return logits
        self._whole_net = count.result(samples)
        return logits

    @override
    def on_validation_epoch_start(self) -> None:
        self.val_ledger = ComputeLedger(self.net).to(self.device)  # gates may have changed

    @override
    def on_test_epoch_start(self) -> None:
        self.test_ledger = ComputeLedger(self.net).to(self.device)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_compute(self.val_ledger)

    def _log_compute(self, ledger: ComputeLedger) -> None:
        self.compute_report = ledger.report(self.net, self._whole_net)
        if self.compute_report.uncounted and not self.trainer.sanity_checking:
            rank_zero_warn(
                "The shares in compute/... cover only linear layers and omit "
                f"{', '.join(self.compute_report.uncounted)}."
            )
        for key, value in self.compute_report.metrics().items():
            self.log(key, value, sync_dist=True, prog_bar=key == "compute/macs_share")

    @override
    def on_test_epoch_end(self) -> None:
        self._log_compute(self.test_ledger)
        assert self.compute_report is not None
        if self.trainer.is_global_zero:
            import rich

            rich.print(self.compute_report.table())

    def gate_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all gates."""
        gates = gate_layers(self.net, required=False).values()
        return [p for gate in gates if isinstance(gate, nn.Module) for p in gate.parameters()]

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        scheduling = self.lr_scheduler, self.lr_scheduler_interval, self.lr_scheduler_monitor
        optimizer = self.optimizer
        on_gpu = self.device.type == "cuda"
        if (
            self.cuda_graphs
            and on_gpu
            and may_be_fused(self.trainer, self.gate_clip_norm is not None)
        ):
            optimizer = enable_fused(optimizer)
        return build_optimizers(self.net, optimizer, self.gate_lr_factor, *scheduling)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Without a sparse callback, this is how the ledger learns about missing connections.
        # Training without the callback would fill them again.
        if self._stage != "fit":
            announce_masks(self, saved_masks(checkpoint))
        elif saved_masks(checkpoint) and not self._keeps_masks():
            rank_zero_warn(_SPARSE)
        if self._stage == "fit":
            warn_unfinished_epoch(self.trainer, checkpoint)
        self.preparation = preparation_in(checkpoint)
        restore_gates(self, checkpoint)
        check_weights(checkpoint["state_dict"], self)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.gate_clip_norm is not None:
            check_unscaled_gradients(self.trainer, optimizer)
            clip_grad_norm_(self.gate_parameters(), self.gate_clip_norm)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
