"""GatedLM: a LightningModule for next-token prediction with any net, gated or not."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from dg_lightning.layers import GatedFeedForward
from dg_lightning.runtime.skipping import Engine, skip_closed_blocks
from dg_lightning.training.module import GatedModule, known_num_classes, unsaved_arguments
from dg_lightning.training.spec import NetConfig, OptimizerConfig, SchedulerConfig, as_config


class GatedLM(GatedModule):
    """Trains a language model and counts the executed MACs per token.

    Batches are pairs of tokens and next tokens, both with shape ``(batch, tokens)``.

    Args:
        net: Net that maps tokens to logits for the next token. It is given as a class path, such
            as `dg_lightning.layers.GPT`, with arguments, or as a module, which must be passed again
            to load a checkpoint.
        input_shape: Context length, as a shape. The command line reads it from the data.
        num_classes: Size of the vocabulary. The command line reads it from the data.
        optimizer: Class path and arguments. The default is AdamW with a learning rate of 0.001.
        lr_scheduler: Class path and arguments. There is no scheduler by default.
        lr_scheduler_interval: Whether the scheduler steps every epoch or every optimizer step.
        lr_scheduler_monitor: Logged value that `ReduceLROnPlateau` monitors.
        gate_lr_factor: Learning rate of gate logits and biases, as a multiple of the optimizer's.
            Weight decay is not applied to them. Weight matrices in GateNets are trained like other
            weights.
        gate_clip_norm: Maximum gradient norm of all gate parameters together.
        cuda_graphs: Whether to replay training steps as CUDA graphs, see `CapturedSteps`. The
            optimizer is then `fused` if possible.
        engine: How feed-forwards skip closed blocks, see `runtime.skip_closed_blocks`. `masked`
            computes all blocks, so training does not depend on the machine. Prediction always
            skips closed blocks.

    | logged key | meaning |
    |---|---|
    | `train/loss` | training loss: sum of task and auxiliary loss |
    | `train/task_loss`, `train/aux_loss` | its terms; `aux_loss` only with `auxiliary_loss()` |
    | `val/loss`, `test/loss` | cross-entropy per token in nats, with hard gates |
    | `val/accuracy`, `test/accuracy` | share of tokens for which the top prediction is correct |
    | `compute/...` | MACs per token in validation and test, see `ComputeReport.metrics` |

    >>> net = {"class_path": "dg_lightning.layers.GPT", "init_args": {"width": 32, "heads": 2}}
    >>> GatedLM(net, input_shape=[16], num_classes=256).net.context
    16
    """

    input_dtype = torch.long

    def __init__(
        self,
        net: NetConfig,
        input_shape: Sequence[int] | None = None,
        num_classes: int | None = None,
        optimizer: OptimizerConfig | None = None,
        lr_scheduler: SchedulerConfig | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "step",
        lr_scheduler_monitor: str = "val/loss",
        gate_lr_factor: float = 1.0,
        gate_clip_norm: float | None = None,
        cuda_graphs: bool = False,
        engine: Engine = "masked",
    ) -> None:
        tokens = known_num_classes(num_classes, as_config(net))
        super().__init__(
            net,
            input_shape,
            tokens,
            MetricCollection({"accuracy": MulticlassAccuracy(tokens, average="micro")}),
            optimizer,
            lr_scheduler,
            lr_scheduler_interval,
            lr_scheduler_monitor,
            gate_lr_factor,
            gate_clip_norm,
            cuda_graphs,
        )
        self.save_hyperparameters(ignore=unsaved_arguments(net))
        if engine != "masked":
            skip_closed_blocks(self.net, engine)

    @override
    def task_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy over all tokens, in nats."""
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())

    @override
    def num_samples(self, target: Tensor) -> int:
        return target.numel()  # a sample is a token

    @override
    def metric_inputs(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return logits.flatten(0, -2), target.flatten()

    @override
    def required_sizes(self, stage: str) -> tuple[str, ...]:
        # Prompts may have any length.
        return ("num_classes",) if stage == "predict" else super().required_sizes(stage)

    @override
    def on_predict_start(self) -> None:
        if any(isinstance(child, GatedFeedForward) for child in self.net.modules()):
            skip_closed_blocks(self.net)

    @override
    def on_predict_end(self) -> None:
        if any(isinstance(child, GatedFeedForward) for child in self.net.modules()):
            skip_closed_blocks(self.net, self.hparams["engine"])

    @override
    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Continue a batch of prompts with tokens sampled from the model."""
        net: Any = self.net
        length, temperature = int(batch["length"][0]), float(batch["temperature"][0])
        generator = torch.Generator(self.device)
        generator.manual_seed(torch.initial_seed() + self.global_rank)  # differs by rank
        options = {"cuda_graph": True} if self.cuda_graphs else {}
        tokens: Tensor = net.generate(batch["prompt"], length, temperature, generator, **options)
        return tokens
