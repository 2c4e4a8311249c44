"""Trainers for `plan` and `check`."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.cli import SaveConfigCallback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from dg_lightning.callbacks import AddGates
from dg_lightning.checking import check
from dg_lightning.files import atomic_write
from dg_lightning.schedules import Clock, Curve, acting, collect_plan, plan_warnings

if TYPE_CHECKING:
    from rich.table import Table


_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_PANELS = {
    "temperature": "temperature τ",
    "threshold": "threshold θ and keep target",
    "keep": "threshold θ and keep target",
    "target": "threshold θ and keep target",
    "weight": "weight λ, and its factor",
    "factor": "weight λ, and its factor",
    "budget": "budget",
}


class PlanningTrainer(pl.Trainer):
    """A Trainer that can also plot the schedules of its callbacks."""

    def plan(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        output: str = "plan.png",
    ) -> None:
        """Plot all schedules in a config over optimizer steps, without training.

        Args:
            model: The model whose gates are scheduled.
            datamodule: The data, which determines the length of an epoch.
            output: Image file, whose suffix sets the format. The plan is printed too.
        """
        import rich

        clock = self._clock(datamodule)
        callbacks = self.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, AddGates):
                model.configure_model()
                callback.add_to(model, datamodule)
        curves = acting(collect_plan(callbacks, clock, model))
        if not curves:
            rank_zero_info("No callback has a schedule: there is nothing to plan.")
            return
        rich.print(plan_table(curves, clock))
        for line in plan_warnings(callbacks, clock, model):
            rich.print(f"Warning: {line}")
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            rank_zero_info("Plotting the plan needs matplotlib: pip install matplotlib")
            return
        path = Path(output, "plan.png") if Path(output).is_dir() else Path(output)
        draw(curves, clock, path)
        rank_zero_info(f"The plan is in {path}.")

    def _clock(self, datamodule: pl.LightningDataModule | None) -> Clock:
        """Load the data, and return the length of the training run in steps."""
        if datamodule is None:
            raise ValueError("A plan needs data to know the length of an epoch: pass `--data`.")
        datamodule.prepare_data()
        datamodule.setup("fit")
        batches = math.ceil(len(datamodule.train_dataloader()) / self.world_size)
        limit = self.limit_train_batches
        batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
        per_epoch = math.ceil(batches / self.accumulate_grad_batches)
        epochs = math.inf if self.max_epochs in (None, -1) else self.max_epochs
        if self.max_epochs is None and self.max_steps == -1:
            epochs = 1000  # Lightning's default
        steps = math.inf if self.max_steps == -1 else self.max_steps
        total = min(per_epoch * (epochs or 0), steps)
        if not 0 < total < math.inf:
            raise ValueError(
                f"A plan needs a positive, finite number of steps, got {total}: "
                "set `trainer.max_epochs` or `trainer.max_steps`."
            )
        return Clock(int(total), per_epoch)


def plan_table(curves: list[Curve], clock: Clock) -> "Table":
    """Return the plan as a table for the terminal, one row per curve."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    result = Table(title=f"Plan: {clock.total_steps:,} optimizer steps", box=box.SIMPLE)
    result.add_column("schedule", no_wrap=True)
    for column in ("start", "end"):
        result.add_column(column, justify="right")
    result.add_column("over training", no_wrap=True)
    for curve in curves:
        _, values = curve.values(clock, _WIDTH)
        low, high = min(values), max(values)
        scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
        line = "".join(_BARS[round((value - low) * scale)] for value in values)
        result.add_row(escape(curve.label), f"{values[0]:.4g}", f"{values[-1]:.4g}", line)
    return result


def draw(curves: list[Curve], clock: Clock, path: Path) -> None:
    """Save the plan as a figure with one panel per quantity, over optimizer steps."""
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.figure import Figure

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"`output` must end in .{', .'.join(sorted(known))}, got {str(path)!r}.")

    panels = list(dict.fromkeys(_PANELS[curve.quantity] for curve in curves))
    figure = Figure(figsize=(8, 2.2 * len(panels) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        for curve in curves:
            if _PANELS[curve.quantity] == panel:
                steps, values = curve.values(clock)
                axis.plot(steps, values, label=curve.label)
        axis.set_ylabel(panel, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
        per_epoch, total = clock.steps_per_epoch, clock.total_steps
        if per_epoch and total and total >= 2 * per_epoch:
            epochs = axis.secondary_xaxis("top") if axis is axes[0] else None
            if epochs is not None:
                count = total // per_epoch
                every = max(1, count // 10)
                numbers = range(0, count + 1, every)
                epochs.set_xticks([n * per_epoch for n in numbers], map(str, numbers))
                epochs.set_xlabel("epoch", fontsize=8)
    axes[-1].set_xlabel("optimizer step")
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished, dpi=120, format=path.suffix.removeprefix("."))


class CheckingTrainer(PlanningTrainer):
    """A Trainer that can also check a training run, and whose tests print no table of all keys."""

    arguments: dict[str, Any]  # Trainer arguments from the config

    @override
    def validate(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = False,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    @override
    def test(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = False,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        return super().test(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def check(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        ranks: int = 1,
        json: bool = False,
    ) -> None:
        """Run a few steps and report problems, without saving anything.

        Args:
            model: The model.
            datamodule: The data.
            ranks: If 2, the steps also run in two CPU processes, whose results must agree.
            json: Print JSON instead of a table.
        """
        if datamodule is None:
            raise ValueError("`check` needs data: pass `--data`.")
        if ranks not in (1, 2):
            raise ValueError(f"`ranks` must be 1 or 2, got {ranks}.")
        callbacks = self.arguments.pop("callbacks", None) or []
        every = callbacks if isinstance(callbacks, list) else [callbacks]
        given = [callback for callback in every if not isinstance(callback, SaveConfigCallback)]
        report = check(model, datamodule, given, ranks=ranks, **self.arguments)
        print(report.to_json() if json else report)
        if not report.ok:
            sys.exit(1)
