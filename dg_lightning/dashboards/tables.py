"""Gate tables as files: written by `GateMonitor`, read by reports and by whoever plots himself."""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dg_lightning.gate_activity import BINS, GateLook, LookBack

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
    """The tables of one run, in a folder.

    | file | a row |
    |---|---|
    | `layers.csv` | a gate at a look: open rates, churn, dead units, τ, θ |
    | `units.csv` | a unit (or block) at a look: mean p, and g, the share of samples that open it |
    | `histogram.csv` | a gate at a look: share of all p by bin, named by its lower edge |
    | `classes.csv` | a unit at the last look: the share of each class that opens it |
    | `inputs.csv` | a gate on the input: shape of a sample, names of its features |
    | `collapse.csv` | a verdict of `CollapseDetector` |

    Units and histograms are those of at most 100 looks: of a longer training, every second,
    fourth, ... and the last one.

    Args:
        folder: Where they are; made with the first table.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, looks: Sequence[LookBack], layers: Sequence[Mapping[str, Any]]) -> None:
        """Write anew what is known from before: of a run that goes on, or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("classes", "collapse", "inputs"):
            self._path(name).unlink(missing_ok=True)
        self._write("layers", LAYER_COLUMNS, ([row[c] for c in LAYER_COLUMNS] for row in layers))
        self.rewrite(looks)

    def rewrite(self, looks: Sequence[LookBack]) -> None:
        """Write the looks that are left after some were let go."""
        self._write("units", _UNIT_COLUMNS, _unit_rows(looks))
        self._write("histogram", _BIN_COLUMNS, _bin_rows(looks))

    def add(self, look: LookBack) -> None:
        """Add one look."""
        self._append("units", _unit_rows([look]))
        self._append("histogram", _bin_rows([look]))

    def add_layers(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Add the figures of the gates at one look."""
        self._append("layers", ([row[c] for c in LAYER_COLUMNS] for row in layers))

    def write_classes(self, gates: Sequence[GateLook], names: Sequence[str]) -> None:
        """Write which units open for which class."""
        rows = (
            [gate.layer, unit, *map(_short, shares)]
            for gate in gates
            if gate.by_class is not None
            for unit, shares in enumerate(gate.by_class.T.tolist())
        )
        self._write("classes", ("layer", "unit", *names), rows)

    def write_inputs(
        self, gates: Sequence[str], shape: Sequence[int], names: Sequence[str]
    ) -> None:
        """Write what gates on the input stand for."""
        size = " ".join(map(str, shape))
        self._write("inputs", ("layer", "shape", "features"), ([g, size, *names] for g in gates))

    def write_verdicts(self, verdicts: Sequence[Mapping[str, Any]]) -> None:
        """Write what went wrong, and when."""
        columns = ("step", "layer", "mode")
        self._write("collapse", columns, ([verdict[c] for c in columns] for verdict in verdicts))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.csv"

    def _write(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        # By a rename: a report may be made while a run is writing.
        temporary = self.folder / f".{name}.{os.getpid()}"
        with temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])
        temporary.replace(self._path(name))

    def _append(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._path(name).open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


def read_lines(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a table, heads first; one that is not written to its end is left out."""
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        whole = (line for line in file if line.endswith("\n"))
        yield from csv.reader(whole)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table by its columns; none where there is no such file."""
    lines = read_lines(path)
    columns = next(lines, [])
    return [dict(zip(columns, line, strict=False)) for line in lines]


def _unit_rows(looks: Sequence[LookBack]) -> Iterator[list[Any]]:
    for look in looks:
        for layer, g in look.g.items():
            pairs = zip(look.p[layer].tolist(), g.tolist(), strict=True)
            for unit, (p, opened) in enumerate(pairs):
                yield [look.epoch, look.step, layer, unit, _short(p), _short(opened)]


def _bin_rows(looks: Sequence[LookBack]) -> Iterator[list[Any]]:
    for look in looks:
        for layer, shares in look.histogram.items():
            yield [look.epoch, look.step, layer, *map(_short, shares.tolist())]


def _short(value: float) -> str:
    return f"{value:.5g}"
