"""Logging of pictures and tables, by what a logger supports rather than by its class."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dg_lightning.monitoring.figures import pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["can_show_pictures", "define_metrics", "run_folder", "show_pictures", "show_table"]

# W&B: summary values of a run, for tables and scatter plots.
_SUMMARIES = {
    "val/accuracy": "last,max",
    "val/macro_f1": "last,max",
    "val/loss": "last,min",
    "train/loss": "last,min",
}
_AXIS = "trainer/global_step"
_GROUPS = (
    *("train", "val", "test", "compute", "gates", "collapse", "routing", "rewire"),
    *("tasks", "dormant"),
)


def run_folder(trainer: Any) -> Path:
    """Return the folder of this run, where Lightning saves its checkpoints.

    With W&B or MLflow, `trainer.log_dir` would be the same for all runs.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    version = logger.version
    name = version if isinstance(version, str) else f"version_{version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), name)


def can_show_pictures(logger: Any) -> bool:
    """Return True if the logger supports images."""
    experiment: Any = getattr(logger, "experiment", None)
    return hasattr(logger, "log_image") or any(
        hasattr(experiment, method) for method in ("add_image", "log_figure")
    )


def show_pictures(logger: Any, key: str, figures: Mapping[str, "Figure"], step: int) -> None:
    """Log figures as images to W&B, TensorBoard, MLflow or Comet.

    In W&B they share one panel under the key; elsewhere the key of each ends with its name.
    """
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(logger, "log_image"):
        images = [pixels(figure) for figure in figures.values()]
        logger.log_image(key, images, step=step, caption=list(figures))
        return
    for name, figure in figures.items():
        if hasattr(experiment, "add_image"):
            experiment.add_image(f"{key}/{name}", pixels(figure), step, dataformats="HWC")
        elif hasattr(experiment, "log_figure") and hasattr(logger, "run_id"):
            experiment.log_figure(logger.run_id, figure, f"{key}/{name}/step_{step:08d}.png")
        elif hasattr(experiment, "log_figure"):
            experiment.log_figure(f"{key}/{name}", figure, step=step)


def show_table(
    logger: Any, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
) -> None:
    """Log a table if the logger supports it.

    Pass all rows every time: W&B does not append to a table that was logged before.
    """
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(logger, "log_table"):
        logger.log_table(key, columns=list(columns), data=[list(row) for row in rows], step=step)
    elif hasattr(experiment, "add_text"):
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
        experiment.add_text(key, text, step)
    elif hasattr(experiment, "log_table") and hasattr(logger, "run_id"):
        data = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
        # MLflow would append to a table of the same name.
        experiment.log_table(logger.run_id, data, f"{key}/step_{step:08d}.json")


def define_metrics(logger: Any) -> None:
    """Define the step axis and the summary values of logged keys in W&B."""
    define = getattr(getattr(logger, "experiment", None), "define_metric", None)
    if define is None:
        return
    define(_AXIS)
    for group in _GROUPS:
        define(f"{group}/*", step_metric=_AXIS)
    for key, summary in _SUMMARIES.items():
        define(key, step_metric=_AXIS, summary=summary)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("|", "\\|")
