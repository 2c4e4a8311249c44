"""The runner of a study: workers that take trials from the queue until none is left."""

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import optuna

from dg_lightning.files import write_text
from dg_lightning.report import write_report
from dg_lightning.study.epochs import epoch_rows, epochs_markdown
from dg_lightning.study.queue import TrialQueue
from dg_lightning.study.settings import PlannedTrial, Variant, planned_trials, seeds_of
from dg_lightning.study.shared import storage_in
from dg_lightning.study.tables import summarised, summary_markdown, write_csv
from dg_lightning.study.training import log_of, run_folder, train_and_test

__all__ = ["Study", "claim_folder", "in_workers", "reason_of", "run_study"]

T = TypeVar("T")
_LOOK_AGAIN = 2.0  # seconds, while others are still at their last trials


@dataclass
class Study:
    """A study: variants x seeds of one dataset.

    Args:
        dataset: Name of the dataset, where configs of variants are looked for.
        output: Folder for tables, the queue, and a folder a run; an unfinished study goes on there.
        variants: The variants by name, in the order of the table.
        seeds: How many seeds, from 0 on, or a list of them.
        options: Dotted options of `fit` for all variants, as `trainer.max_epochs=20`; `{seed}`
            stands for the seed.
        set: The same, after all others; for the command line.
        only: Names of the variants to be trained now; all when None.
        name: Name of the study in the storage, where there are several; that of the paper's table
            if None.
        notes: What a reader of the tables should know.
        paper: Which published table stands beside ours; that of the dataset if None.
        storage: URL of a database that workers on many machines share; a file in `output` if None.
        workers: Processes of this machine that train at the same time.
        retry_failed: Whether trials that have failed are tried once more.
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
        """Where everything is written."""
        return Path(self.output)

    @property
    def table(self) -> str:
        """Name of the published table."""
        return self.paper or self.dataset

    def planned(self, only: Sequence[str] | None = None) -> list[PlannedTrial]:
        """Return the trials, of the variants in `only` if given."""
        if only is not None and not only:
            raise ValueError("`only` names no variant: leave it out to train all.")
        if not self.output:
            raise ValueError("`output` must be a folder: name one.")
        for name in only or ():
            if name not in self.variants:
                there = ", ".join(self.variants)
                raise ValueError(f"There is no variant {name!r}; there are {there}.")
        # What comes from the command line stands behind the options of a variant, too.
        variants = {
            name: Variant(variant.config, [*variant.options, *self.set])
            for name, variant in self.variants.items()
        }
        found = planned_trials(self.dataset, variants, seeds_of(self.seeds), self.options)
        return [trial for trial in found if only is None or trial.variant in only]

    def queue(self) -> TrialQueue:
        """Open the queue."""
        storage = self.storage or storage_in(self.folder)
        return TrialQueue(storage, self.name or self.table, self.folder / "workers")


def run_study(study: Study) -> bool:
    """Train and test everything that is not done yet, and write the tables.

    Returns:
        Whether all trials are complete.
    """
    if study.workers < 1:
        raise ValueError(f"`workers` must be at least 1, got {study.workers}.")
    planned = study.planned(study.only)
    claim_folder(study.folder, "study", "search")
    queue = study.queue()
    queue.take_up_lost()
    queue.fill(study.planned(), study.only, study.retry_failed)
    in_workers(_work, study, study.workers)
    rows = write_tables(study, queue)
    failed = [row for row in rows if row["status"] != "complete"]
    print((study.folder / "summary.md").read_text(encoding="utf-8"))
    print(f"Tables and runs are in {study.folder}.")
    if failed:
        print(f"{len(failed)} of {len(rows)} trials have failed; --retry_failed=true tries again.")
    if left := queue.unfinished(planned):
        print(f"{left} trials are not done; the same command goes on with them.")
    return not failed and not left


def claim_folder(folder: Path, own: str, other: str) -> None:
    """Make the folder of a study or of a search, which must not be one of the other kind."""
    if (folder / f"{other}.json").exists():
        raise ValueError(f"{folder} holds a {other}: give another `output`.")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{own}.json").exists():
        write_text(folder / f"{own}.json", "{}\n")


def in_workers(work: Callable[[T, int, int | None], None], settings: T, workers: int) -> None:
    """Let so many processes work, this one among them.

    Args:
        work: Is called with the settings, the worker's index, and the process that it ends with.
        settings: Plain values.
        workers: How many.
    """
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    others = [
        spawn.Process(target=_as_worker, args=(work, settings, index, os.getpid()))
        for index in range(1, workers)
    ]
    for process in others:
        process.start()
    try:
        work(settings, 0, None)
    except (KeyboardInterrupt, SystemExit):
        print("Interrupted; the same command goes on with what is not done.", flush=True)
        raise
    for process in others:
        process.join()


def _as_worker(
    work: Callable[[T, int, int | None], None], settings: T, index: int, parent: int
) -> None:
    """Work in a process of its own, as quiet as the one that started it."""
    from dg_lightning.cli.quiet import is_quiet, quietly

    with quietly() if is_quiet() else nullcontext():
        work(settings, index, parent)


def _work(study: Study, index: int, parent: int | None) -> None:
    """Take trials until none is left; end where the process that started this one is gone."""
    planned = study.planned(study.only)
    with study.queue() as queue:
        while parent is None or os.getppid() == parent:
            queue.take_up_lost()
            claimed, trial = queue.claim(planned)
            if claimed is None or trial is None:
                if not queue.unfinished(planned):
                    return
                time.sleep(_LOOK_AGAIN)  # somebody may die, and leave a trial
                continue
            with queue.beating(claimed):
                _do(study, queue, claimed, trial)
            rows = write_tables(study, queue)
            left = queue.unfinished(planned)
            print(progress_line(trial, rows, left, study.workers), flush=True)


def _do(study: Study, queue: TrialQueue, claimed: optuna.Trial, trial: PlannedTrial) -> None:
    """Train and test a trial; one that fails must not stop the rest."""
    from dg_lightning.cli.errors import Refusal

    try:
        row = train_and_test(study.dataset, study.table, trial, study.folder)
    except (Exception, Refusal) as error:
        folder = run_folder(study.folder, trial.variant, trial.seed)
        with log_of(folder).open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        queue.fail(claimed, reason_of(error))
    else:
        queue.finish_with(claimed, row)


def reason_of(error: BaseException) -> str:
    """Return what went wrong in one line."""
    from dg_lightning.cli.errors import one_line

    said = getattr(error, "message", None) or one_line(str(error))
    return f"{type(error).__name__}: {' '.join(said.split())}"


def progress_line(
    trial: PlannedTrial, rows: Sequence[dict[str, Any]], left: int, workers: int
) -> str:
    """Return what to say when a trial is done: its figures, what is left, and the best so far."""
    key = (trial.variant, trial.seed)
    row = next((row for row in rows if (row["variant"], row["seed"]) == key), None)
    said = "was given to another worker" if row is None else _figures(row)
    line = f"[{len(rows)}/{len(rows) + left}] {trial.name}: {said}"
    done = [row for row in rows if row["status"] == "complete"]
    if done and left:
        seconds = sum(row["train_seconds"] for row in done) / len(done) * left / workers
        line += f"; about {_duration(seconds)} of training left"
    if done:
        best = max(summarised(done), key=lambda summary: summary["accuracy_mean"])
        line += f"; best so far {best['variant']}, {best['accuracy_mean']:.2%}"
    return line


def _figures(row: dict[str, Any]) -> str:
    if row["status"] != "complete":
        return f"failed, {row['reason']}"
    share = f" at {row['macs'] / row['macs_dense']:.1%} of the MACs" if row["macs_dense"] else ""
    return f"{row['accuracy']:.2%}{share}, {row['train_seconds']:.0f} s"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def write_tables(study: Study, queue: TrialQueue) -> list[dict[str, Any]]:
    """Write what is known so far: results, summaries, the page, and the course of the runs."""
    order = list(study.variants)
    known = [{"dataset": study.dataset, **row} for row in queue.rows(study.planned())]
    known.sort(key=lambda row: (order.index(row["variant"]), row["seed"]))
    write_csv(study.folder / "results.csv", known)
    write_csv(study.folder / "summary.csv", summarised(known), ["variant", "runs", "failed"])
    write_text(study.folder / "summary.md", summary_markdown(study.table, known, study.notes))
    epochs = [
        {"variant": row["variant"], "seed": row["seed"], **epoch}
        for row in known
        for metrics in [run_folder(study.folder, row["variant"], row["seed"]) / "metrics.csv"]
        if row["status"] == "complete" and metrics.exists()  # else trained on another machine
        for epoch in epoch_rows(metrics)
    ]
    write_csv(study.folder / "epochs.csv", epochs, ["variant", "seed", "epoch"])
    if text := epochs_markdown(epochs):
        write_text(study.folder / "epochs.md", text)
    about = json.dumps({"table": study.table, "notes": study.notes})
    write_text(study.folder / "study.json", f"{about}\n")
    try:
        write_report(study.folder)
    except Exception as error:  # a page that cannot be drawn must not end the trainings
        sys.stderr.write(f"report.html could not be written: {reason_of(error)}\n")
    return known
