"""The gate protocol: what callbacks and the compute ledger require of a gate.

A gate is any `nn.Module` with the attributes of `GateLike`; it need not derive from our classes.
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
    """Position of a gate between linear layers.

    Unknown fields stay empty, and no savings are counted for them.

    Args:
        producer: The layer whose outputs are gated; None for a gate on the network's input.
        skips_rows: Whether closed outputs need not be computed, because the gate is known before
            the matrix product and nothing between product and gate mixes the units.
        consumers: The layers whose inputs are exactly zero for closed units.
        partners: Further layers that produce the units, as in SwiGLU or attention.
        rows: The block of each output of a producer or partner. Without an entry, the outputs are
            the gate's units in order.
        scales_between: Whether a closed block saves its share of the products between the layers,
            as an attention head does.
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
    """The gate protocol. `probability` and `gate` hold one entry per block of units."""

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
        """Return the MACs per sample of the decision, given its open inputs (None: all)."""

    def set_min_open(self, min_open: int | float | str) -> None:
        """Set the minimum number of open gates: a count, or a share such as "5%"."""

    def shift_bias(self, delta: float) -> None:
        """Add `delta` to the logit of every unit."""

    def revive(self, units: Tensor) -> None:
        """Reset units, given by index or as a bool mask, to their initial open rate."""


_MEMBERS = get_protocol_members(GateLike)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def is_gate(thing: object) -> TypeIs[GateLike]:
    """Return True if `thing` implements the gate protocol.

    `isinstance` does not work: since Python 3.12 it does not see buffers, which use `__getattr__`.
    """
    return all(hasattr(thing, name) for name in _MEMBERS)


def gate_layers(
    module: nn.Module, layers: Sequence[str] | None = None, *, required: bool = True
) -> dict[str, GateLike]:
    """Return the gates of a module by their names in `named_modules`.

    Args:
        module: The module to search.
        layers: Shell-style name patterns (`"hidden.*"`); None means all gates.
        required: Whether to raise an error if there are no gates.

    Raises:
        ValueError: If there is no gate, or a pattern matches none.

    >>> from dg_lightning import GatedMLP
    >>> list(gate_layers(GatedMLP(8, [4, 4], 2, gate={"kind": "static"})))
    ['hidden.0.gate', 'hidden.1.gate']
    """
    everything = module.named_modules(remove_duplicate=False)  # a shared gate has several names
    gates = {name: child for name, child in everything if is_gate(child)}
    # A wrapper, such as that of torch.compile, looks like the gate inside it: keep the innermost.
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
    """Return the entries whose name matches any of the patterns; all entries if `layers` is None.

    >>> filter_by_name({"hidden.0": 1, "output": 2}, ["hidden.*"], "layer")
    {'hidden.0': 1}
    """
    if layers is None:
        return found
    if not layers or isinstance(layers, str):
        raise ValueError(
            f"`layers` must be a list of name patterns, got {layers!r}; "
            f"choose from {', '.join(found)}."
        )
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(f"No {what} matches {pattern!r}; choose from {', '.join(found)}.")
    return {
        name: thing
        for name, thing in found.items()
        if any(fnmatchcase(name, pattern) for pattern in layers)
    }


def values_by_pattern(
    argument: str, given: Mapping[str, T], named: Mapping[str, Any], default: D
) -> list[T | D]:
    """Return, for each name, the value of the first matching pattern, or `default`.

    >>> gates = {"input_gate": None, "hidden.0.gate": None}
    >>> values_by_pattern("target", {"hidden.*": 0.3}, gates, 1.0)
    [1.0, 0.3]
    """
    for pattern in given:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ValueError(
                f"`{argument}`: nothing matches {pattern!r}; choose from {', '.join(named)}."
            )
    return [
        next((value for pattern, value in given.items() if fnmatchcase(name, pattern)), default)
        for name in named
    ]


def plain_name(name: str) -> str:
    """Strip wrapper names from a module name, so that logged keys do not depend on wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def set_initial_temperature(gate: GateLike, temperature: float) -> None:
    """Set the temperature at the start of training, preserving every unit's p.

    The initial bias is ``τ logit(p0)``, where τ is the temperature that training starts with.
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
    """Return the bool mask of existing connections, shaped like the weight; None if all exist."""
    return getattr(layer, "connection_mask", None)


def set_connections(layer: nn.Module, mask: Tensor | None, count: int | None = None) -> None:
    """Set the connection mask of a layer; None if all connections exist.

    Stored as plain attributes, so the layer's state dict does not change.
    """
    for name in ("connection_mask", "connection_count"):
        vars(layer).pop(name, None)
    if mask is not None:
        count = int(mask.sum()) if count is None else count
        vars(layer).update(connection_mask=mask, connection_count=count)


def protected_mask(layer: nn.Module) -> Tensor | None:
    """Return the bool mask of weights that must not change; None if all may."""
    return getattr(layer, "protected_mask", None)


def set_protected(layer: nn.Module, mask: Tensor | None) -> None:
    """Mark weights of a layer that no callback may modify, such as those of finished tasks."""
    vars(layer).pop("protected_mask", None)
    if mask is not None:
        vars(layer)["protected_mask"] = mask


def deployed_gate(gate: GateLike, shift: float = 0.0) -> Tensor:
    """Return a bool mask of the blocks that would be open in deployment.

    Computed from the last forward pass: hard for any training policy, and with the floor applied.
    `shift` is added to every ``z / τ``.
    """
    p = gate.probability
    if p is None or gate.gate is None:
        raise RuntimeError(
            f"A gate of {gate.units} units did not run in the last forward pass: use it in "
            "`forward`, or select the other gates with `layers`."
        )
    p = p.detach()
    if getattr(gate, "k", None) is not None:
        chosen: Tensor | None = getattr(gate, "chosen", None)  # router: before capacity drops
        return gate.gate.detach() != 0 if chosen is None else chosen
    is_open = logit(p) + shift > logit(gate.threshold) if shift else p > gate.threshold
    floor = floor_of(gate)
    return is_open | top_k_mask(p, floor) if floor else is_open


def logit(p: Tensor) -> Tensor:
    """Return the logit in double precision, finite even if float32 has rounded p to 0 or 1."""
    return torch.logit(p.double(), eps=1e-7)


def floor_of(gate: GateLike) -> int:
    """Return the minimum number of open blocks: the floor, or the k of top-k."""
    return max(round(float(gate.min_open)), getattr(gate, "k", None) or 0)
