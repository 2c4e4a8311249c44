"""CSV tables of gates, written by `GateMonitor` and read by reports."""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dg_lightning.files import csv_cell, from_csv_cell
from dg_lightning.monitoring.activity import BINS, GateSnapshot, HistoryEntry

__all__ = ["LAYER_COLUMNS", "GateTables", "read_lines", "read_rows"]

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
    """CSV tables of one run, in a folder.

    | file | each row |
    |---|---|
    | `layers.csv` | a gate in a snapshot: open rates, churn, dead units, τ, θ; never thinned |
    | `units.csv` | a unit or block in a snapshot: mean p, and g, the share of samples opening it |
    | `histogram.csv` | a gate in a snapshot: share of all p by bin, named by its lower edge |
    | `classes.csv` | a unit in the last snapshot: the share of each class that opens it |
    | `positions.csv` | a position in the last snapshot: the share that is open there |
    | `inputs.csv` | an input gate: shape of a sample, names of its features |
    | `collapse.csv` | a verdict of `CollapseDetector` |
    | `watched.csv` | a gate that `CollapseDetector` watches |

    Units and histograms are kept for at most 100 snapshots: in a longer run for every second,
    fourth, ... and the last one.

    Args:
        folder: Folder of the tables; created with the first one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, entries: Sequence[HistoryEntry], layers: Sequence[Mapping[str, Any]]) -> None:
        """Start new tables, with the earlier rows of a resumed run."""
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
        """Write the share of blocks that is open at each position of a sequence."""
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
        # Atomic rename: a report may read while a run is writing.
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
