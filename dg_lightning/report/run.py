"""What a run has left on the disk, read for its report."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from dg_lightning.dashboards.tables import read_lines, read_rows

__all__ = ["RunRecord", "UnitHistory", "is_run", "read_run"]


@dataclass(frozen=True)
class UnitHistory:
    """The units of one gate: share of samples that open them, look by look."""

    epochs: list[int]
    g: Tensor  # (units, looks)


@dataclass
class RunRecord:
    """A run: what was logged, what its gates did, and how it was set up."""

    name: str
    metrics: list[dict[str, float]]  # a row a logged step
    test: dict[str, float]
    layers: list[dict[str, str]]  # layers.csv
    units: dict[str, UnitHistory]
    classes: dict[str, tuple[list[str], Tensor]]  # by layer: names, (classes, units)
    histograms: dict[str, list[tuple[float, float]]]  # by layer: lower edge, share; the last ones
    confusion: tuple[list[str], Tensor] | None
    compute: list[dict[str, str]]
    verdicts: list[dict[str, str]]
    config: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    input_shape: list[int] | None = None

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


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read a run; of a training also the test of its checkpoint, which has its own folder."""
    tested = folder if (folder / "confusion.csv").exists() else _test_of(folder) or folder
    gates = folder / "gates"
    if not gates.is_dir():  # a test alone
        gates = next((path for path in sorted(folder.glob("gates_*")) if path.is_dir()), gates)
    metrics = _numbers(folder / "metrics.csv")
    config_path, settings = folder / "config.yaml", _yaml(folder / "config.yaml")
    return RunRecord(
        name=name or folder.name,
        metrics=[row for row in metrics if not _is_test(row)],
        test=_tested(_numbers(tested / "metrics.csv")),
        layers=read_rows(gates / "layers.csv"),
        units=_units(gates / "units.csv"),
        classes=_classes(gates / "classes.csv"),
        histograms=_histograms(gates / "histogram.csv"),
        confusion=_confusion(tested / "confusion.csv"),
        compute=read_rows(tested / "compute.csv"),
        verdicts=read_rows(gates / "collapse.csv"),
        config=config_path.read_text(encoding="utf-8") if config_path.is_file() else "",
        versions=_yaml(folder / "hparams.yaml").get("versions") or {},
        input_shape=((settings.get("model") or {}).get("init_args") or {}).get("input_shape"),
    )


def _test_of(folder: Path) -> Path | None:
    """Return the folder of the newest test of a checkpoint that lies in this one."""
    found = [
        path.parent
        for path in folder.parent.glob("*/confusion.csv")
        if (checkpoint := _yaml(path.parent / "config.yaml").get("ckpt_path"))
        and Path(checkpoint).resolve().is_relative_to(folder.resolve())
    ]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _numbers(path: Path) -> list[dict[str, float]]:
    return [{key: float(value) for key, value in row.items() if value} for row in read_rows(path)]


def _is_test(row: dict[str, float]) -> bool:
    return any(key.startswith("test/") for key in row)


def _tested(rows: list[dict[str, float]]) -> dict[str, float]:
    return next((row for row in reversed(rows) if _is_test(row)), {})


def _units(path: Path) -> dict[str, UnitHistory]:
    """Read the shares by layer; a look is an (epoch, step) pair."""
    found: dict[str, dict[tuple[int, int], list[float]]] = {}
    for row in read_rows(path):
        looks = found.setdefault(row["layer"], {})
        looks.setdefault((int(row["epoch"]), int(row["step"])), []).append(float(row["g"]))
    return {layer: _history(looks) for layer, looks in found.items()}


def _history(looks: dict[tuple[int, int], list[float]]) -> UnitHistory:
    units = max(map(len, looks.values()))
    whole = {when: g for when, g in looks.items() if len(g) == units}  # one may be half written
    return UnitHistory([epoch for epoch, _ in whole], torch.tensor(list(whole.values())).T)


def _classes(path: Path) -> dict[str, tuple[list[str], Tensor]]:
    found: dict[str, list[list[float]]] = {}
    head, *lines = read_lines(path) or [[]]
    for layer, _, *shares in lines:
        found.setdefault(layer, []).append([float(share) for share in shares])
    return {layer: (head[2:], torch.tensor(rows).T) for layer, rows in found.items()}


def _histograms(path: Path) -> dict[str, list[tuple[float, float]]]:
    last = {row["layer"]: row for row in read_rows(path)}
    return {
        layer: [
            (float(column.removeprefix("p_")), float(share))
            for column, share in row.items()
            if column.startswith("p_") and not math.isnan(float(share))
        ]
        for layer, row in last.items()
    }


def _confusion(path: Path) -> tuple[list[str], Tensor] | None:
    head, *lines = read_lines(path) or [[]]
    if not lines:
        return None
    return head[1:], torch.tensor([[float(count) for count in line[1:]] for line in lines])
