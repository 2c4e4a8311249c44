"""What a run has left on the disk, read for its report."""

import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from torch import Tensor

from dg_lightning.dashboards.tables import read_lines, read_rows

__all__ = ["GateInput", "RunRecord", "UnitHistory", "is_run", "read_run"]


@dataclass(frozen=True)
class UnitHistory:
    """The units of one gate, look by look."""

    epochs: list[int]
    g: Tensor  # (units, looks), share of samples that open them
    p: Tensor  # (units,), mean, at the last look


@dataclass(frozen=True)
class GateInput:
    """What a gate on the input stands for."""

    shape: list[int]
    features: list[str]


@dataclass
class RunRecord:
    """A run: what was logged, what its gates did, and how it was set up."""

    metrics: list[dict[str, float]]  # a row a logged step
    test: dict[str, float]
    layers: list[dict[str, str]]  # layers.csv
    units: dict[str, UnitHistory]
    classes: dict[str, tuple[list[str], Tensor]]  # by layer: names, (classes, units)
    histograms: dict[str, list[tuple[float, float]]]  # by layer: lower edge, share; the last ones
    inputs: dict[str, GateInput]
    confusion: tuple[list[str], Tensor] | None
    compute: list[dict[str, str]]
    verdicts: list[dict[str, str]]
    config: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Return a logged value by step."""
        return [(row["step"], row[key]) for row in self.metrics if key in row]

    def keys(self, *prefixes: str) -> list[str]:
        """Return the logged keys that begin like one of these, in order of appearance."""
        found = dict.fromkeys(key for row in self.metrics for key in row)
        return [key for key in found if key.startswith(prefixes)]


def is_run(folder: Path) -> bool:
    """Tell whether a run has left something here."""
    return any((folder / name).exists() for name in ("metrics.csv", "gates", "config.yaml"))


def read_run(folder: Path) -> RunRecord:
    """Read a run; of a training also the test of its checkpoint, which has its own folder."""
    tested = folder if (folder / "confusion.csv").exists() else _test_of(folder) or folder
    gates = folder / "gates"
    if not gates.is_dir():  # a test alone
        gates = next((path for path in sorted(folder.glob("gates_*")) if path.is_dir()), gates)
    return RunRecord(
        metrics=[row for row in _numbers(folder / "metrics.csv") if not _is_test(row)],
        test=_tested(_numbers(tested / "metrics.csv")),
        layers=read_rows(gates / "layers.csv"),
        units=_units(gates / "units.csv"),
        classes=_classes(gates / "classes.csv"),
        histograms=_histograms(gates / "histogram.csv"),
        inputs=_inputs(gates / "inputs.csv"),
        confusion=_confusion(tested / "confusion.csv"),
        compute=read_rows(tested / "compute.csv"),
        verdicts=read_rows(gates / "collapse.csv"),
        config=_text(folder / "config.yaml"),
        versions=_versions(folder / "versions.json"),
    )


def _test_of(folder: Path) -> Path | None:
    """Return the folder of the newest test of a checkpoint that lies in this one."""
    found = [
        path.parent
        for path in folder.parent.glob("*/confusion.csv")
        # By its end: it is written as seen from where the test was started.
        if _checkpoint(path.parent).parts[-3:-1] == (folder.name, "checkpoints")
    ]
    return max(found, key=lambda path: (path / "confusion.csv").stat().st_mtime, default=None)


def _checkpoint(folder: Path) -> Path:
    try:
        settings = yaml.safe_load(_text(folder / "config.yaml"))
    except yaml.YAMLError:  # edited by hand
        return Path()
    return Path(settings.get("ckpt_path") or "" if isinstance(settings, dict) else "")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _versions(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(_text(path) or "{}")
    return found


def _numbers(path: Path) -> list[dict[str, float]]:
    try:
        return [{k: float(value) for k, value in row.items() if value} for row in read_rows(path)]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, or take another run.") from error


def _is_test(row: dict[str, float]) -> bool:
    return any(key.startswith("test/") for key in row)


def _tested(rows: list[dict[str, float]]) -> dict[str, float]:
    return next((row for row in reversed(rows) if _is_test(row)), {})


def _units(path: Path) -> dict[str, UnitHistory]:
    """Read the shares by layer; a look begins with unit 0."""
    epochs: dict[str, list[int]] = {}
    shares: dict[str, tuple[array[float], array[float]]] = {}
    lines = read_lines(path)
    next(lines, None)
    for epoch, _, layer, unit, p, g in lines:
        if unit == "0":
            epochs.setdefault(layer, []).append(int(epoch))
        of_p, of_g = shares.setdefault(layer, (array("f"), array("f")))
        of_p.append(float(p))
        of_g.append(float(g))
    return {layer: _history(epochs[layer], *shares[layer]) for layer in shares}


def _history(epochs: list[int], p: "array[float]", g: "array[float]") -> UnitHistory:
    units = -(-len(g) // len(epochs))  # the last look may not be complete
    looks = len(g) // units
    table = torch.tensor(g[: looks * units]).reshape(looks, units).T
    return UnitHistory(epochs[:looks], table, torch.tensor(p[(looks - 1) * units : looks * units]))


def _classes(path: Path) -> dict[str, tuple[list[str], Tensor]]:
    found: dict[str, list[list[float]]] = {}
    lines = read_lines(path)
    head = next(lines, [])
    for layer, _, *shares in lines:
        found.setdefault(layer, []).append([float(share) for share in shares])
    return {layer: (head[2:], torch.tensor(rows).T) for layer, rows in found.items()}


def _histograms(path: Path) -> dict[str, list[tuple[float, float]]]:
    last = {row["layer"]: row for row in read_rows(path)}
    return {
        layer: [
            (float(column.removeprefix("p_")), float(share))
            for column, share in row.items()
            if column.startswith("p_")
        ]
        for layer, row in last.items()
    }


def _inputs(path: Path) -> dict[str, GateInput]:
    lines = read_lines(path)
    next(lines, None)
    return {
        layer: GateInput([int(size) for size in shape.split()], features)
        for layer, shape, *features in lines
    }


def _confusion(path: Path) -> tuple[list[str], Tensor] | None:
    head, *lines = list(read_lines(path)) or [[]]
    if not lines:
        return None
    return head[1:], torch.tensor([[float(count) for count in line[1:]] for line in lines])
