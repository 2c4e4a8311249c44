"""What stands on the terminal when a training has ended."""

import math
from typing import Any

from dg_lightning.dashboards import run_folder

__all__ = ["not_finite", "print_closing"]

# What is told of a training, where it was logged.
_FIGURES = {
    "train/loss": ("training loss", ".4f"),
    "val/loss": ("validation loss", ".4f"),
    "val/accuracy": ("validation accuracy", ".2%"),
    "val/macro_f1": ("validation macro-F1", ".2%"),
    "compute/macs": ("executed MACs a sample", ",.0f"),
    "compute/macs_share": ("of the dense net's", ".2%"),
    "gates/open_rate": ("open units", ".2%"),
}
_LAYER = "gates/open_rate_g/"


def not_finite(trainer: Any) -> str | None:
    """Return what is NaN or infinite after a training, with the way out; None if nothing is."""
    advice = "lower the learning rate, or set trainer.gradient_clip_val"
    weights = trainer.lightning_module.named_parameters()
    broken = [name for name, weight in weights if not bool(weight.detach().isfinite().all())]
    if broken:
        return f"{len(broken)} of its weights, {broken[0]} first, are not finite; {advice}"
    for key, value in trainer.callback_metrics.items():
        if key.rpartition("/")[2].endswith("loss") and not math.isfinite(float(value)):
            return f"{key} is {float(value)}; {advice}"
    return None


def print_closing(trainer: Any) -> None:
    """Print the last figures of a training, where it lies, and what shows it."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Training ended", box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    logged = trainer.callback_metrics
    epochs = trainer.current_epoch
    table.add_row("epochs, optimizer steps", f"{epochs:,}, {trainer.global_step:,}")
    for key, (name, form) in _FIGURES.items():
        if key in logged:
            table.add_row(name, format(float(logged[key]), form))
    for key, value in logged.items():
        if key.startswith(_LAYER):
            table.add_row(f"  {escape(key.removeprefix(_LAYER))}", f"{float(value):.2%}")
    console = Console()
    console.print(table)
    # On a line of its own, to be copied.
    said = f"The run is in {run_folder(trainer)}; see it: dg-lightning report {run_folder(trainer)}"
    console.print(said, soft_wrap=True, markup=False, highlight=False)
