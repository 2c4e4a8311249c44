"""Output of a gate snapshot: files of the run, pictures and tables in loggers."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from dg_lightning.monitoring import (
    GateTables,
    can_show_pictures,
    gate_figure,
    has_matplotlib,
    run_folder,
    show_pictures,
    show_table,
)
from dg_lightning.monitoring.activity import GateHistory, HistoryEntry
from dg_lightning.monitoring.snapshot import Snapshot
from dg_lightning.monitoring.tables import LAYER_COLUMNS
from dg_lightning.training import logged_step

__all__ = [
    "is_writing_rank",
    "log_scalar",
    "publish_evaluation",
    "send_pictures",
    "send_tables",
    "watched_gates",
    "write_files",
]


def write_files(trainer: Any, tables: GateTables, snapshot: Snapshot) -> None:
    """Write classes, positions, inputs and verdicts of a snapshot."""
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
    """Publish a stand-alone validation or test, without history, under its own name."""
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
    loggers = [logger for logger in trainer.loggers if can_show_pictures(logger)]
    if loggers and not has_matplotlib():
        rank_zero_info("Pictures of gates need matplotlib: pip install matplotlib")
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
    """Log a value that every rank has, on the module's device as NCCL requires."""
    tensor = torch.tensor(value, dtype=torch.float32, device=pl_module.device)
    pl_module.log(key, tensor, prog_bar=prog_bar, sync_dist=True)


def is_writing_rank(trainer: Any) -> bool:
    """Return True if this process writes files and logs media."""
    return bool(trainer.is_global_zero) and not trainer.fast_dev_run
