"""Command output: files in the run folder and a printed summary."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core.rank_zero import rank_zero_info
from torchmetrics.classification import MulticlassConfusionMatrix
from typing_extensions import override

from dg_lightning import GatedClassifier
from dg_lightning.cli.runs import RUN_FILE
from dg_lightning.configs import config_name
from dg_lightning.files import write_csv, write_text
from dg_lightning.gates import gate_layers
from dg_lightning.monitoring import run_folder
from dg_lightning.monitoring.views import watched_gates
from dg_lightning.training.module import GatedModule
from dg_lightning.versions import versions

# Metrics that summaries show if they are logged: key after the stage -> (name, format).
_METRICS = {
    "loss": ("loss", ".4f"),
    "accuracy": ("accuracy", ".2%"),
    "macro_f1": ("macro-F1", ".2%"),
    "r2": ("R²", ".4f"),
    "rmse": ("RMSE", ".4g"),
}
_COMPUTE = {
    "compute/macs": ("executed MACs per sample", ",.0f"),
    "compute/macs_share": ("relative to dense", ".2%"),
}
_STAGES = {"train": "training", "val": "validation"}
_LAYER_PREFIX = "gates/open_rate/"


def find_non_finite(trainer: Any) -> str | None:
    """Describe weights or losses that are not finite after training, or return None."""
    advice = "lower the learning rate, or set trainer.gradient_clip_val"
    weights = trainer.lightning_module.named_parameters()
    non_finite = [name for name, weight in weights if not bool(weight.detach().isfinite().all())]
    if non_finite:
        return (
            f"weights such as {non_finite[0]} are not finite ({len(non_finite)} in total); {advice}"
        )
    for key, value in trainer.callback_metrics.items():
        if key.rpartition("/")[2].endswith("loss") and not math.isfinite(float(value)):
            return f"{key} is {float(value)}; {advice}"
    return None


def print_summary(trainer: Any) -> None:
    """Print the final metrics of a training run, its folder, and the command for a report."""
    from rich.markup import escape

    logged = trainer.callback_metrics
    rows = [("epochs, optimizer steps", f"{trainer.current_epoch:,}, {trainer.global_step:,}")]
    rows += _rows(logged, "train", ["loss"]) + _rows(logged, "val", list(_METRICS))
    rows += _rows(logged, "", list(_COMPUTE))
    if "gates/open_rate" in logged:
        rows.append(("open units", f"{float(logged['gates/open_rate']):.2%}"))
    for key, value in logged.items():
        if key.startswith(_LAYER_PREFIX):
            rows.append((f"  {escape(key.removeprefix(_LAYER_PREFIX))}", f"{float(value):.2%}"))
    gates = gate_layers(trainer.lightning_module, required=False)
    if unwatched := len(gates.keys() - set(watched_gates(trainer.callbacks))):
        rows.append((f"{unwatched} of {len(gates)} gates", "not watched for collapse"))
    _print_table("Training ended", rows)
    _print(
        f"The run is in {run_folder(trainer)}. Report: dg-lightning report {run_folder(trainer)}"
    )


def print_evaluation(trainer: Any, stage: str) -> None:
    """Print the metrics of a test or a validation, and the folder with all of them."""
    logged = trainer.callback_metrics
    if isinstance(trainer.lightning_module, GatedModule):
        names = [name for name in _METRICS if name != "loss" and f"{stage}/{name}" in logged]
        rows = _rows(logged, stage, names or ["loss"]) + _rows(logged, "", list(_COMPUTE))
    else:
        rows = [(key, f"{float(value):.4g}") for key, value in logged.items()]
    _print_table(f"{_STAGES.get(stage, stage).capitalize()} ended", rows)
    if trainer.loggers:
        _print(f"All metrics are in {run_folder(trainer)}.")


def _rows(logged: Mapping[str, Any], stage: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names and values of metrics that were logged."""
    rows = []
    for name in names:
        label, form = (_METRICS | _COMPUTE)[name]
        key = f"{stage}/{name}" if stage else name
        if key in logged:
            rows.append((f"{_STAGES.get(stage, stage)} {label}".strip(), f"{logged[key]:{form}}"))
    return rows


def _print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _print(text: str) -> None:
    """Print text outside of any table, so that it can be copied."""
    from rich.console import Console

    Console().print(text, soft_wrap=True, markup=False, highlight=False)


def to_plain(parser: LightningArgumentParser, settings: Namespace) -> dict[str, Any]:
    """Return settings as plain values that YAML and JSON can represent."""
    values: dict[str, Any] = json.loads(parser.dump(settings, format="json", skip_validation=True))
    return values


class SaveWholeConfig(SaveConfigCallback):
    """Saves the resolved config in the run folder and logs it to every logger."""

    @override
    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        config = json.loads(self.parser.dump(self.config, format="json", skip_unset=False))
        if isinstance(pl_module, GatedModule):
            model = dict(pl_module.hparams)
            saved = {"class_path": model.pop("_class_path"), "init_args": model}
            if saved != to_plain(self.parser, self.config)["model"]:  # from a checkpoint
                config["model"] = saved
        for logger in trainer.loggers:
            logger.log_hyperparams({"config": config, "versions": versions()})
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        _ensure_csv_logger(trainer)
        # Without a logger, all runs share a folder, and `test` must not overwrite the `fit` config.
        command: Any = trainer.state.fn
        is_own_folder = trainer.loggers or command == "fit"
        folder = run_folder(trainer)
        name = "config.yaml" if is_own_folder else f"config_{command.value}.yaml"
        write_text(folder / name, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        write_text(folder / "versions.json", json.dumps(versions()))
        if is_own_folder:
            configs = [config_name(str(path)) for path in self.config.get("config") or []]
            record = {"command": command.value, "configs": configs}
            write_text(folder / RUN_FILE, json.dumps(record))


def _ensure_csv_logger(trainer: Any) -> None:
    """Add a CSV logger if there is none, because reports read metrics from the run folder."""
    writes = [hasattr(getattr(x, "experiment", None), "metrics_file_path") for x in trainer.loggers]
    if trainer.loggers and not any(writes):
        folder = run_folder(trainer)
        save_dir, name = folder.parent.parent, folder.parent.name
        trainer.loggers.append(CSVLogger(save_dir, name, version=folder.name))
        _ = trainer.loggers[-1].experiment  # creates the folder


class WritePredictions(BasePredictionWriter):
    """Writes the outputs of `predict` to the run folder, in sample order."""

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
        folder = trainer.strategy.broadcast(run_folder(trainer))
        data = getattr(trainer, "datamodule", None)
        descriptions: dict[str, Any] = getattr(data, "describe_samples", dict)()
        key, *known = descriptions or {"index": ()}
        names = _class_names(trainer)
        rows: dict[int, list[Any]] = {}
        # There is only one dataloader. `batch_indices[0]` lists the sample indices of each batch.
        for batch, indices in zip(predictions, batch_indices[0], strict=True):
            found = batch["prediction"].tolist()
            columns = [[names[label] for label in found] if names else found]
            if isinstance(pl_module, GatedClassifier):
                columns.append([f"{chance:.6f}" for chance in batch["probability"].amax(-1)])
            for index, *predicted in zip(indices, *columns, strict=True):
                about = [descriptions[name][index] for name in descriptions] or [index]
                rows[index] = [about[0], *predicted, *about[1:]]
        merged = _gathered(trainer, rows)
        if trainer.is_global_zero:
            head = [key, "prediction", *["probability"] * isinstance(pl_module, GatedClassifier)]
            table = [[*head, *known], *(merged[i] for i in sorted(merged))]
            write_csv(folder / "predictions.csv", table)
        rank_zero_info(f"Predictions are in {folder}/predictions.csv.")


def _gathered(trainer: pl.Trainer, own: dict[int, Any]) -> dict[int, Any]:
    """Merge the values from all ranks into one dict, keyed by sample index."""
    parts = [own] * trainer.world_size
    if trainer.world_size > 1:
        dist.all_gather_object(parts, own)
    return {index: value for part in parts for index, value in part.items()}


class WriteSamples(BasePredictionWriter):
    """Prints the texts that `predict` generated, and writes them to the run folder."""

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
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        folder = trainer.strategy.broadcast(run_folder(trainer))
        own = {
            index: data.text_of(row)
            for batch, indices in zip(predictions, batch_indices[0], strict=True)
            for index, row in zip(indices, batch.tolist(), strict=True)
        }
        texts = [text for _, text in sorted(_gathered(trainer, own).items())]
        if not trainer.is_global_zero:
            return
        joined = f"\n{'-' * 80}\n".join(texts)
        path = folder / "samples.txt"
        write_text(path, joined)
        print(joined)
        rank_zero_info(f"Samples are in {path}.")


class WriteTestTables(pl.Callback):
    """Writes a test's compute ledger and confusion matrix to the run folder."""

    def __init__(self) -> None:
        self._confusion: MulticlassConfusionMatrix | None = None

    @override
    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, GatedClassifier):
            confusion = MulticlassConfusionMatrix(pl_module.num_classes)
            self._confusion = confusion.to(pl_module.device)

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
        if self._confusion is not None:
            self._confusion.update(outputs["logits"], batch[1])

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counts = [] if self._confusion is None else self._confusion.compute().tolist()
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = run_folder(trainer)
        if counts:
            names = _class_names(trainer) or [str(index) for index in range(len(counts))]
            # Rows are true classes, columns are predictions.
            rows = [[name, *row] for name, row in zip(names, counts, strict=True)]
            write_csv(folder / "confusion.csv", [["true class", *names], *rows])
        report: Any = pl_module.compute_report
        lines = [asdict(layer) for layer in report.layers]
        values = [list(line.values()) for line in lines]
        write_csv(folder / "compute.csv", [list(lines[0]), *values])


def _class_names(trainer: Any) -> list[str]:
    names = getattr(getattr(trainer, "datamodule", None), "class_names", None)
    return [str(name) for name in names or ()]
