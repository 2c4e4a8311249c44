"""Send gate snapshots to files and loggers."""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from dg_lightning.files import csv_cell, from_csv_cell
from dg_lightning.monitoring.activity import BINS, GateHistory, GateSnapshot, HistoryEntry, Snapshot
from dg_lightning.monitoring.figures import gate_figure, has_matplotlib, render_rgb
from dg_lightning.training import logged_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LAYER_COLUMNS = (
    "epoch",
    "step",
    "layer",
    "open_rate_g",
    "open_rate_p",
    "churn",
    "dead_units",
    "temperature",
    "threshold",
)
_UNIT_COLUMNS = ("epoch", "step", "layer", "unit", "p", "g")
_BIN_COLUMNS = ("epoch", "step", "layer", *(f"p_{index / BINS:.2f}" for index in range(BINS)))


class GateTables:
    """A folder with the CSV tables of one run.

    | file | each row |
    |---|---|
    | `layers.csv` | a gate in a snapshot: open rates, churn, dead units, τ, θ; never thinned |
    | `units.csv` | a unit or block in a snapshot: mean p, and g, the share of samples opening it |
    | `histogram.csv` | a gate in a snapshot: share of all p in each bin, named by its lower edge |
    | `classes.csv` | a unit in the last snapshot: the share of each class that opens it |
    | `positions.csv` | a position in the last snapshot: the share of blocks open there |
    | `inputs.csv` | an input gate: sample shape and feature names |
    | `collapse.csv` | a verdict of `CollapseDetector` |
    | `watched.csv` | a gate that `CollapseDetector` watches |

    Units and histograms are kept for at most 100 snapshots. Longer runs keep every second snapshot,
    then every fourth and so on, and always the last one.

    Args:
        folder: Folder of the tables, created when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, entries: Sequence[HistoryEntry], layers: Sequence[Mapping[str, Any]]) -> None:
        """Start new tables, which include the earlier rows of a resumed run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("classes", "collapse", "inputs", "positions"):
            self._path(name).unlink(missing_ok=True)
        self._write("layers", LAYER_COLUMNS, ([row[c] for c in LAYER_COLUMNS] for row in layers))
        self.rewrite(entries)

    def rewrite(self, entries: Sequence[HistoryEntry]) -> None:
        """Rewrite the tables after the history was thinned."""
        self._write("units", _UNIT_COLUMNS, _unit_rows(entries))
        self._write("histogram", _BIN_COLUMNS, _bin_rows(entries))

    def add(self, entry: HistoryEntry) -> None:
        """Append one history entry."""
        self._append("units", _unit_rows([entry]))
        self._append("histogram", _bin_rows([entry]))

    def add_layers(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Append the rows of one snapshot to `layers.csv`."""
        self._append("layers", ([row[c] for c in LAYER_COLUMNS] for row in layers))

    def write_classes(self, gates: Sequence[GateSnapshot], names: Sequence[str]) -> None:
        """Write the share of each class that opens a unit."""
        rows = (
            [gate.layer, unit, *map(_format, shares)]
            for gate in gates
            if gate.by_class is not None
            for unit, shares in enumerate(gate.by_class.T.tolist())
        )
        self._write("classes", ("layer", "unit", *names), rows)

    def write_positions(self, gates: Sequence[GateSnapshot]) -> None:
        """Write the share of blocks that are open at each position in a sequence."""
        by_layer = {g.layer: g.by_position.tolist() for g in gates if g.by_position is not None}
        rows = (
            [layer, position, _format(share)]
            for layer, shares in by_layer.items()
            for position, share in enumerate(shares)
        )
        if by_layer:
            self._write("positions", ("layer", "position", "open_rate_g"), rows)

    def write_inputs(
        self, gates: Sequence[str], shape: Sequence[int], names: Sequence[str]
    ) -> None:
        """Write the sample shape and feature names of input gates."""
        size = " ".join(map(str, shape))
        self._write("inputs", ("layer", "shape", "features"), ([g, size, *names] for g in gates))

    def write_verdicts(self, verdicts: Sequence[Mapping[str, Any]]) -> None:
        """Write the verdicts on failing gates."""
        columns = ("step", "layer", "mode")
        self._write("collapse", columns, ([verdict[c] for c in columns] for verdict in verdicts))

    def write_watched(self, gates: Sequence[str]) -> None:
        """Write the names of the gates that are watched for collapse."""
        self._write("watched", ("layer",), ([name] for name in gates))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.csv"

    def _write(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        # Rename atomically, because a report may read the table while a run writes it.
        temporary = self.folder / f".{name}.{os.getpid()}"
        with temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(map(csv_cell, row) for row in [columns, *rows])
        temporary.replace(self._path(name))

    def _append(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._path(name).open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(map(csv_cell, row) for row in rows)


def read_lines(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a table, header first; skip an incomplete last line."""
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        complete = (line for line in file if line.endswith("\n"))
        for line in csv.reader(complete):
            yield list(map(from_csv_cell, line))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table as dicts; an empty list if there is no such file."""
    lines = read_lines(path)
    columns = next(lines, [])
    return [dict(zip(columns, line, strict=False)) for line in lines]


def _unit_rows(entries: Sequence[HistoryEntry]) -> Iterator[list[Any]]:
    for entry in entries:
        for layer, g in entry.g.items():
            pairs = zip(entry.p[layer].tolist(), g.tolist(), strict=True)
            for unit, (p, opened) in enumerate(pairs):
                yield [entry.epoch, entry.step, layer, unit, _format(p), _format(opened)]


def _bin_rows(entries: Sequence[HistoryEntry]) -> Iterator[list[Any]]:
    for entry in entries:
        for layer, shares in entry.histogram.items():
            yield [entry.epoch, entry.step, layer, *map(_format, shares.tolist())]


def _format(value: float) -> str:
    return f"{value:.5g}"


# Summary values of a run that W&B shows in tables and scatter plots.
_SUMMARIES = {
    "val/accuracy": "last,max",
    "val/macro_f1": "last,max",
    "val/loss": "last,min",
    "train/loss": "last,min",
}
_AXIS = "trainer/global_step"
_GROUPS = (
    *("train", "val", "test", "compute", "gates", "collapse", "routing", "rewiring"),
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


def supports_images(logger: Any) -> bool:
    """Return True if the logger supports images."""
    experiment: Any = getattr(logger, "experiment", None)
    return hasattr(logger, "log_image") or any(
        hasattr(experiment, method) for method in ("add_image", "log_figure")
    )


def show_pictures(logger: Any, key: str, figures: Mapping[str, "Figure"], step: int) -> None:
    """Log figures as images to W&B, TensorBoard, MLflow or Comet.

    In W&B, the figures share one panel under the key. In other loggers, the name of each figure is
    added to the key.
    """
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(logger, "log_image"):
        images = [render_rgb(figure) for figure in figures.values()]
        logger.log_image(key, images, step=step, caption=list(figures))
        return
    for name, figure in figures.items():
        if hasattr(experiment, "add_image"):
            experiment.add_image(f"{key}/{name}", render_rgb(figure), step, dataformats="HWC")
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


def write_files(trainer: Any, tables: GateTables, snapshot: Snapshot) -> None:
    """Write the tables that only show the latest snapshot, such as classes and verdicts."""
    tables.write_positions(snapshot.results)
    data = getattr(trainer, "datamodule", None)
    if snapshot.num_classes:
        names = getattr(data, "class_names", None) or ()
        labels = names if len(names) == snapshot.num_classes else range(snapshot.num_classes)
        tables.write_classes(snapshot.results, [str(label) for label in labels])
    on_input = [name for name, gate in snapshot.gates.items() if gate.feeds.producer is None]
    shape = getattr(data, "input_shape", None)
    if on_input and shape is not None:
        tables.write_inputs(on_input, shape, getattr(data, "feature_names", None) or ())
    if verdicts := _verdicts(trainer):
        tables.write_verdicts(verdicts)
    tables.write_watched(watched_gates(trainer.callbacks))


def publish_evaluation(trainer: Any, snapshot: Snapshot, files: bool, media: bool) -> None:
    """Publish a separate validation or test run under its own name, without history."""
    name, history = f"gates_{trainer.state.fn.value}", GateHistory()
    epoch, step = trainer.current_epoch, logged_step(trainer)
    rows = snapshot.layer_rows(epoch, step, history)
    history.add(HistoryEntry.from_gates(epoch, step, snapshot.results))
    if files:
        tables = GateTables(run_folder(trainer) / name)
        tables.begin(history.entries, rows)
        write_files(trainer, tables, snapshot)
    if media:
        send_pictures(trainer, name, snapshot, history)
        send_tables(trainer, name, snapshot, step, rows)


def send_pictures(trainer: Any, key: str, snapshot: Snapshot, history: GateHistory) -> None:
    """Draw every gate for the loggers that support images."""
    loggers = [logger for logger in trainer.loggers if supports_images(logger)]
    if loggers and not has_matplotlib():
        rank_zero_info("Gate figures need matplotlib: pip install matplotlib")
        return
    data = getattr(trainer, "datamodule", None)
    figures = {}
    for gate in snapshot.results if loggers else ():
        on_input = snapshot.gates[gate.layer].feeds.producer is None
        figures[gate.layer] = gate_figure(
            gate,
            history.entries_with_last(),
            getattr(data, "input_shape", None) if on_input else None,
            getattr(data, "feature_names", None) if on_input else None,
            getattr(data, "class_names", None),
        )
    for logger in loggers:
        show_pictures(logger, f"{key}/pictures", figures, history.entries_with_last()[-1].step)


def send_tables(
    trainer: Any, key: str, snapshot: Snapshot, step: int, rows: Sequence[dict[str, Any]]
) -> None:
    """Log tables: layers over time, current units, and verdicts."""
    layers = [[row[column] for column in LAYER_COLUMNS] for row in rows]
    units = [
        [gate.layer, unit, p, g]
        for gate in snapshot.results
        for unit, (p, g) in enumerate(zip(gate.p.tolist(), gate.g.tolist(), strict=True))
    ]
    verdicts = [[v["step"], v["layer"], v["mode"]] for v in _verdicts(trainer)]
    for logger in trainer.loggers:
        if layers:
            show_table(logger, f"{key}/layers", LAYER_COLUMNS, layers, step)
        if hasattr(logger, "log_table"):  # too many rows for a text table
            show_table(logger, f"{key}/units", ["layer", "unit", "p", "g"], units, step)
        if verdicts:
            show_table(logger, "collapse/verdicts", ["step", "layer", "mode"], verdicts, step)


def _verdicts(trainer: Any) -> list[dict[str, Any]]:
    return [v for callback in trainer.callbacks for v in getattr(callback, "verdicts", [])]


def watched_gates(callbacks: Iterable[Any]) -> list[str]:
    """Return the names of the gates that some callback watches for collapse."""
    return [name for c in callbacks for name in getattr(c, "watched_for_collapse", ())]


def log_scalar(pl_module: Any, key: str, value: float, prog_bar: bool = False) -> None:
    """Log a value that all ranks have, as a tensor on the module's device (for NCCL)."""
    tensor = torch.tensor(value, dtype=torch.float32, device=pl_module.device)
    pl_module.log(key, tensor, prog_bar=prog_bar, sync_dist=True)


def is_writing_rank(trainer: Any) -> bool:
    """Return True if this process writes files and logs media."""
    return bool(trainer.is_global_zero) and not trainer.fast_dev_run
