"""Whether two processes agree after every step."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from .copies import Copies, hasten, own_settings
from .report import Finding

__all__ = ["check_ranks"]

_STEPS = 8
_PATIENCE = timedelta(seconds=60)  # for a process that waits for another


class CompareRanks(pl.Callback):
    """Comes behind all other callbacks, and writes in which batch weights are different."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches = 0
        self.different: dict[str, int] = {}

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self.batches += 1
        own = {
            name: crc32(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, parameter in pl_module.named_parameters()
        }
        every: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(every, own)
        for name in own:
            if len({other[name] for other in every}) > 1:
                self.different.setdefault(name, self.batches)
        if trainer.is_global_zero:
            self.path.write_text(json.dumps([self.batches, self.different]), encoding="utf-8")
        if self.batches >= _STEPS:
            trainer.should_stop = True


def check_ranks(
    model: Any, data: Any, callbacks: Sequence[Any], arguments: dict[str, Any]
) -> Finding:
    """Make a few steps in two processes on the CPU."""
    what = "two processes"
    strategy = DDPStrategy(
        find_unused_parameters=True,
        start_method="spawn",
        process_group_backend="gloo",
        timeout=_PATIENCE,
    )
    with tempfile.TemporaryDirectory() as folder, _stdout_is_stderr():
        path = Path(folder, "ranks.json")
        own, copies = own_settings(arguments, folder), Copies(model, callbacks)
        hasten(copies.callbacks)
        try:
            trainer = pl.Trainer(
                **{**own, "accelerator": "cpu"},
                callbacks=[*copies.callbacks, CompareRanks(path)],
                devices=2,
                strategy=strategy,
            )
            trainer.fit(copies.model, data)
        except Exception as error:  # of either process
            return Finding("ERROR", what, f"They stop: {_last_line(error)}")
        batches, different = json.loads(path.read_text(encoding="utf-8"))
    if different:
        where = ", ".join(f"{name} (batch {batch})" for name, batch in different.items())
        return Finding("ERROR", what, f"Their weights are different: {where}.")
    return Finding("OK", what, f"They have the same weights after each of {batches} batches.")


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Send to stderr what gloo and other processes write to stdout, which is for the report."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _last_line(error: Exception) -> str:
    """Return the message of an error, which of another process ends its traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    if "imed out" in str(error):
        return f"one waits for the other, which does not come ({last})"
    if "pickle" in str(error):
        return f"{last}; what is defined in a notebook cannot be sent to processes"
    return last
