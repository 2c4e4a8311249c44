"""Gate settings as plain values, as stored in YAML files and checkpoints."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from dg_lightning.gates.base import Gate, GateOptions
from dg_lightning.gates.dynamic import DynamicGate
from dg_lightning.gates.static import StaticGate

__all__ = ["GateSettings", "check_gate_settings", "make_gate"]


class GateSettings(GateOptions, total=False):
    """Kind and options of a layer's gate, as plain values."""

    kind: Literal["static", "dynamic"]
    network: Literal["linear", "low_rank", "mlp"]
    rank: int
    hidden: int
    initial_spread: float


def make_gate(
    settings: GateSettings,
    in_features: int,
    units: int,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> Gate:
    """Build a gate from its settings, for a layer of `units` units.

    >>> make_gate({"kind": "static", "threshold": 0.6}, in_features=8, units=4)
    StaticGate(units=4, policy=threshold)
    """
    check_gate_settings("gate", settings)
    options: dict[str, Any] = dict(settings)
    kind = options.pop("kind", "static")
    if kind == "static":
        return StaticGate(units, device=device, dtype=dtype, **options)
    return DynamicGate(in_features, units, device=device, dtype=dtype, **options)


def check_gate_settings(name: str, settings: Any) -> None:
    """Refuse what are no settings of a gate; `name` is that of the argument."""
    if not isinstance(settings, Mapping) or not settings:
        raise ValueError(
            f"`{name}` must be the settings of a gate, as {{'kind': 'static'}}, got {settings!r}."
        )
    options = dict(settings)
    kind = options.pop("kind", "static")
    if kind not in ("static", "dynamic"):
        raise ValueError(f"The `kind` of `{name}` must be static or dynamic, got {kind!r}.")
    known = set(GateOptions.__annotations__)
    if kind == "dynamic":
        known |= {"network", "rank", "hidden", "initial_spread"}
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"A {kind} gate has no setting {unknown[0]!r} (`{name}`); it has "
            f"{', '.join(sorted(known))}."
        )
