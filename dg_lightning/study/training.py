"""Training and test of one trial."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from typing_extensions import override

from dg_lightning.callbacks import BudgetController
from dg_lightning.compute.macs import needed_parameters
from dg_lightning.compute.report import ComputeReport
from dg_lightning.study.published import published, relative_macs_by_rule
from dg_lightning.study.settings import PlannedTrial
from dg_lightning.study.tables import TASK_KEYS

__all__ = ["RunCommand", "Stopwatch", "log_path", "run_folder", "train", "train_and_test"]

# Runs `fit` with arguments and extra callbacks; returns an object with trainer, model and
# datamodule. Provided by the command line.
RunCommand: TypeAlias = Callable[[Sequence[str], Sequence[pl.Callback]], Any]


class Stopwatch(pl.Callback):
    """Measures training time, and records the validation accuracy of every epoch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.accuracies: list[float] = []
        self._has_landed = False
        self._landing: list[float] = []  # of the last epoch before gates land, and until they have

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        accuracy = trainer.callback_metrics.get("val/accuracy")
        if not trainer.sanity_checking and trainer.state.fn == "fit" and accuracy is not None:
            self.accuracies.append(float(accuracy))
            controllers = [c for c in trainer.callbacks if isinstance(c, BudgetController)]  # type: ignore[attr-defined]
            if not any(c.frozen for c in controllers):
                self._landing = self.accuracies[-1:]
            elif not self._has_landed:
                self._landing.append(self.accuracies[-1])
                self._has_landed = any(c.landed for c in controllers)

    @property
    def landing_loss(self) -> float | None:
        """The validation accuracy that is lost while gates land, at worst; None without gates."""
        before, *after = self._landing or [0.0]
        return before - min(after) if after else None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._start


def log_path(folder: Path) -> Path:
    """Return the log file of a run, which holds its output and traceback."""
    return folder.with_name(f"{folder.name}.log")


def run_folder(output: Path, variant: str, seed: int) -> Path:
    """Return the folder of a trial's config, metrics and checkpoint."""
    return output / "runs" / variant / f"seed_{seed}"


def train(
    run_command: RunCommand,
    arguments: Sequence[str],
    folder: Path,
    callbacks: Sequence[pl.Callback],
    test: bool,
) -> tuple[Any, Mapping[str, float]]:
    """Run `fit` in this process, and `test` on the checkpoint that it kept.

    Output goes to a log file beside the run's folder.

    Returns:
        The CLI object (trainer, model, datamodule), and the logged test metrics.
    """
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    folder.parent.mkdir(parents=True, exist_ok=True)
    options = [
        f"--trainer.default_root_dir={folder}",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder.parents[1]}",
        f"--trainer.logger.name={folder.parent.name}",
        f"--trainer.logger.version={folder.name}",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]
    logged: Mapping[str, float] = {}
    with (
        log_path(folder).open("w", encoding="utf-8") as log,
        redirect_stdout(log),
        redirect_stderr(log),
        _suppress_info_logs(),
    ):
        cli = run_command(["fit", *arguments, *options], callbacks)
        if test:
            checkpoint = "best" if cli.trainer.checkpoint_callback is not None else None
            (logged,) = cli.trainer.test(
                cli.model, datamodule=cli.datamodule, ckpt_path=checkpoint, verbose=False
            )
    return cli, logged


@contextmanager
def _suppress_info_logs() -> Iterator[None]:
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def train_and_test(
    run_command: RunCommand, dataset: str, table: str, trial: PlannedTrial, output: Path
) -> dict[str, Any]:
    """Train a trial, test it once, and return its row.

    Args:
        run_command: Runs `fit`.
        dataset: Name of the dataset.
        table: Name of the published table, whose rule for counting MACs is applied too.
        trial: The trial.
        output: Folder of the study.
    """
    stopwatch = Stopwatch()
    folder = run_folder(output, trial.variant, trial.seed)
    cli, logged = train(run_command, trial.arguments, folder, [stopwatch], test=True)
    rule = published(table)["rule"]
    return {"dataset": dataset, **_row(rule, trial, cli, logged, stopwatch)}


def _row(
    rule: str | None, trial: PlannedTrial, cli: Any, logged: Mapping[str, float], timer: Stopwatch
) -> dict[str, Any]:
    score = next((name for name in ("accuracy", "r2") if f"test/{name}" in logged), None)
    if score is None:
        raise ValueError(
            f"The model of {trial.name} does not log `test/accuracy` (or `test/r2`), which a study "
            f"compares; it logs {', '.join(logged)}."
        )
    row = {
        "variant": trial.variant,
        "seed": trial.seed,
        score: logged[f"test/{score}"],
        "loss": logged.get("test/loss"),
        "macro_f1": logged.get("test/macro_f1"),
        "micro_f1": logged.get("test/accuracy"),  # equal for single-label classification
        "val_accuracy": timer.accuracies[-1] if timer.accuracies else None,
        "best_val_accuracy": max(timer.accuracies, default=None),
        "landing_loss": timer.landing_loss,
        "train_seconds": timer.seconds,
        "epochs": cli.trainer.current_epoch,
        "training": _describe_training(cli),
        "params": sum(p.numel() for p in cli.model.parameters()),
        "device": cli.trainer.strategy.root_device.type,
        **{key.replace("/", "_"): logged[key] for key in TASK_KEYS if key in logged},
    }
    report: ComputeReport | None = getattr(cli.model, "compute_report", None)
    if report is None:  # a user's own module
        macs, dense = logged.get("compute/macs"), logged.get("compute/macs_dense")
        row |= {"macs": macs or 0.0, "macs_dense": dense}
        return row
    routing = {key: value for key, value in logged.items() if key.startswith("routing/")}
    return row | {
        "macs": report.macs,
        "macs_dense": report.macs_dense,
        "macs_reduction": 1 - report.macs / report.macs_dense,
        "gate_macs": report.gate_macs,
        "relmac_paper": report.relative_macs("g", fused=True),
        "relmac_table_rule": None if rule is None else relative_macs_by_rule(report, rule),
        "flops": 2 * report.macs,
        "params_needed": needed_parameters(cli.model.net),
        "hardness_correlation": logged.get("gates/hardness_correlation"),
        **{"_".join(key.split("/")[:2]): value for key, value in routing.items()},
    }


def _describe_training(cli: Any) -> str:
    """Describe epochs, batch size, optimizers and schedulers of a finished run."""
    epochs = cli.trainer.current_epoch
    parts = [f"{epochs} epoch{'s' * (epochs != 1)}"]
    if size := getattr(cli.datamodule, "batch_size", None):
        parts.append(f"batches of {size}")
    for optimizer in cli.trainer.optimizers:
        group = optimizer.param_groups[0]
        rate, decay = group.get("initial_lr", group["lr"]), group.get("weight_decay", 0)
        parts.append(
            f"{type(optimizer).__name__} {rate:g}" + f", weight decay {decay:g}" * bool(decay)
        )
    schedulers = [type(config.scheduler).__name__ for config in cli.trainer.lr_scheduler_configs]
    parts += [name.removesuffix("LR") for name in schedulers]
    if smoothing := getattr(cli.model, "label_smoothing", 0):
        parts.append(f"label smoothing {smoothing:g}")
    return ", ".join(parts)
