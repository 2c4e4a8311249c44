"""Old import paths: modules that have moved into rooms, importable under their former names."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "keep_old_paths"]

MOVED = {
    "averaging": "training.averaging",
    "checkpoint": "training.checkpoint",
    "compute_report": "compute.report",
    "dashboards": "monitoring",
    "dashboards.figures": "monitoring.figures",
    "dashboards.sinks": "monitoring.loggers",
    "dashboards.tables": "monitoring.tables",
    "dashboards.workspace": "monitoring.workspace",
    "deployed": "gates.deployment",
    "gate_activity": "monitoring.activity",
    "gate_statistics": "collapse.statistics",
    "landing": "budget.landing",
    "metrics": "compute.metric",
    "module": "training.classifier",
    "multiplier": "budget.multiplier",
    "penalties": "budget.penalty",
    "plan": "schedules.plan",
    "protocol": "gates.protocol",
    "report": "study.report",
    "rescue": "collapse.rescue",
    "routing": "monitoring.routing",
    "slots": "gates.state",
    "spec": "training.spec",
    "switch_moe": "layers.switch_moe",
    "whole_net": "compute.whole_net",
}


class _Moved(ModuleType):
    """A module under its old name, imported when an attribute is used."""

    def __init__(self, name: str, new_name: str) -> None:
        super().__init__(name, f"Moved to {new_name}.")
        self.__spec__ = ModuleSpec(name, None)
        self._new_name = new_name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        return getattr(import_module(self._new_name), name)


def keep_old_paths(package: str) -> None:
    """Let the modules of a package be imported by their old paths too."""
    for old, new in MOVED.items():
        sys.modules.setdefault(f"{package}.{old}", _Moved(f"{package}.{old}", f"{package}.{new}"))
