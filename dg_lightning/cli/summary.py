"""The summary printed at the end of training."""

import math
from typing import Any

from dg_lightning.gates import gate_layers
from dg_lightning.monitoring import run_folder
from dg_lightning.monitoring.views import watched_gates

__all__ = ["find_non_finite", "print_summary"]

# Metrics to print if they were logged, with name and format.
_METRICS = {
    "train/loss": ("training loss", ".4f"),
    "val/loss": ("validation loss", ".4f"),
    "val/accuracy": ("validation accuracy", ".2%"),
    "val/macro_f1": ("validation macro-F1", ".2%"),
    "val/r2": ("validation R²", ".4f"),
    "val/rmse": ("validation error (root mean square)", ".4g"),
    "compute/macs": ("executed MACs a sample", ",.0f"),
    "compute/macs_share": ("of the dense net's", ".2%"),
    "gates/open_rate": ("open units", ".2%"),
}
_LAYER_PREFIX = "gates/open_rate_g/"


def find_non_finite(trainer: Any) -> str | None:
    """Return what is NaN or infinite after training, with advice; None if all is finite."""
    advice = "lower the learning rate, or set trainer.gradient_clip_val"
    weights = trainer.lightning_module.named_parameters()
    non_finite = [name for name, weight in weights if not bool(weight.detach().isfinite().all())]
    if non_finite:
        return f"{len(non_finite)} of its weights, {non_finite[0]} first, are not finite; {advice}"
    for key, value in trainer.callback_metrics.items():
        if key.rpartition("/")[2].endswith("loss") and not math.isfinite(float(value)):
            return f"{key} is {float(value)}; {advice}"
    return None


def print_summary(trainer: Any) -> None:
    """Print the final metrics, the run folder, and the command that shows the run."""
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
    for key, (name, form) in _METRICS.items():
        if key in logged:
            table.add_row(name, format(float(logged[key]), form))
    for key, value in logged.items():
        if key.startswith(_LAYER_PREFIX):
            table.add_row(f"  {escape(key.removeprefix(_LAYER_PREFIX))}", f"{float(value):.2%}")
    gates = gate_layers(trainer.lightning_module, required=False)
    if unwatched := len(gates.keys() - set(watched_gates(trainer.callbacks))):
        table.add_row(f"{unwatched} of {len(gates)} gates", "not watched for collapse")
    console = Console()
    console.print(table)
    # On its own line, for copying.
    text = f"The run is in {run_folder(trainer)}; see it: dg-lightning report {run_folder(trainer)}"
    console.print(text, soft_wrap=True, markup=False, highlight=False)
