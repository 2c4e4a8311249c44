"""The gate protocol that callbacks and the compute ledger rely on.

A gate is any `nn.Module` with the attributes of `GateLike`. It need not derive from our classes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs, get_protocol_members

from dg_lightning.gates.policies import top_k_mask

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True)
class Feeds:
    """The linear layers before and after a gate.

    Fields stay empty if they are unknown, and then no savings are counted for them.

    Args:
        producer: The layer whose outputs are gated, or None for a gate on the network's input.
        skips_rows: Whether closed outputs need not be computed. This is true if the gate is known
            before the matrix product and nothing between the product and the gate mixes units.
        consumers: The layers whose inputs are exactly zero for closed units.
        partners: Other layers that produce the same units, as in SwiGLU or attention.
        rows: For the producer or a partner, the index of the block that each output belongs to. A
            layer without an entry has one output for each unit of the gate, in order.
        scales_between: Whether a closed block saves its share of the products between the producers
            and the consumers, as an attention head does.
        runner: The module that uses the layers' weights directly instead of calling the layers.
    """

    producer: nn.Module | None = None
    skips_rows: bool = False
    consumers: tuple[nn.Module, ...] = ()
    partners: tuple[nn.Module, ...] = ()
    rows: Mapping[nn.Module, Tensor] = field(default_factory=dict)
    scales_between: bool = False
    runner: nn.Module | None = None

    @property
    def producers(self) -> tuple[nn.Module, ...]:
        """The producer and its partners."""
        return () if self.producer is None else (self.producer, *self.partners)


class GateLike(Protocol):
    """The gate protocol. `probability` and `gate` have one entry per block of units."""

    units: int
    block_size: int
    input_dependent: bool
    initial_open_rate: float
    temperature: Tensor  # 0-d buffer, changed in place
    threshold: Tensor  # 0-d buffer, changed in place
    min_open: Tensor  # 0-d buffer, changed by set_min_open
    probability: Tensor | None  # from the last forward pass, with its graph
    gate: Tensor | None  # from the last forward pass, with its graph
    feeds: Feeds

    def decision_macs(self, open_inputs: Tensor | None = None) -> Tensor:
        """Return the MACs of one decision, given the number of open inputs (None for all)."""

    def set_min_open(self, min_open: int | float | str) -> None:
        """Set the minimum number of open gates, as a count or a share such as "5%"."""

    def shift_bias(self, delta: float | Tensor) -> None:
        """Add a number to all logits, or the entries of a tensor to those of the blocks."""

    def revive(self, units: Tensor) -> None:
        """Reset units to their initial open rate. `units` contains indices or is a bool mask."""


_MEMBERS = get_protocol_members(GateLike)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def is_gate(thing: object) -> TypeIs[GateLike]:
    """Return True if `thing` implements the gate protocol.

    `isinstance` does not work, because since Python 3.12 it misses buffers, which are looked up
    with `__getattr__`.
    """
    return all(hasattr(thing, name) for name in _MEMBERS)


def gate_layers(
    module: nn.Module, layers: Sequence[str] | None = None, *, required: bool = True
) -> dict[str, GateLike]:
    """Return the gates of a module, keyed by their names in `named_modules`.

    Args:
        module: The module to search.
        layers: Shell-style name patterns, such as `"hidden.*"`. None means all gates.
        required: Whether to raise an error if there are no gates.

    Raises:
        ValueError: If there are no gates, or a pattern matches none of them.

    >>> from dg_lightning import GatedMLP
    >>> list(gate_layers(GatedMLP(8, [4, 4], 2, gate={"kind": "static"})))
    ['hidden.0.gate', 'hidden.1.gate']
    """
    everything = module.named_modules(remove_duplicate=False)  # a shared gate has several names
    gates = {name: child for name, child in everything if is_gate(child)}
    # A wrapper, such as torch.compile's, looks like the gate inside it, so keep the innermost.
    found = {
        plain_name(name): gate
        for name, gate in gates.items()
        if not any(other.startswith(f"{name}.") for other in gates)
    }
    if required and not found:
        raise ValueError(
            f"{type(module).__name__} has no gate: use dg_lightning.GatedLinear layers (GatedMLP: "
            "`gate: {kind: static}`), or add gates with `add_gates` or the callback AddGates."
        )
    once: dict[str, GateLike] = {}
    for name, gate in filter_by_name(found, layers, "gate").items():
        if not any(gate is other for other in once.values()):
            once[name] = gate
    return once


def filter_by_name(found: dict[str, T], layers: Sequence[str] | None, what: str) -> dict[str, T]:
    """Return the entries whose names match any of the patterns. None matches all entries.

    >>> filter_by_name({"hidden.0": 1, "output": 2}, ["hidden.*"], "layer")
    {'hidden.0': 1}
    """
    if layers is None:
        return found
    if not layers or isinstance(layers, str):
        raise ValueError(
            f"`layers` must be a list of name patterns, got {layers!r}. "
            f"Choose from {', '.join(found)}."
        )
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(f"No {what} matches {pattern!r}. Choose from {', '.join(found)}.")
    return {
        name: thing
        for name, thing in found.items()
        if any(fnmatchcase(name, pattern) for pattern in layers)
    }


def values_by_pattern(
    argument: str, given: Mapping[str, T], named: Mapping[str, Any], default: D
) -> list[T | D]:
    """Return the value of the first matching pattern for each name, or `default`.

    >>> gates = {"input_gate": None, "hidden.0.gate": None}
    >>> values_by_pattern("target", {"hidden.*": 0.3}, gates, 1.0)
    [1.0, 0.3]
    """
    for pattern in given:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ValueError(
                f"`{argument}`: nothing matches {pattern!r}. Choose from {', '.join(named)}."
            )
    return [
        next((value for pattern, value in given.items() if fnmatchcase(name, pattern)), default)
        for name in named
    ]


def plain_name(name: str) -> str:
    """Strip wrapper names from a module name, so that logged keys do not depend on wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def set_initial_temperature(gate: GateLike, temperature: float) -> None:
    """Set the temperature at the start of training while preserving the p of every unit.

    The initial bias becomes ``τ logit(p0)``, where τ is the temperature that training starts with.
    """
    before = float(gate.temperature)
    if math.isclose(before, temperature, rel_tol=1e-6):
        return
    preserve_probability(gate, temperature / before, gate.initial_open_rate)
    gate.temperature.fill_(temperature)


def preserve_probability(gate: GateLike, factor: float, typical: float) -> None:
    """Adjust the logits so that p stays the same when the temperature is multiplied by `factor`.

    A gate without `scale_logits` preserves only the `typical` p.
    """
    if hasattr(gate, "scale_logits"):
        gate.scale_logits(factor)
    else:
        z = float(gate.temperature) * math.log(typical / (1 - typical))
        gate.shift_bias((factor - 1) * z)


def detach_graph(gates: Iterable[GateLike]) -> None:
    """Detach the recorded probabilities and gates from their graph."""
    for gate in gates:
        if gate.probability is not None and gate.probability.requires_grad:
            gate.probability = gate.probability.detach()
        if gate.gate is not None and gate.gate.requires_grad:
            gate.gate = gate.gate.detach()


def init_recorded_gates(gates: Iterable[GateLike]) -> None:
    """Record p = 1 for gates that have not run yet, so that they count as open."""
    for gate in gates:
        if gate.probability is None or gate.gate is None:
            blocks = gate.units // gate.block_size
            gate.probability = gate.gate = gate.threshold.new_ones(blocks)


def connection_mask(layer: nn.Module) -> Tensor | None:
    """Return the bool mask of existing connections, or None if all exist."""
    return getattr(layer, "connection_mask", None)


def set_connections(layer: nn.Module, mask: Tensor | None, count: int | None = None) -> None:
    """Set the connection mask of a layer. None means that all connections exist.

    The mask is stored in plain attributes, so the layer's state dict does not change.
    """
    for name in ("connection_mask", "connection_count"):
        vars(layer).pop(name, None)
    if mask is not None:
        count = int(mask.sum()) if count is None else count
        vars(layer).update(connection_mask=mask, connection_count=count)


def protected_mask(layer: nn.Module) -> Tensor | None:
    """Return the bool mask of weights that must not change, or None if all may change."""
    return getattr(layer, "protected_mask", None)


def set_protected(layer: nn.Module, mask: Tensor | None) -> None:
    """Mark weights that no callback may modify, such as those trained on finished tasks."""
    vars(layer).pop("protected_mask", None)
    if mask is not None:
        vars(layer)["protected_mask"] = mask


def deployed_gate(gate: GateLike, shift: float = 0.0) -> Tensor:
    """Return a bool mask of the blocks that would be open in deployment.

    The mask is computed from the last forward pass. It is hard for any training policy and includes
    the floor. `shift` is added to every ``z / τ``.
    """
    p = gate.probability
    if p is None or gate.gate is None:
        raise RuntimeError(
            f"A gate with {gate.units} units did not run in the last forward pass: use it in "
            "`forward`, or select the other gates with `layers`."
        )
    p = p.detach()
    if getattr(gate, "k", None) is not None:
        chosen: Tensor | None = getattr(gate, "chosen", None)  # for a router, before capacity drops
        return gate.gate.detach() != 0 if chosen is None else chosen
    is_open = logit(p) + shift > logit(gate.threshold) if shift else p > gate.threshold
    floor = floor_of(gate)
    return is_open | top_k_mask(p, floor) if floor else is_open


def logit(p: Tensor) -> Tensor:
    """Return the logit in double precision, which is finite even if p was rounded to 0 or 1."""
    return torch.logit(p.double(), eps=1e-7)


def floor_of(gate: GateLike) -> int:
    """Return the minimum number of open blocks, which is the floor or k, whichever is larger."""
    return max(round(float(gate.min_open)), getattr(gate, "k", None) or 0)
