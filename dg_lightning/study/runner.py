"""Run a study's trials: train, test, and write the tables."""

import json
import logging
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import torch
from typing_extensions import override

from dg_lightning.callbacks import BudgetController
from dg_lightning.cli_error import CLIError
from dg_lightning.compute.macs import needed_parameters
from dg_lightning.compute.metric import ComputeReport
from dg_lightning.files import write_text
from dg_lightning.study.report import write_report
from dg_lightning.study.settings import PlannedTrial, Variant, expand_seeds, plan_trials
from dg_lightning.study.shared import (
    RunCommand,
    TrialQueue,
    claim_folder,
    run_workers,
    sqlite_url,
)
from dg_lightning.study.tables import (
    TASK_KEYS,
    epoch_rows,
    epochs_markdown,
    published,
    relative_macs_by_rule,
    summarised,
    summary_markdown,
    write_rows,
)


class RunRecorder(pl.Callback):
    """Measures training time, and records the validation accuracy of every epoch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.accuracies: list[float] = []
        self._has_landed = False
        self._landing: list[float] = []  # accuracies just before and while gates freeze

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
        """Largest drop in validation accuracy while gates freeze; None if no gate freezes."""
        before, *after = self._landing or [0.0]
        return before - min(after) if after else None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._start


def log_path(folder: Path) -> Path:
    """Return the path of a run's log file, which contains its output and traceback."""
    return folder.with_name(f"{folder.name}.log")


def trial_folder(output: Path, variant: str, seed: int) -> Path:
    """Return the folder for a trial's config, metrics and checkpoint."""
    return output / "runs" / variant / f"seed_{seed}"


@dataclass(frozen=True)
class TrialLoggers:
    """Chooses a trial's loggers: a CSV logger for its folder, and others that are configured.

    What loggers write is in the trial's folder, too, so that a trial that is started again leaves
    nothing behind.

    Args:
        folder: The trial's folder.
        group: The study and variant, or the search and trial; the group in W&B.
        job_type: `study` or `search`; the job type in W&B.
    """

    folder: Path
    group: str
    job_type: str

    def __call__(self, trainer: Mapping[str, Any]) -> list[Any]:
        """Return the loggers for the settings of a Trainer."""
        root, name, version = self.folder.parents[1], self.folder.parent.name, self.folder.name
        own = {"save_dir": str(root), "name": name, "version": version}
        configured = trainer.get("logger")
        loggers = configured if isinstance(configured, list) else [configured]
        others = [x for x in loggers if isinstance(x, dict) and _class_name(x) != "CSVLogger"]
        labelled = [self._labelled(logger, own) for logger in others]
        return [{"class_path": _CSV_LOGGER, "init_args": own}, *labelled]

    def _labelled(self, logger: dict[str, Any], own: dict[str, str]) -> dict[str, Any]:
        given = {k: v for k, v in (logger.get("init_args") or {}).items() if v is not None}
        name = self.group.rpartition("/")[2]
        if _class_name(logger) == "WandbLogger":
            given |= {
                "name": f"{name}/{self.folder.name}" if self.job_type == "study" else name,
                "group": self.group,
                "job_type": self.job_type,
                "tags": [*given.get("tags", ()), self.job_type, name],
                "save_dir": str(self.folder),
                "id": None,  # one id would join all trials
            }
        elif _class_name(logger) == "TensorBoardLogger":
            given |= own
        return {**logger, "init_args": given}


_CSV_LOGGER = "lightning.pytorch.loggers.CSVLogger"


def _class_name(logger: Mapping[str, Any]) -> str:
    return str(logger.get("class_path", "")).rpartition(".")[2]


def train(
    run_command: RunCommand,
    arguments: Sequence[str],
    loggers: TrialLoggers,
    callbacks: Sequence[pl.Callback],
    test: bool,
) -> tuple[Any, Mapping[str, float]]:
    """Run `fit` in this process, and optionally test its best checkpoint.

    Output goes to a log file beside the run's folder.

    Returns:
        The CLI object (trainer, model, datamodule), and the logged test metrics.
    """
    folder = loggers.folder
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    folder.parent.mkdir(parents=True, exist_ok=True)
    options = [
        f"--trainer.default_root_dir={folder}",
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
        try:
            cli = run_command(["fit", *arguments, *options], callbacks, loggers)
            if test:
                checkpoint = "best" if cli.trainer.checkpoint_callback is not None else None
                (logged,) = cli.trainer.test(
                    cli.model, datamodule=cli.datamodule, ckpt_path=checkpoint, verbose=False
                )
        except BaseException:
            _finish_wandb(exit_code=1)
            raise
        _finish_wandb(exit_code=0)
    return cli, logged


def _finish_wandb(exit_code: int) -> None:
    """End the W&B run, if any: otherwise the next trial of this process would log to it."""
    if wandb := sys.modules.get("wandb"):
        wandb.finish(exit_code=exit_code)


@contextmanager
def _suppress_info_logs() -> Iterator[None]:
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def train_and_test(
    run_command: RunCommand,
    dataset: str,
    table: str,
    trial: PlannedTrial,
    output: Path,
    study: str,
) -> dict[str, Any]:
    """Train a trial, test it once, and return its table row.

    Args:
        run_command: Runs `fit`.
        dataset: Name of the dataset.
        table: Name of the published table, whose rule for counting MACs is also applied.
        trial: The trial.
        output: Folder of the study.
        study: Name of the study.
    """
    stopwatch = RunRecorder()
    folder = trial_folder(output, trial.variant, trial.seed)
    loggers = TrialLoggers(folder, f"{study}/{trial.variant}", "study")
    cli, logged = train(run_command, trial.arguments, loggers, [stopwatch], test=True)
    rule = published(table)["rule"]
    return {"dataset": dataset, **_row(rule, trial, cli, logged, stopwatch)}


def _row(
    rule: str | None, trial: PlannedTrial, cli: Any, logged: Mapping[str, float], timer: RunRecorder
) -> dict[str, Any]:
    score = next((name for name in ("accuracy", "r2") if f"test/{name}" in logged), None)
    if score is None:
        raise ValueError(
            f"A study needs `test/accuracy` or `test/r2`, but the model of {trial.name} logs only "
            f"{', '.join(logged)}."
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
        "open_rates": " / ".join(
            f"{layer.open_rate_g:.4f}" for layer in report.layers if layer.open_rate_g is not None
        ),
        "compute_proxy": report.compute_proxy("g"),
        "relmac_paper": report.relative_macs("g", fused=True),
        "relmac_table_rule": None if rule is None else relative_macs_by_rule(report, rule),
        "flops": 2 * report.macs,
        "params_needed": needed_parameters(cli.model.net),
        "hardness_correlation": logged.get("gates/hardness_correlation"),
        **{"_".join(key.split("/")[:2]): value for key, value in routing.items()},
    }


def _describe_training(cli: Any) -> str:
    """Describe a finished run's epochs, batch size, optimizers and schedulers."""
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


@dataclass
class Study:
    """A study of variants on one dataset, each with several seeds.

    Args:
        dataset: Name of the dataset, which is also the config folder of the variants.
        output: Folder for the tables, the queue and the runs; an unfinished study is resumed.
        variants: The variants by name, in table order.
        seeds: Number of seeds, starting at 0, or a list of seeds.
        options: Dotted options of `fit` for all variants, such as `trainer.max_epochs=20`; `{seed}`
            is replaced with the seed.
        set: More options for use on the command line, applied after all others.
        only: Names of the variants to train now; all if None.
        name: Name of the study in the storage, which may contain several studies; the name of the
            published table if None.
        notes: Notes for readers of the tables.
        paper: Name of the published table to compare with; the dataset's table if None.
        storage: URL of a database shared by workers on many machines; a file in `output` if None.
        workers: Number of training processes on this machine.
        retry_failed: Whether to retry failed trials.
    """

    dataset: str
    output: str
    variants: dict[str, Variant]
    seeds: int | list[int] = 5
    options: list[str] = field(default_factory=list)
    set: list[str] = field(default_factory=list)
    only: list[str] | None = None
    name: str | None = None
    notes: str | None = None
    paper: str | None = None
    storage: str | None = None
    workers: int = 1
    retry_failed: bool = False

    @property
    def folder(self) -> Path:
        """Output folder."""
        return Path(self.output)

    @property
    def table(self) -> str:
        """Name of the published table."""
        return self.paper or self.dataset

    @property
    def title(self) -> str:
        """Name of the study in the storage, and in W&B."""
        return self.name or self.table

    def planned(self, only: Sequence[str] | None = None) -> list[PlannedTrial]:
        """Return the planned trials, limited to the variants in `only` if given."""
        if only is not None and not only:
            raise ValueError("`only` must name at least one variant: omit it to train all.")
        if not self.output:
            raise ValueError("`output` must name a folder, got an empty string.")
        for name in only or ():
            if name not in self.variants:
                known = ", ".join(self.variants)
                raise ValueError(f"`only` names an unknown variant, {name!r}; choose from {known}.")
        # Command-line options come after the options of each variant.
        variants = {
            name: Variant(variant.config, [*variant.options, *self.set])
            for name, variant in self.variants.items()
        }
        trials = plan_trials(self.dataset, variants, expand_seeds(self.seeds), self.options)
        return [trial for trial in trials if only is None or trial.variant in only]

    def open(self, worker: int = 0) -> TrialQueue:
        """Open the queue of trials."""
        storage = self.storage or sqlite_url(self.folder)
        return TrialQueue(storage, self.title, self.folder / "workers")

    def claim(self, shared: TrialQueue) -> optuna.Trial | None:
        """Start a planned trial; return None if none is waiting."""
        return shared.claim(self.planned(self.only))[0]

    def count_unfinished(self, shared: TrialQueue) -> int:
        """Return how many planned trials are waiting or running."""
        return shared.count_unfinished(self.planned(self.only))

    def run(self, run_command: RunCommand, shared: TrialQueue, trial: optuna.Trial) -> str:
        """Train and test a trial and update the tables. A failure does not stop the study."""
        fingerprint = trial.user_attrs["fingerprint"]
        plan = next(plan for plan in self.planned() if plan.fingerprint == fingerprint)
        try:
            row = train_and_test(
                run_command, self.dataset, self.table, plan, self.folder, self.title
            )
        except (Exception, CLIError) as error:
            folder = trial_folder(self.folder, plan.variant, plan.seed)
            with log_path(folder).open("a", encoding="utf-8") as file:
                traceback.print_exception(error, file=file)
            shared.fail(trial, error_summary(error))
        else:
            shared.record_result(trial, row)
        rows = write_tables(self, shared)
        return progress_line(plan, rows, self.count_unfinished(shared), self.workers)


def run_study(study: Study, run_command: RunCommand) -> bool:
    """Train and test all unfinished trials, and write the tables.

    Args:
        study: The study.
        run_command: Runs `fit`; provided by the command line.

    Returns:
        True if all trials are complete.
    """
    if study.workers < 1:
        raise ValueError(f"`workers` must be at least 1, got {study.workers}.")
    planned = study.planned(study.only)
    claim_folder(study.folder, "study", "search")
    queue = study.open()
    queue.requeue_lost()
    queue.fill(study.planned(), study.only, study.retry_failed)
    run_workers(study, run_command)
    rows = write_tables(study, queue)
    failed = [row for row in rows if row["status"] != "complete"]
    print((study.folder / "summary.md").read_text(encoding="utf-8"))
    print(f"Tables and runs are in {study.folder}.")
    if failed:
        print(f"{len(failed)} of {len(rows)} trials failed; use --retry_failed=true to retry.")
    if left := queue.count_unfinished(planned):
        print(f"{left} trials are unfinished; run the same command to continue.")
    return not failed and not left


def error_summary(error: BaseException) -> str:
    """Describe an error in one line."""
    message = getattr(error, "message", None) or str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}"


def progress_line(
    trial: PlannedTrial, rows: Sequence[dict[str, Any]], left: int, workers: int
) -> str:
    """Return a progress line: a trial's result, the time left, and the best variant so far."""
    key = (trial.variant, trial.seed)
    row = next((row for row in rows if (row["variant"], row["seed"]) == key), None)
    result = "reassigned to another worker" if row is None else _format_result(row)
    line = f"[{len(rows)}/{len(rows) + left}] {trial.name}: {result}"
    done = [row for row in rows if row["status"] == "complete"]
    if done and left:
        seconds = sum(row["train_seconds"] for row in done) / len(done) * left / workers
        line += f"; about {_format_duration(seconds)} of training left"
    if done and all("accuracy" in row for row in done):
        best = max(summarised(done), key=lambda summary: summary["accuracy_mean"])
        line += f"; best so far {best['variant']}, {best['accuracy_mean']:.2%}"
    return line


def _format_result(row: dict[str, Any]) -> str:
    if row["status"] != "complete":
        return f"failed, {row['reason']}"
    share = f" at {row['macs'] / row['macs_dense']:.1%} of the MACs" if row["macs_dense"] else ""
    score = f"{row['accuracy']:.2%}" if "accuracy" in row else f"R² {row['r2']:.4f}"
    return f"{score}{share}, {row['train_seconds']:.0f} s"


def _format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def write_tables(study: Study, queue: TrialQueue) -> list[dict[str, Any]]:
    """Write the results so far: tables, summaries, metrics for each epoch, and the report."""
    order = list(study.variants)
    rows = [{"dataset": study.dataset, **row} for row in queue.rows(study.planned())]
    rows.sort(key=lambda row: (order.index(row["variant"]), row["seed"]))
    write_rows(study.folder / "results.csv", rows)
    write_rows(study.folder / "summary.csv", summarised(rows), ["variant", "runs", "failed"])
    write_text(study.folder / "summary.md", summary_markdown(study.table, rows, study.notes))
    epochs = [
        {"variant": row["variant"], "seed": row["seed"], **epoch}
        for row in rows
        for metrics in [trial_folder(study.folder, row["variant"], row["seed"]) / "metrics.csv"]
        if row["status"] == "complete" and metrics.exists()  # otherwise, it ran elsewhere
        for epoch in epoch_rows(metrics)
    ]
    write_rows(study.folder / "epochs.csv", epochs, ["variant", "seed", "epoch"])
    if text := epochs_markdown(epochs):
        write_text(study.folder / "epochs.md", text)
    about = json.dumps({"table": study.table, "notes": study.notes})
    write_text(study.folder / "study.json", f"{about}\n")
    try:
        write_report(study.folder)
    except Exception as error:  # a broken report must not stop the study
        sys.stderr.write(f"report.html could not be written: {error_summary(error)}\n")
    return rows
