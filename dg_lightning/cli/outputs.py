"""What the program leaves in the run's folder: the whole config, predictions, tables of a test."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core.rank_zero import rank_zero_info
from torchmetrics.classification import MulticlassConfusionMatrix
from typing_extensions import override

from dg_lightning.dashboards import run_folder
from dg_lightning.versions import versions

__all__ = ["SaveWholeConfig", "WritePredictions", "WriteTestTables", "plain"]


def plain(parser: LightningArgumentParser, settings: Namespace) -> dict[str, Any]:
    """Return settings as numbers, strings, lists and dicts: what YAML and JSON both hold."""
    values: dict[str, Any] = json.loads(parser.dump(settings, format="json"))
    return values


class SaveWholeConfig(SaveConfigCallback):
    """Saves the resolved config into the run's folder, and hands all of it to every logger."""

    @override
    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        whole = {"config": plain(self.parser, self.config), "versions": versions()}
        for logger in trainer.loggers:
            logger.log_hyperparams(whole)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        _keep_metrics(trainer)
        # Without a logger all runs share a folder: a test must not replace the config of a fit.
        command: Any = trainer.state.fn
        own = trainer.loggers or command == "fit"
        path = _in_run_folder(trainer, "config.yaml" if own else f"config_{command.value}.yaml")
        self.parser.save(self.config, path, skip_unset=False, overwrite=True, multifile=False)
        path.with_name("versions.json").write_text(json.dumps(versions()), encoding="utf-8")


def _keep_metrics(trainer: Any) -> None:
    """Let the course of a run be in its folder, for reports, whatever its logger is."""
    writes = [hasattr(getattr(x, "experiment", None), "metrics_file_path") for x in trainer.loggers]
    if trainer.loggers and not any(writes):
        folder = run_folder(trainer)
        save_dir, name = folder.parent.parent, folder.parent.name
        trainer.loggers.append(CSVLogger(save_dir, name, version=folder.name))
        _ = trainer.loggers[-1].experiment  # makes the folder, before others write there


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
        folder = trainer.strategy.broadcast(run_folder(trainer))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"predictions{suffix}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            names = _class_names(trainer)
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


class WriteTestTables(pl.Callback):
    """Writes the confusion matrix and the compute ledger of a test into the run's folder."""

    def __init__(self) -> None:
        self._confusion: MulticlassConfusionMatrix | None = None

    @override
    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        classes: Any = pl_module.num_classes
        self._confusion = MulticlassConfusionMatrix(classes).to(pl_module.device)

    @override
    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert self._confusion is not None
        self._confusion.update(outputs["logits"], batch[1])

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._confusion is not None
        counts = self._confusion.compute().tolist()
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        names = _class_names(trainer) or [str(index) for index in range(len(counts))]
        with _in_run_folder(trainer, "confusion.csv").open(
            "w", newline="", encoding="utf-8"
        ) as file:
            # A row a true class, a column a predicted one.
            rows = [[name, *row] for name, row in zip(names, counts, strict=True)]
            csv.writer(file).writerows([["true class", *names], *rows])
        report: Any = pl_module.compute_report
        with _in_run_folder(trainer, "compute.csv").open("w", newline="", encoding="utf-8") as file:
            lines = [asdict(layer) for layer in report.layers]
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


def _in_run_folder(trainer: Any, name: str) -> Path:
    folder = run_folder(trainer)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def _class_names(trainer: Any) -> list[str]:
    names = getattr(getattr(trainer, "datamodule", None), "class_names", None)
    return [str(name) for name in names or ()]
