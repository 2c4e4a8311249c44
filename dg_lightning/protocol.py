"""What a callback or the compute ledger may ask of a gate, in anybody's module.

A gate is any `nn.Module` with the attributes of `GateLike`; none of our classes is asked for.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from typing_extensions import TypeIs, get_protocol_members

__all__ = [
    "Feeds",
    "GateLike",
    "by_pattern",
    "connection_mask",
    "gate_layers",
    "keep_p",
    "matching",
    "release",
    "start_open_at",
]

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True)
class Feeds:
    """Where a gate stands between linear maps. Unknown parts stay empty and claim no saving.

    Args:
        producer: The map whose outputs the gate closes; None for a gate on the net's input.
        skips_rows: Whether a closed output need not be computed: the gate is known before the
            product, and nothing between product and gate mixes the units.
        consumers: The maps whose inputs are exactly zero where the gate is closed.
    """

    producer: nn.Linear | None = None
    skips_rows: bool = False
    consumers: tuple[nn.Linear, ...] = ()


class GateLike(Protocol):
    """The gate protocol. `probability` and `gate` hold one entry per block of units."""

    units: int
    block_size: int
    input_dependent: bool
    initial_open_rate: float
    temperature: Tensor  # 0-d buffer, changed in place
    threshold: Tensor  # 0-d buffer, changed in place
    min_open: Tensor  # 0-d buffer, changed by set_min_open
    probability: Tensor | None  # of the last forward pass, with its graph
    gate: Tensor | None  # of the last forward pass, with its graph
    feeds: Feeds

    def decision_macs(self, open_inputs: Tensor | None = None) -> Tensor:
        """Return the MACs of the decision for a sample with so many inputs open; None is all."""

    def set_min_open(self, min_open: int | float) -> None:
        """Set the floor on open gates, an int as a count, a float as a fraction."""

    def shift_bias(self, delta: float) -> None:
        """Add `delta` to the logit of every unit."""

    def revive(self, units: Tensor) -> None:
        """Bring units, given by index or as a bool mask, back to their initial open rate."""


_MEMBERS = get_protocol_members(GateLike)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def is_gate(thing: object) -> TypeIs[GateLike]:
    """Tell whether a thing has what the protocol asks for.

    Not `isinstance`: from Python 3.12 on it overlooks buffers, which a module has by `__getattr__`.
    """
    return all(hasattr(thing, name) for name in _MEMBERS)


def gate_layers(
    module: nn.Module, layers: Sequence[str] | None = None, *, required: bool = True
) -> dict[str, GateLike]:
    """Find the gates in any module, by the name that `named_modules` gives them.

    Args:
        module: Where to look.
        layers: Name patterns as in a shell (`"hidden.*"`); all gates when None.
        required: Whether to raise when there are none.

    Raises:
        ValueError: If there is no gate, or a pattern fits none.

    >>> from dg_lightning import GatedMLP
    >>> list(gate_layers(GatedMLP(8, [4, 4], 2, gate={"kind": "static"})))
    ['hidden.0.gate', 'hidden.1.gate']
    """
    gates = {name: child for name, child in module.named_modules() if is_gate(child)}
    # A wrapper, as of torch.compile, looks like the gate inside it: the innermost one counts.
    found = {
        plain_name(name): gate
        for name, gate in gates.items()
        if not any(other.startswith(f"{name}.") for other in gates)
    }
    if required and not found:
        raise ValueError(
            f"{type(module).__name__} has no gate: build its layers with dg_lightning.GatedLinear "
            "(GatedMLP: `gate: {kind: static}`), or give them a StaticGate or DynamicGate."
        )
    return matching(found, layers, "gate")


def matching(found: dict[str, T], layers: Sequence[str] | None, what: str) -> dict[str, T]:
    """Keep those of the found things whose name fits a pattern; all when there are no patterns.

    >>> matching({"hidden.0": 1, "output": 2}, ["hidden.*"], "layer")
    {'hidden.0': 1}
    """
    if layers is None:
        return found
    if not layers or isinstance(layers, str):
        raise ValueError(
            f"`layers` must be a list of name patterns, got {layers!r}; "
            f"there are {', '.join(found)}."
        )
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(f"No {what} is named {pattern!r}; there are {', '.join(found)}.")
    return {
        name: thing
        for name, thing in found.items()
        if any(fnmatchcase(name, pattern) for pattern in layers)
    }


def by_pattern(
    argument: str, given: Mapping[str, T], named: Mapping[str, Any], default: D
) -> list[T | D]:
    """Return for each named thing the value of the first pattern that fits its name.

    >>> by_pattern("target", {"hidden.*": 0.3}, {"input_gate": None, "hidden.0.gate": None}, 1.0)
    [1.0, 0.3]
    """
    for pattern in given:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ValueError(
                f"`{argument}` names {pattern!r}, which fits none; there are {', '.join(named)}."
            )
    return [
        next((value for pattern, value in given.items() if fnmatchcase(name, pattern)), default)
        for name in named
    ]


def plain_name(name: str) -> str:
    """Take out what wrappers put into module names, so that logged keys stay the same."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def start_open_at(gate: GateLike, temperature: float) -> None:
    """Set the temperature that training starts with, and keep the p of every unit.

    The bias of an open start is ``τ logit(p0)`` with the τ that training really begins at.
    """
    before = float(gate.temperature)
    if math.isclose(before, temperature, rel_tol=1e-6):
        return
    keep_p(gate, temperature / before, gate.initial_open_rate)
    gate.temperature.fill_(temperature)


def keep_p(gate: GateLike, factor: float, typical: float) -> None:
    """Let a gate keep its p while its temperature is multiplied by a factor.

    A gate that cannot scale its logits keeps the typical p only.
    """
    if hasattr(gate, "scale_logits"):
        gate.scale_logits(factor)
    else:
        z = float(gate.temperature) * math.log(typical / (1 - typical))
        gate.shift_bias((factor - 1) * z)


def release(gates: Iterable[GateLike]) -> None:
    """Let go of the graphs of the last forward pass; the values stay."""
    for gate in gates:
        p, g = gate.probability, gate.gate
        if p is not None and g is not None and (p.requires_grad or g.requires_grad):
            own = vars(gate)
            if "probability" in own and "gate" in own:  # a module takes long to set an attribute
                own["probability"], own["gate"] = p.detach(), g.detach()
            else:
                gate.probability, gate.gate = p.detach(), g.detach()


def connection_mask(layer: nn.Module) -> Tensor | None:
    """Return the connections that exist, bool like the weight, or None where all do.

    Whoever makes a layer sparse says so in a plain attribute of that name, which is not part of the
    layer's state dict.
    """
    # Not by getattr: a module takes long to say that it has no such attribute.
    return vars(layer).get("connection_mask")
