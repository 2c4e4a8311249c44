"""What every shipped config must have."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dg_lightning.configs import config_path, shipped_configs


def settings_of(name: str) -> Any:
    return yaml.safe_load(Path(config_path(name)).read_text("utf-8"))


def callbacks_of(settings: Any) -> list[str]:
    found = settings.get("trainer", {}).get("callbacks", [])
    return [callback["class_path"].rpartition(".")[2] for callback in found]


def with_keys(value: Any, *names: str) -> Iterator[Any]:
    """Yield what stands under these keys, however deep."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key in names:
            yield inner
        if isinstance(inner, dict | list):
            yield from with_keys(inner, *names)


def has_gates(settings: Any) -> bool:
    net = settings.get("model", {}).get("init_args", {})
    return "AddGates" in callbacks_of(settings) or any(with_keys(net, "gate", "input_gate"))


TRAININGS = [name for name in shipped_configs() if "model" in settings_of(name)]
GATED = [name for name in TRAININGS if has_gates(settings_of(name))]


def test_there_are_configs_with_and_without_gates() -> None:
    assert {"digits/dynamicgate", "vit/dynamicgate", "text/dynamicgate"} <= set(GATED)
    assert {"digits/baseline", "vit/baseline", "text/baseline"} <= {*TRAININGS} - {*GATED}
    assert all(name in GATED for name in TRAININGS if "dynamicgate" in name)


@pytest.mark.parametrize("name", GATED)
def test_gates_are_watched_for_collapse(name: str) -> None:
    assert "CollapseDetector" in callbacks_of(settings_of(name))
