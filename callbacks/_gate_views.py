"""How a look at the gates is shown: as files of the run, and in loggers that can."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from dg_lightning.dashboards import (
    GateTables,
    can_show_pictures,
    gate_figure,
    has_matplotlib,
    show_pictures,
    show_table,
)
from dg_lightning.dashboards.tables import LAYER_COLUMNS
from dg_lightning.gate_activity import GateHistory

from ._gate_look import Look

__all__ = ["log_everywhere", "send_pictures", "send_tables", "write_files", "writes_files"]


def write_files(trainer: Any, tables: GateTables, look: Look) -> None:
    """Write what there is of a look beside its units: classes, inputs, verdicts."""
    data = getattr(trainer, "datamodule", None)
    if look.num_classes:
        names = getattr(data, "class_names", None) or ()
        known = names if len(names) == look.num_classes else range(look.num_classes)
        tables.write_classes(look.found, [str(name) for name in known])
    on_input = [name for name, gate in look.gates.items() if gate.feeds.producer is None]
    shape = getattr(data, "input_shape", None)
    if on_input and shape is not None:
        tables.write_inputs(on_input, shape, getattr(data, "feature_names", None) or ())
    if verdicts := _verdicts(trainer):
        tables.write_verdicts(verdicts)


def send_pictures(trainer: Any, key: str, look: Look, history: GateHistory) -> None:
    """Draw every gate for the loggers that can show pictures."""
    able = [logger for logger in trainer.loggers if can_show_pictures(logger)]
    if able and not has_matplotlib():
        rank_zero_info("Pictures of gates need matplotlib: pip install matplotlib")
        return
    data = getattr(trainer, "datamodule", None)
    figures = {}
    for gate in look.found if able else ():
        on_input = look.gates[gate.layer].feeds.producer is None
        figures[gate.layer] = gate_figure(
            gate,
            history.shown(),
            getattr(data, "input_shape", None) if on_input else None,
            getattr(data, "feature_names", None) if on_input else None,
            getattr(data, "class_names", None),
        )
    for logger in able:
        show_pictures(logger, f"{key}/pictures", figures, history.shown()[-1].step)


def send_tables(
    trainer: Any, key: str, look: Look, step: int, rows: Sequence[dict[str, Any]]
) -> None:
    """Hand the course of the layers, the units now, and the verdicts on them to loggers."""
    layers = [[row[column] for column in LAYER_COLUMNS] for row in rows]
    units = [
        [gate.layer, unit, p, g]
        for gate in look.found
        for unit, (p, g) in enumerate(zip(gate.p.tolist(), gate.g.tolist(), strict=True))
    ]
    verdicts = [[v["step"], v["layer"], v["mode"]] for v in _verdicts(trainer)]
    for logger in trainer.loggers:
        if layers:
            show_table(logger, f"{key}/layers", LAYER_COLUMNS, layers, step)
        if hasattr(logger, "log_table"):  # thousands of rows: not as text
            show_table(logger, f"{key}/units", ["layer", "unit", "p", "g"], units, step)
        if verdicts:
            show_table(logger, "collapse/verdicts", ["step", "layer", "mode"], verdicts, step)


def _verdicts(trainer: Any) -> list[dict[str, Any]]:
    """Return what any callback has said about gates that fail."""
    return [v for callback in trainer.callbacks for v in getattr(callback, "verdicts", [])]


def log_everywhere(pl_module: Any, key: str, value: float, prog_bar: bool = False) -> None:
    """Log a figure that all processes have; on the module's device, for NCCL takes no other."""
    tensor = torch.tensor(value, dtype=torch.float32, device=pl_module.device)
    pl_module.log(key, tensor, prog_bar=prog_bar, sync_dist=True)


def writes_files(trainer: Any) -> bool:
    """Return True if this process writes files and talks to loggers."""
    return bool(trainer.is_global_zero) and not trainer.fast_dev_run
