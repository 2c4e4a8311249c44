"""What a logger can show: asked for its abilities, never for its class."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dg_lightning.dashboards.figures import pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["can_show_pictures", "define_metrics", "run_folder", "show_pictures", "show_table"]

# W&B: which value of a run stands for it in tables and scatter plots.
_SUMMARIES = {
    "val/accuracy": "last,max",
    "val/macro_f1": "last,max",
    "val/loss": "last,min",
    "train/loss": "last,min",
}
_AXIS = "trainer/global_step"
_AREAS = ("train", "val", "test", "compute", "gates", "collapse", "routing", "rewire")


def run_folder(trainer: Any) -> Path:
    """Return the folder of this run: where Lightning puts its checkpoints.

    `trainer.log_dir` would be the same for all runs of a W&B or MLflow logger.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    version = logger.version
    name = version if isinstance(version, str) else f"version_{version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), name)


def can_show_pictures(logger: Any) -> bool:
    """Tell whether a logger takes pictures."""
    experiment: Any = getattr(logger, "experiment", None)
    return hasattr(logger, "log_image") or any(
        hasattr(experiment, ability) for ability in ("add_image", "log_figure")
    )


def show_pictures(logger: Any, key: str, figures: Mapping[str, "Figure"], step: int) -> None:
    """Hand pictures to a logger that can show them: W&B, TensorBoard, MLflow, Comet.

    In W&B they share one panel under the key, elsewhere each has its name behind it.
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
    """Hand a whole table to a logger that can show it.

    Always all rows: a table that W&B has seen is not extended by rows that come later.
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
        # MLflow appends to a table of that name, so each one has a name of its own.
        experiment.log_table(logger.run_id, data, f"{key}/step_{step:08d}.json")


def define_metrics(logger: Any) -> None:
    """Tell W&B the axis of every group of keys, and which value of a run stands for it."""
    define = getattr(getattr(logger, "experiment", None), "define_metric", None)
    if define is None:
        return
    define(_AXIS)
    for area in _AREAS:
        define(f"{area}/*", step_metric=_AXIS)
    for key, summary in _SUMMARIES.items():
        define(key, step_metric=_AXIS, summary=summary)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("|", "\\|")
