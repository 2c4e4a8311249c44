"""What the program leaves in the run's folder: the whole config, and predictions."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

__all__ = ["SaveWholeConfig", "WritePredictions", "plain"]


def plain(parser: LightningArgumentParser, settings: Namespace) -> dict[str, Any]:
    """Return settings as numbers, strings, lists and dicts: what YAML and JSON both hold."""
    values: dict[str, Any] = json.loads(parser.dump(settings, format="json"))
    return values


class SaveWholeConfig(SaveConfigCallback):
    """Saves the resolved config into the run's folder, and hands all of it to every logger."""

    @override
    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams({"config": plain(self.parser, self.config)})


class WritePredictions(BasePredictionWriter):
    """Writes what `predict` returns into the run's folder, one file a process."""

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    @override
    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        suffix = f"_{trainer.global_rank}" if trainer.world_size > 1 else ""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"predictions{suffix}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            names = getattr(getattr(trainer, "datamodule", None), "class_names", None)
            writer.writerow(["index", "prediction", "probability", *(["class"] if names else [])])
            # One dataloader: its batches, each with the indices of its samples.
            for batch, indices in zip(predictions, batch_indices[0], strict=True):
                labels = batch["prediction"].tolist()
                chances = batch["probability"].amax(-1).tolist()
                for index, label, chance in zip(indices, labels, chances, strict=True):
                    name = [names[label]] if names else []
                    writer.writerow([index, label, f"{chance:.6f}", *name])
        files = "a file a process" if suffix else "predictions.csv"
        rank_zero_info(f"Predictions are in {folder}, {files}.")
