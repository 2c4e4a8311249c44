"""Finds units, heads and channels in a model by running it, whatever its classes are called.

Units lie between linear maps: some maps make them, one map reads them. Autograd says which outputs
of the makers each input of the reader depends on. Inputs that depend on disjoint sets of outputs
can be closed independently: single units of a feed-forward or channels of a convolution, or blocks
of inputs, such as the heads of attention or, where several heads share keys, groups of heads.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.compute.macs import gate_submodules
from dg_lightning.compute.maps import is_linear_map, unit_axis
from dg_lightning.gates import gate_layers
from dg_lightning.surgery.probing import Probe, Units
from dg_lightning.surgery.recording import Call, Recording, record
from dg_lightning.surgery.watching import units_read_elsewhere

__all__ = ["Found", "find_units"]

_SCALES = (1.0, 30.0)  # of noise
_ROUNDS = 24  # runs with other noise, for units that were inactive before
_REASONS = 6  # that are printed
_READ_ELSEWHERE = "what it reads is read elsewhere too"


@dataclass(frozen=True)
class Found:
    """What can be gated in a model, and why the inputs of other maps cannot, by the maps' names."""

    units: dict[str, Units]
    left_alone: dict[str, str]
    positions: dict[str, int]  # how often each map runs for a sample

    def state(self) -> dict[str, Any]:
        """Return it as plain values and tensors, without reasons, for a checkpoint."""
        units = {name: {**vars(u), "between": list(u.between)} for name, u in self.units.items()}
        return {"units": units, "positions": self.positions}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Found":
        """Return what `state` has returned."""
        units = {
            n: Units(**{**u, "between": tuple(u["between"])}) for n, u in state["units"].items()
        }
        return cls(units, {}, dict(state["positions"]))

    def __str__(self) -> str:
        lines = [f"{name}: {units}" for name, units in self.units.items()]
        return "\n".join([*lines, *self.reasons()])

    def reasons(self) -> list[str]:
        """Return a line for each map that was left alone, at most a few for one reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_alone.items():
            by_reason.setdefault(reason, []).append(name)
        return [
            f"{', '.join(names[:_REASONS])}{' ...' if len(names) > _REASONS else ''}: left alone, "
            f"{reason}"
            for reason, names in by_reason.items()
        ]


@torch.enable_grad()
def find_units(model: nn.Module, example: Any = None, more_examples: Sequence[Any] = ()) -> Found:
    """Return what can be gated in a model. The model is left as it was.

    Args:
        model: The model. It is run in evaluation mode, without dropout.
        example: What it is called with: a tensor, a tuple, or a dict by name. None for its
            `example_input_array` (Lightning) or `dummy_inputs` (Hugging Face).
        more_examples: Further examples, which take other branches of the model. What no example
            runs is not seen.

    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> print(find_units(net, torch.randn(2, 8)))
    2: 4 units, made by 0
    0: left alone, it reads the model's input
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, where nothing can be run: give it "
            "weights first."
        )
    examples = [example, *more_examples]
    probes: dict[str, Probe] = {}
    left_alone: dict[str, str | None] = {}
    for seed in range(_ROUNDS):
        # Some units are mixed only where they are large.
        scale = _SCALES[seed % len(_SCALES)]
        graphs = [_Graph(model, record(model, given, seed, scale)) for given in examples]
        for graph, call in _calls(graphs):
            left_alone[call.name] = left_alone.get(call.name) or graph.why_not(call)
            if left_alone[call.name] is None:
                sources = graph.sources(call)
                probes.setdefault(call.name, Probe(call, sources)).look(call, sources)
        if seed + 1 >= len(_SCALES) and all(probe.done for probe in probes.values()):
            break
    for name in _read_in_other_branches(graphs):
        left_alone[name] = left_alone[name] or _READ_ELSEWHERE
    probes = {name: probe for name, probe in probes.items() if left_alone[name] is None}
    left_alone |= {name: probe.why_not() for name, probe in probes.items()}
    left_alone |= _not_run(model, graphs)
    between: dict[str, dict[str, nn.Module]] = {}
    positions: dict[str, int] = {}
    for graph, call in _calls(graphs):
        between[call.name] = between.get(call.name, {}) | graph.between(call)
        positions.setdefault(call.name, _positions(call, graph.batch))
    units = {
        name: probe.units(between[name])
        for name, probe in probes.items()
        if left_alone[name] is None
    }
    for name in units_read_elsewhere(model, examples, units):
        del units[name]
        left_alone[name] = (
            "its units change outputs even where they are closed, as by a top-k mask, a detached "
            "norm or a weight that is used twice"
        )
    reasons = {name: reason for name, reason in left_alone.items() if reason is not None}
    return Found(units, reasons, positions)


class _Graph:
    """What reads what in a recording."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self._model = model
        self.batch = recording.batch
        self.maps = [call for call in recording.calls if call.x is not None]
        self._calls = [call.name for call in recording.calls]
        self._by_leaf = {id(call.leaf): call for call in recording.calls}
        self._inputs = {id(leaf) for leaf in recording.inputs}
        self._behind = {id(call): _nodes_behind([call.x]) for call in self.maps}
        self._in_output = _leaves(_nodes_behind(recording.outputs))
        self._others = recording.others
        self._gated = {
            consumer: name
            for name, gate in gate_layers(model, required=False).items()
            for consumer in gate.feeds.consumers
        }
        self._tied = _tied_modules(model)

    def sources(self, call: Call) -> list[Call]:
        """Return the calls whose outputs a map's input depends on."""
        leaves = _leaves(self._behind[id(call)])
        return [self._by_leaf[leaf] for leaf in self._by_leaf if leaf in leaves]

    def between(self, call: Call) -> dict[str, nn.Module]:
        """Return the modules with weights on the way to a map's input."""
        behind = self._behind[id(call)]
        return {
            name: self._model.get_submodule(name)
            for name, output in self._others
            if output.grad_fn in behind
        }

    def why_not(self, call: Call) -> str | None:
        """Return why the inputs of a map are no units of their own; None if they may be."""
        sources = self.sources(call)
        if call.module in self._gated:
            return "it has a gate already"
        if _leaves(self._behind[id(call)]) & self._inputs:
            if not sources:
                return "it reads the model's input"
            return "the model's input is mixed into what it reads, as by an adjacency or a residual"
        if embeddings := [s.name for s in sources if s.x is None]:
            return f"it reads {embeddings[0]}, an embedding"
        if not sources:
            return "it reads no other map"
        for part in (call, *sources):
            if self._calls.count(part.name) > 1:
                return f"{part.name} runs several times in a pass"
            if part.module in self._tied:
                return f"the weight of {part.name} is tied to another module's"
        for source in sources:
            others = [m.name for m in self.maps if m is not call and source in self.sources(m)]
            if id(source.leaf) in self._in_output:
                others.append("the model's output")
            if others:
                return f"{_READ_ELSEWHERE} (by {others[0]})"
        return None


def _calls(graphs: Iterable[_Graph]) -> Iterator[tuple[_Graph, Call]]:
    """Yield every call of a linear map, with the run that it belongs to."""
    return ((graph, call) for graph in graphs for call in graph.maps)


def _read_in_other_branches(graphs: Sequence[_Graph]) -> set[str]:
    """Return the maps that read what another map reads in a run of another example."""
    consumers: dict[str, set[str]] = {}
    if len(graphs) > 1:
        for graph, call in _calls(graphs):
            for source in graph.sources(call):
                consumers.setdefault(source.name, set()).add(call.name)
    return {name for names in consumers.values() if len(names) > 1 for name in names}


def _not_run(model: nn.Module, graphs: Iterable[_Graph]) -> dict[str, str | None]:
    """Return why some maps could not be seen."""
    ran = {call.module for graph in graphs for call in graph.maps}
    inside = gate_submodules(model)
    reasons: dict[str, str | None] = {}
    for name, child in model.named_modules():
        if callable(getattr(child, "weight", None)):
            reasons[name] = "its weight is quantized"
        elif child in ran | inside:
            continue
        elif is_linear_map(child):
            reasons[name] = "it did not run as a module: its weight is used by others, if at all"
        elif isinstance(child, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            reasons[name] = _not_a_map(child)
    return reasons


def _not_a_map(module: nn.Module) -> str:
    """Return why a module that looks like a linear map is none."""
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return "its weight is made of others"
    if getattr(module, "groups", 1) > 1:
        return "its channels are connected in groups"
    return f"{type(module).__name__} computes with its weight in a way of its own"


def _nodes_behind(starts: Iterable[Tensor | None]) -> set[Any]:
    """Return the nodes of the graphs behind tensors."""
    seen: set[Any] = set()
    pending = [_node(tensor) for tensor in starts if tensor is not None]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [before for before, _ in node.next_functions]
    return seen


def _node(tensor: Tensor) -> Any:
    """Return the node of a tensor; for a leaf, the one that adds up its gradients."""
    if tensor.requires_grad and tensor.grad_fn is None:
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return tensor.grad_fn


def _leaves(nodes: Iterable[Any]) -> set[int]:
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}


def _tied_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that share a parameter with another."""
    owners: dict[int, list[nn.Module]] = {}
    for child in model.modules():
        for parameter in child.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(child)
    return {child for shared in owners.values() if len(shared) > 1 for child in shared}


def _positions(call: Call, batch: int) -> int:
    outputs = call.leaf.shape[unit_axis(call.module)]
    return max(call.leaf.numel() // (outputs * batch), 1)
