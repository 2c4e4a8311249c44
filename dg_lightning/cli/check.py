"""The command `check`: a few steps of a config, and what they show."""

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.cli import SaveConfigCallback

from dg_lightning.checking import check
from dg_lightning.cli.plan import PlanningTrainer

__all__ = ["CheckingTrainer"]


class CheckingTrainer(PlanningTrainer):
    """A Trainer that can also check a training before it is run."""

    arguments: dict[str, Any]  # that it was made with

    def check(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        ranks: int = 1,
        json: bool = False,
    ) -> None:
        """Make a few steps, save nothing, and say whether the training will do what it should.

        Args:
            model: The model.
            datamodule: The data.
            ranks: With 2, two processes on the CPU make the steps too, and must agree.
            json: Whether to print JSON rather than a table.
        """
        if datamodule is None:
            raise ValueError("A check needs data: give `--data`.")
        if ranks not in (1, 2):
            raise ValueError(f"`ranks` must be 1 or 2, got {ranks}.")
        callbacks = self.arguments.pop("callbacks", None) or []
        every = callbacks if isinstance(callbacks, list) else [callbacks]
        given = [callback for callback in every if not isinstance(callback, SaveConfigCallback)]
        report = check(model, datamodule, given, ranks=ranks, **self.arguments)
        print(report.to_json() if json else report)
        if not report.ok:
            sys.exit(1)
