"""Check a training run by running a few of its steps."""

import os
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from dg_lightning.quiet import quietly
from dg_lightning.training.step_logging import loader_generators

from .findings import Report, add_cost, add_findings, add_pickling, check_ranks, compare_resumed
from .probe import Copies, ProbeResult, run_steps, shorten_schedules


def check(
    model: pl.LightningModule,
    datamodule: Any,
    callbacks: Sequence[Any] = (),
    *,
    ranks: int = 1,
    **trainer: Any,
) -> Report:
    """Run a few training steps, and report the problems that a full run would have.

    The steps use the real data, and copies of the model and callbacks. Callbacks act immediately
    instead of following their schedules. Nothing is saved, and callbacks that save checkpoints or
    print are omitted.

    Args:
        model: Any LightningModule.
        datamodule: The training data: a LightningDataModule, or any loaders that `Trainer.fit`
            accepts.
        callbacks: The callbacks of the Trainer.
        ranks: If 2, also run the steps in two processes on the CPU, whose weights must agree.
        **trainer: Other Trainer arguments, such as `max_epochs` and `precision`.

    Returns:
        The findings. Printing them shows a table.

    >>> from dg_lightning import GatedClassifier
    >>> from dg_lightning.callbacks import GatePenalty
    >>> from dg_lightning.datamodules import DigitsDataModule
    >>> net = {"class_path": "GatedMLP", "init_args": {"hidden": [8], "gate": {"kind": "static"}}}
    >>> model = GatedClassifier(net, input_shape=[1, 8, 8], num_classes=10)
    >>> check(model, DigitsDataModule(), [GatePenalty(0.1)], max_epochs=2).ok
    True
    """
    report, seen = Report(), ProbeResult()
    with ExitStack() as stack:
        _leave_no_traces(stack, datamodule)
        saved = Path(stack.enter_context(tempfile.TemporaryDirectory()), "check.ckpt")
        try:
            copies = Copies(model, callbacks)
        except Exception as error:  # user classes may raise anything
            report.add("ERROR", "copies", f"Model and callbacks cannot be copied: {_line(error)}.")
            return report
        shorten_schedules(copies.callbacks)
        try:
            run_steps(copies, datamodule, trainer, seen, saved)
        except Exception as error:  # any error would also stop the real run
            report.add("ERROR", "training", f"Training fails: {_line(error)}")
        if seen.clock is not None:
            add_findings(report, callbacks, copies, seen)
        if seen.batches == 0 and report.ok:
            report.add(
                "ERROR", "training", "No batches ran: check `limit_train_batches` and the data."
            )
        elif saved.exists():
            report.findings.append(compare_resumed(model, datamodule, callbacks, trainer, saved))
            add_pickling(report, copies.callbacks)
            if report.ok:
                add_cost(report, model, datamodule, callbacks, trainer)
        if ranks > 1 and seen.batches:
            if isinstance(datamodule, pl.LightningDataModule):
                datamodule.trainer = None  # a Trainer cannot be sent to other processes
            report.findings.append(check_ranks(model, datamodule, callbacks, trainer))
    return report


def _leave_no_traces(stack: ExitStack, data: Any) -> None:
    """When the stack closes, restore everything that the steps have changed."""
    for context in (isolate_rng(), quietly(), warnings.catch_warnings()):
        stack.enter_context(context)
    warnings.simplefilter("ignore")
    if isinstance(data, pl.LightningDataModule):
        stack.callback(setattr, data, "trainer", data.trainer)
    else:
        for generator in loader_generators(data):
            stack.callback(generator.set_state, generator.get_state())
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    stack.callback(os.environ.update, dict(os.environ))
    stack.callback(os.environ.clear)  # runs before the update: callbacks run in reverse order


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
