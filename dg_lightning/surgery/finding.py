"""Find the units in a model that can be gated, using autograd."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dg_lightning.compute.macs import as_matrix, gate_submodules, is_linear_map, unit_axis
from dg_lightning.gates import gate_layers
from dg_lightning.surgery.recording import Call, Recording, arguments_of, call_model, record
from dg_lightning.surgery.watching import units_read_elsewhere

Kind: TypeAlias = Literal["feed_forward", "heads", "channels"]

_MIN_KNOWN_SHARE = 0.9  # minimum share of outputs with a known block to infer the rest


@dataclass(frozen=True, eq=False)
class Units:
    """Units between linear layers that can be closed, one by one or in blocks.

    Args:
        kind: The kind of units.
        producers: The layers that produce the units, with the block of each output.
        consumer: The layer that consumes the units.
        size: The number of inputs of the consumer.
        block_size: The number of neighbouring inputs that close together.
        is_tokenwise: Whether each position of the consumer's input depends only on the same
            position of the producers' outputs. Per-token gates require this.
        between: Modules with weights, such as norms, between the producers and the consumer.
        is_independent: Whether units are known not to mix before they reach the consumer, so that
            closed units need not be computed.
    """

    kind: Kind
    producers: dict[str, Tensor]
    consumer: str
    size: int
    block_size: int
    is_tokenwise: bool
    between: tuple[str, ...] = ()
    is_independent: bool = True

    @property
    def blocks(self) -> int:
        """The number of blocks, each of which needs a gate."""
        return self.size // self.block_size

    @property
    def noun(self) -> str:
        """What the units are called."""
        return "units" if self.kind == "feed_forward" else self.kind

    def __str__(self) -> str:
        inputs = "" if self.block_size == 1 else f" of {self.block_size}"
        return f"{self.blocks} {self.noun}{inputs}, produced by {', '.join(self.producers)}"


class Probe:
    """Determines which producer outputs each input of a linear layer depends on.

    Neighbouring inputs are grouped into numbered blocks, initially of one input each. For each
    binary digit of the block numbers, autograd shows which outputs affect blocks whose digit is 1,
    and which affect blocks whose digit is 0. If no output affects both, the digits give the number
    of each output's block. Otherwise larger blocks are tried.
    """

    def __init__(self, call: Call, sources: list[Call]) -> None:
        self.consumer = call
        self.sources = sources
        self.inputs = as_matrix(call.module, call.module.weight).shape[1]
        self._sizes = [n for n in range(1, self.inputs) if self.inputs % n == 0]
        # For each digit and source: outputs that affect blocks with digit 1 and with digit 0.
        self._seen: list[list[tuple[Tensor, Tensor]]] = []
        self._by_position = True
        self._changes = False

    def update(self, call: Call, sources: list[Call]) -> None:
        """Add a recording, and increase the block size until it fits."""
        if [s.name for s in sources] != [s.name for s in self.sources]:
            self._changes = True
            return
        while self._sizes and not self._fits(call, sources):
            self._sizes.pop(0)
            self._seen = []
        self._by_position &= _is_by_position(call, sources)

    def _fits(self, call: Call, sources: list[Call]) -> bool:
        block = torch.arange(self.inputs, device="cpu") // self._sizes[0]
        digits = range((self._blocks - 1).bit_length())
        weights = _random_weights(call)
        for digit in digits:
            has = (block >> digit) % 2 == 1
            pair = list(
                zip(*(_behind(call, sources, weights, x) for x in (has, ~has)), strict=True)
            )
            if len(self._seen) == digit:
                self._seen.append(pair)
            else:
                self._seen[digit] = [
                    (old[0] | new[0], old[1] | new[1])
                    for old, new in zip(self._seen[digit], pair, strict=True)
                ]
            if any((one & zero).any() for one, zero in self._seen[digit]):
                return False
        return True

    def _rows(self, source: int) -> Tensor:
        """Return the block of each output of a source, or -1 if unknown."""
        pairs = [digit[source] for digit in self._seen]
        number = torch.stack([one.long() << i for i, (one, _) in enumerate(pairs)]).sum(0)
        known = torch.stack([one | zero for one, zero in pairs]).all(0)
        in_order = torch.arange(len(known), device="cpu") // max(len(known) // self._blocks, 1)
        # Some outputs are inactive for any noise, for example if a ReLU always cuts them off.
        if known.float().mean() > _MIN_KNOWN_SHARE and torch.equal(number[known], in_order[known]):
            return in_order
        return torch.where(known, number, -1)

    @property
    def _blocks(self) -> int:
        return self.inputs // self._sizes[0]

    @property
    def done(self) -> bool:
        """Whether the search is over, because all blocks are known or none can be found."""
        if not self._sizes or self._changes:
            return True
        if not self._seen:
            return False
        for source in range(len(self.sources)):
            counts = torch.bincount(self._rows(source) + 1, minlength=self._blocks + 1)
            if counts[0] or len(set(counts[1:].tolist())) > 1:
                return False
        return True

    def rejection_reason(self) -> str | None:
        """Return why the inputs cannot be gated, or None if they can."""
        if self._changes:
            return "it reads from different layers for different inputs"
        if not self._sizes:
            return "units are mixed on the way to it, for example by a norm or a sum"
        if not self.done:
            return "some units were inactive on this example: pass a longer one"
        return None

    def units(self, between: Mapping[str, nn.Module]) -> Units:
        """Return the units, given the modules with weights between producers and consumer."""
        size = self._sizes[0]
        maps = [self.consumer, *self.sources]
        kernels = [as_matrix(m.module, m.module.weight).shape[2] for m in maps]
        convolves = any(unit_axis(m.module) < -1 for m in maps)
        kind: Kind = "feed_forward" if size == 1 else "heads"
        grouped = any(unit_axis(module) < -1 for module in between.values())
        if max(kernels) > 1 or grouped or (convolves and size > 1):
            kind = "channels"
        producers = {s.name: self._rows(i) for i, s in enumerate(self.sources)}
        is_tokenwise = self._by_position and not convolves
        return Units(
            kind, producers, self.consumer.name, self.inputs, size, is_tokenwise, tuple(between)
        )


def _random_weights(call: Call) -> Tensor:
    """Return a positive weight for each input of a layer."""
    assert call.x is not None
    x = call.x.movedim(unit_axis(call.module), -1)
    generator = torch.Generator(x.device).manual_seed(0)
    return (torch.rand(x.shape, generator=generator, device=x.device) + 0.5).to(x.dtype)


def _behind(call: Call, sources: list[Call], weights: Tensor, chosen: Tensor) -> list[Tensor]:
    """Return which outputs of each source the chosen inputs of a layer depend on."""
    assert call.x is not None
    gradients = torch.autograd.grad(
        call.x.movedim(unit_axis(call.module), -1),
        [s.leaf for s in sources],
        weights * chosen.to(weights.device),
        retain_graph=True,
        materialize_grads=True,
    )
    moved = [g.movedim(unit_axis(s.module), -1) for g, s in zip(gradients, sources, strict=True)]
    depends = [(g != 0) & g.isfinite() for g in moved]
    return [d.reshape(-1, d.shape[-1]).any(0).cpu() for d in depends]


def _is_by_position(call: Call, sources: list[Call]) -> bool:
    """Return True if the first and last positions depend only on the sources at that position."""
    assert call.x is not None
    rows = call.x.reshape(-1, call.x.shape[-1])
    if not len(rows) or any(s.leaf.shape[:-1] != call.x.shape[:-1] for s in sources):
        return False
    if len(rows) == 1 and call.x.ndim > 2:
        return False  # a sequence of one position cannot show mixing
    leaves = [s.leaf for s in sources]
    for position in {0, len(rows) - 1}:
        gradients = torch.autograd.grad(
            rows[position].sum(), leaves, retain_graph=True, materialize_grads=True
        )
        for gradient in gradients:
            by_row = gradient.reshape(len(rows), -1).any(1)
            by_row[position] = False
            if by_row.any():
                return False
    return True


_NOISE_SCALES = (1.0, 30.0)
_MAX_RUNS = 24  # runs with different noise, to activate all units
_NAMES_OF_0_2 = {"by_position": "is_tokenwise", "is_known": "is_independent"}
_REASONS = 6  # maximum number of names printed for each reason
_READ_ELSEWHERE = "its inputs are also read elsewhere"


@dataclass(frozen=True)
class UnitSearchResult:
    """The units of a model that can be gated, and the reasons why others cannot.

    Args:
        units: The units for each consumer, by layer name.
        skipped: The reason why the inputs of each other layer cannot be gated, by layer name.
        calls_per_sample: How often each linear layer runs per sample.
    """

    units: dict[str, Units]
    skipped: dict[str, str]
    calls_per_sample: dict[str, int]

    def state(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint, without reasons."""
        units = {name: {**vars(u), "between": list(u.between)} for name, u in self.units.items()}
        return {"units": units, "positions": self.calls_per_sample}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "UnitSearchResult":
        """Create a result from `state`. Names from version 0.2 are accepted."""
        units = {}
        for name, saved in state["units"].items():
            values = {_NAMES_OF_0_2.get(key, key): value for key, value in saved.items()}
            units[name] = Units(**{**values, "between": tuple(values["between"])})
        return cls(units, {}, dict(state["positions"]))

    def __str__(self) -> str:
        lines = [f"{name}: {units}" for name, units in self.units.items()]
        return "\n".join([*lines, *self.reasons()])

    def reasons(self) -> list[str]:
        """Return a line for each reason, with the names of the skipped layers."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(name)
        return [
            f"{', '.join(names[:_REASONS])}{' ...' if len(names) > _REASONS else ''}: skipped "
            f"because {reason}"
            for reason, names in by_reason.items()
        ]


@torch.enable_grad()
def find_units(
    model: nn.Module, example: Any = None, more_examples: Sequence[Any] = ()
) -> UnitSearchResult:
    """Find the units in a model that can be gated, without changing the model.

    Args:
        model: The model. It is run in evaluation mode, without dropout.
        example: Example inputs: a tensor, a tuple, or a dict by argument name. The default is the
            model's `example_input_array` (Lightning) or `dummy_inputs` (Hugging Face).
        more_examples: More examples, which take other branches of the model. Layers that no example
            runs are not found.

    Returns:
        The units, and the reason for each skipped layer.

    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> print(find_units(net, torch.randn(2, 8)))
    2: 4 units, produced by 0
    0: skipped because it reads the model's input
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, where it cannot run: load its weights "
            "first."
        )
    if lazy := [n for n, p in model.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise ValueError(
            f"{lazy[0]} has no shape yet, because its lazy layer has not run: run the model on a "
            "batch first."
        )
    examples = [example, *more_examples]
    for given in examples:
        _check_runs(model, given)
    probes: dict[str, Probe] = {}
    skipped: dict[str, str | None] = {}
    for seed in range(_MAX_RUNS):
        # Some units mix only if their values are large.
        scale = _NOISE_SCALES[seed % len(_NOISE_SCALES)]
        graphs = [_Graph(model, _recorded(model, given, seed, scale)) for given in examples]
        for graph, call in _calls(graphs):
            skipped[call.name] = skipped.get(call.name) or graph.rejection_reason(call)
            if skipped[call.name] is None:
                sources = graph.sources(call)
                probes.setdefault(call.name, Probe(call, sources)).update(call, sources)
        if seed + 1 >= len(_NOISE_SCALES) and all(probe.done for probe in probes.values()):
            break
    for name in _read_in_other_branches(graphs):
        skipped[name] = skipped[name] or _READ_ELSEWHERE
    probes = {name: probe for name, probe in probes.items() if skipped[name] is None}
    skipped |= {name: probe.rejection_reason() for name, probe in probes.items()}
    skipped |= _not_run(model, graphs)
    between: dict[str, dict[str, nn.Module]] = {}
    calls_per_sample: dict[str, int] = {}
    for graph, call in _calls(graphs):
        between[call.name] = between.get(call.name, {}) | graph.between(call)
        calls_per_sample.setdefault(call.name, _calls_per_sample(call, graph.batch))
    units = {
        name: probe.units(between[name]) for name, probe in probes.items() if skipped[name] is None
    }
    for name in units_read_elsewhere(model, examples, units):
        del units[name]
        skipped[name] = (
            "its units affect outputs even when closed, for example through a top-k mask, a "
            "detached norm or a weight that is used twice"
        )
    reasons = {name: reason for name, reason in skipped.items() if reason is not None}
    return UnitSearchResult(units, reasons, calls_per_sample)


def _recorded(model: nn.Module, example: Any, seed: int, scale: float) -> Recording:
    """Record a run, and explain errors of models that cannot run with noise in their layers."""
    try:
        return record(model, example, seed, scale)
    except ValueError:
        raise
    except Exception as error:  # a model may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"The units of {type(model).__name__} cannot be found, because it fails when noise is "
            f"added to its layers ({reason}): pass `pairs`."
        ) from error


def _check_runs(model: nn.Module, example: Any) -> None:
    """Raise ValueError if the model cannot run on an example."""
    args, kwargs = arguments_of(model, example)
    try:
        call_model(model, args, kwargs)
    except Exception as error:  # a model may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{type(model).__name__} cannot run on `example` ({reason}): pass inputs of the shapes "
            "and types that it takes."
        ) from error


class _Graph:
    """The connections between the layers in a recording."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self._model = model
        self.batch = recording.batch
        self.maps = [call for call in recording.calls if call.x is not None]
        self._calls = [call.name for call in recording.calls]
        self._inputs = {id(leaf) for leaf in recording.inputs}
        self._behind = {id(call): _nodes_behind([call.x]) for call in self.maps}
        self._leaf_ids = {id(call): _leaf_ids(self._behind[id(call)]) for call in self.maps}
        by_leaf = {id(call.leaf): (index, call) for index, call in enumerate(recording.calls)}
        self._sources: dict[int, list[Call]] = {}
        self._readers: dict[int, list[str]] = {}
        for call in self.maps:
            found = self._leaf_ids[id(call)] & by_leaf.keys()
            read = sorted((by_leaf[leaf] for leaf in found), key=itemgetter(0))
            self._sources[id(call)] = [source for _, source in read]
            for _, source in read:
                self._readers.setdefault(id(source), []).append(call.name)
        self._in_output = _leaf_ids(_nodes_behind(recording.outputs))
        self._others = recording.others
        self._gated = {
            consumer: name
            for name, gate in gate_layers(model, required=False).items()
            for consumer in gate.feeds.consumers
        }
        self._tied = _tied_modules(model)

    def sources(self, call: Call) -> list[Call]:
        """Return the calls whose outputs a layer's input depends on."""
        return self._sources[id(call)]

    def between(self, call: Call) -> dict[str, nn.Module]:
        """Return the modules with weights that affect a layer's input."""
        behind = self._behind[id(call)]
        return {
            name: self._model.get_submodule(name)
            for name, output in self._others
            if output.grad_fn in behind
        }

    def rejection_reason(self, call: Call) -> str | None:
        """Return why a layer's inputs cannot be gated, or None if they may be gated."""
        sources = self.sources(call)
        if call.module in self._gated:
            return "it already has a gate"
        if self._leaf_ids[id(call)] & self._inputs:
            if not sources:
                return "it reads the model's input"
            return "the model's input is mixed into its input, for example by a residual connection"
        if embeddings := [s.name for s in sources if s.x is None]:
            return f"it reads from {embeddings[0]}, an embedding"
        if not sources:
            return "it reads from no other layer"
        for part in (call, *sources):
            if self._calls.count(part.name) > 1:
                return f"{part.name} runs several times per forward pass"
            if part.module in self._tied:
                return f"the weight of {part.name} is tied to another module's"
        for source in sources:
            others = list(self._readers[id(source)])
            others.remove(call.name)
            if id(source.leaf) in self._in_output:
                others.append("the model's output")
            if others:
                return f"{_READ_ELSEWHERE} (by {others[0]})"
        return None


def _calls(graphs: Iterable[_Graph]) -> Iterator[tuple[_Graph, Call]]:
    """Yield every call to a linear layer, with the graph of its run."""
    return ((graph, call) for graph in graphs for call in graph.maps)


def _read_in_other_branches(graphs: Sequence[_Graph]) -> set[str]:
    """Return the layers that share a producer with another layer in any of several runs."""
    consumers: dict[str, set[str]] = {}
    if len(graphs) > 1:
        for graph, call in _calls(graphs):
            for source in graph.sources(call):
                consumers.setdefault(source.name, set()).add(call.name)
    return {name for names in consumers.values() if len(names) > 1 for name in names}


def _not_run(model: nn.Module, graphs: Iterable[_Graph]) -> dict[str, str | None]:
    """Return the reasons why some layers could not be examined, by name."""
    ran = {call.module for graph in graphs for call in graph.maps}
    inside = gate_submodules(model)
    reasons: dict[str, str | None] = {}
    for name, child in model.named_modules():
        if callable(getattr(child, "weight", None)):
            reasons[name] = "its weight is quantized"
        elif child in ran | inside:
            continue
        elif is_linear_map(child):
            reasons[name] = "it did not run as a module: its weight is read directly, if at all"
        elif isinstance(child, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            reasons[name] = _not_a_map(child)
    return reasons


def _not_a_map(module: nn.Module) -> str:
    """Return why a layer that looks linear cannot be gated."""
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return "its weight is computed from other parameters"
    if getattr(module, "groups", 1) > 1:
        return "it is a grouped convolution"
    return f"{type(module).__name__} uses its weight in a custom way"


def _nodes_behind(starts: Iterable[Tensor | None]) -> set[Any]:
    """Return all autograd nodes that tensors depend on."""
    seen: set[Any] = set()
    pending = [_node(tensor) for tensor in starts if tensor is not None]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [before for before, _ in node.next_functions]
    return seen


def _node(tensor: Tensor) -> Any:
    """Return a tensor's autograd node. For a leaf, this is the node that adds up gradients."""
    if tensor.requires_grad and tensor.grad_fn is None:
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return tensor.grad_fn


def _leaf_ids(nodes: Iterable[Any]) -> set[int]:
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}


def _tied_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that share a parameter with another module."""
    owners: dict[int, list[nn.Module]] = {}
    for child in model.modules():
        for parameter in child.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(child)
    return {child for shared in owners.values() if len(shared) > 1 for child in shared}


def _calls_per_sample(call: Call, batch: int) -> int:
    outputs = call.leaf.shape[unit_axis(call.module)]
    return max(call.leaf.numel() // (outputs * batch), 1)
