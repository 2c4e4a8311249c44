"""Reading the files of a run for its report."""

import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from torch import Tensor

from dg_lightning.monitoring.tables import read_lines, read_rows

__all__ = ["GateInput", "RunRecord", "UnitHistory", "is_run", "read_run", "read_tasks"]


@dataclass(frozen=True)
class UnitHistory:
    """The units of one gate over the snapshots of a run."""

    epochs: list[int]
    g: Tensor  # (units, snapshots), share of samples that open a unit
    p: Tensor  # (units,), mean probability in the last snapshot


@dataclass(frozen=True)
class GateInput:
    """Sample shape and feature names of an input gate."""

    shape: list[int]
    features: list[str]


@dataclass
class RunRecord:
    """A run: logged metrics, gate activity, and setup."""

    metrics: list[dict[str, float]]  # one row per logged step
    test: dict[str, float]
    layers: list[dict[str, str]]  # layers.csv
    units: dict[str, UnitHistory]
    classes: dict[str, tuple[list[str], Tensor]]  # by layer: class names, shares (classes, units)
    positions: dict[str, list[tuple[float, float]]]  # by layer: share that is open by position
    histograms: dict[str, list[tuple[float, float]]]  # last ones, by layer: lower edge, share
    inputs: dict[str, GateInput]
    confusion: tuple[list[str], Tensor] | None
    compute: list[dict[str, str]]
    verdicts: list[dict[str, str]]
    watched: set[str] | None  # gates that were watched for collapse; None if not recorded
    tasks: Tensor | None = None  # accuracy after learning each task (rows), by task (columns)
    config: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs of a logged key."""
        return [(row["step"], row[key]) for row in self.metrics if key in row]

    def keys(self, *prefixes: str) -> list[str]:
        """Return the logged keys with one of these prefixes, in order of appearance."""
        keys = dict.fromkeys(key for row in self.metrics for key in row)
        return [key for key in keys if key.startswith(prefixes)]


def is_run(folder: Path) -> bool:
    """Return True if the folder holds files of a run."""
    return any((folder / name).exists() for name in ("metrics.csv", "gates", "config.yaml"))


def read_run(folder: Path) -> RunRecord:
    """Read a run and, for a training run, the test of its checkpoint from that test's folder."""
    tested = folder if (folder / "confusion.csv").exists() else _find_test(folder) or folder
    gates = folder / "gates"
    if not gates.is_dir():  # a test without training
        gates = next((path for path in sorted(folder.glob("gates_*")) if path.is_dir()), gates)
    return RunRecord(
        metrics=[row for row in _read_numbers(folder / "metrics.csv") if not _is_test_row(row)],
        test=_test_metrics(_read_numbers(tested / "metrics.csv")),
        layers=read_rows(gates / "layers.csv"),
        units=_read_units(gates / "units.csv"),
        classes=_read_classes(gates / "classes.csv"),
        positions=_read_positions(gates / "positions.csv"),
        histograms=_read_histograms(gates / "histogram.csv"),
        inputs=_read_inputs(gates / "inputs.csv"),
        confusion=_read_confusion(tested / "confusion.csv"),
        compute=read_rows(tested / "compute.csv"),
        verdicts=read_rows(gates / "collapse.csv"),
        watched=_read_watched(gates / "watched.csv"),
        tasks=read_tasks(folder / "tasks.csv"),
        config=_read_text(folder / "config.yaml"),
        versions=_read_versions(folder / "versions.json"),
    )


def _find_test(folder: Path) -> Path | None:
    """Return the folder of the newest test of a checkpoint in this folder."""
    tests = [
        path.parent
        for path in folder.parent.glob("*/confusion.csv")
        # Only the last parts: the path is relative to where the test was started.
        if _tested_checkpoint(path.parent).parts[-3:-1] == (folder.name, "checkpoints")
    ]
    return max(tests, key=lambda path: (path / "confusion.csv").stat().st_mtime, default=None)


def _tested_checkpoint(folder: Path) -> Path:
    try:
        settings = yaml.safe_load(_read_text(folder / "config.yaml"))
    except yaml.YAMLError:  # edited by hand
        return Path()
    return Path(settings.get("ckpt_path") or "" if isinstance(settings, dict) else "")


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_versions(path: Path) -> dict[str, str]:
    versions: dict[str, str] = json.loads(_read_text(path) or "{}")
    return versions


def _read_watched(path: Path) -> set[str] | None:
    return {row["layer"] for row in read_rows(path)} if path.is_file() else None


def _read_numbers(path: Path) -> list[dict[str, float]]:
    try:
        return [{k: float(value) for k, value in row.items() if value} for row in read_rows(path)]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, or use another run.") from error


def _is_test_row(row: dict[str, float]) -> bool:
    return any(key.startswith("test/") for key in row)


def _test_metrics(rows: list[dict[str, float]]) -> dict[str, float]:
    return next((row for row in reversed(rows) if _is_test_row(row)), {})


def _read_units(path: Path) -> dict[str, UnitHistory]:
    """Read the unit histories by layer; each snapshot starts with unit 0."""
    epochs: dict[str, list[int]] = {}
    shares: dict[str, tuple[array[float], array[float]]] = {}
    lines = read_lines(path)
    next(lines, None)
    for epoch, _, layer, unit, p, g in lines:
        if unit == "0":
            epochs.setdefault(layer, []).append(int(epoch))
        p_values, g_values = shares.setdefault(layer, (array("f"), array("f")))
        p_values.append(float(p))
        g_values.append(float(g))
    return {layer: _unit_history(epochs[layer], *shares[layer]) for layer in shares}


def _unit_history(epochs: list[int], p: "array[float]", g: "array[float]") -> UnitHistory:
    units = -(-len(g) // len(epochs))  # the last snapshot may be incomplete
    snapshots = len(g) // units
    table = torch.tensor(g[: snapshots * units]).reshape(snapshots, units).T
    return UnitHistory(epochs[:snapshots], table, torch.tensor(p[: snapshots * units][-units:]))


def _read_classes(path: Path) -> dict[str, tuple[list[str], Tensor]]:
    shares_by_layer: dict[str, list[list[float]]] = {}
    lines = read_lines(path)
    header = next(lines, [])
    for layer, _, *shares in lines:
        shares_by_layer.setdefault(layer, []).append([float(share) for share in shares])
    return {layer: (header[2:], torch.tensor(rows).T) for layer, rows in shares_by_layer.items()}


def _read_positions(path: Path) -> dict[str, list[tuple[float, float]]]:
    shares: dict[str, list[tuple[float, float]]] = {}
    for row in read_rows(path):
        point = float(row["position"]), float(row["open_rate_g"])
        shares.setdefault(row["layer"], []).append(point)
    return shares


def _read_histograms(path: Path) -> dict[str, list[tuple[float, float]]]:
    last = {row["layer"]: row for row in read_rows(path)}
    return {
        layer: [
            (float(column.removeprefix("p_")), float(share))
            for column, share in row.items()
            if column.startswith("p_")
        ]
        for layer, row in last.items()
    }


def _read_inputs(path: Path) -> dict[str, GateInput]:
    lines = read_lines(path)
    next(lines, None)
    return {
        layer: GateInput([int(size) for size in shape.split()], features)
        for layer, shape, *features in lines
    }


def _read_confusion(path: Path) -> tuple[list[str], Tensor] | None:
    header, *lines = list(read_lines(path)) or [[]]
    if not lines:
        return None
    return header[1:], torch.tensor([[float(count) for count in line[1:]] for line in lines])


def read_tasks(path: Path) -> Tensor | None:
    """Read the accuracies after each task of a sequence; None if there was none."""
    lines = [[float(value) for value in line] for line in read_lines(path)]
    return torch.tensor(lines[1:]) if len(lines) > 1 else None
