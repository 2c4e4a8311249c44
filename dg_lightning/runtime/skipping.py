"""Skip the blocks that a gate closes, with a named engine or the fastest one."""

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dg_lightning.gates import Gate
from dg_lightning.gates.policies import HARD_POLICIES
from dg_lightning.layers import GatedFeedForward, GatedLinear, GatedMLP
from dg_lightning.runtime.engines import FeedForward, dense, elementwise, run_blocks, run_open_rows
from dg_lightning.runtime.timing import seconds_on_gpu, shortest_seconds

Engine: TypeAlias = Literal["auto", "masked", "blocks", "rows", "triton"]

_REMEASURE_AFTER = 1000  # number of uses; open rates change during training
_MAX_ROWS_BATCH = 4  # largest batch for the `rows` engine
_ENGINES = {"dense": dense, "blocks": run_blocks, "rows": run_open_rows}


def skip_closed_blocks(model: nn.Module, engine: Engine = "auto") -> None:
    """Make every `GatedFeedForward` and `GatedMLP` of a model skip closed blocks.

    Outputs stay the same up to rounding, and so do the gradients of gates that scale units (`scale:
    probability`). Other gates get no gradient from the blocks that they close, so `auto` computes
    all blocks while these gates are trained. A compiled model computes all blocks, as before.

    Blocks in a hidden layer of a `GatedMLP` are skipped only if no norm or active dropout follows
    its linear layer, and the gate of the next layer does not depend on the input. An
    input-dependent gate would read all hidden units.

    Args:
        model: The model.
        engine: `auto` measures which engine is fastest for each layer and batch size. It also
            tries `dense`, which computes all blocks but gives closed gates no gradient. `masked`
            stops skipping: all blocks are computed, and closed gates get gradients. `blocks`
            computes each block for the samples that open it. `rows` reads only the weights of open
            units, sample by sample. It is meant for a few samples on a CPU, and falls back to
            `blocks` if gradients are needed. `triton` uses CUDA kernels. Engines round differently,
            so name one if training must be bitwise reproducible.

    >>> layer = GatedFeedForward(8, 32, gate={"kind": "dynamic", "block_size": 8})
    >>> skip_closed_blocks(layer, "blocks")
    >>> layer(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """
    if engine not in get_args(Engine):
        raise ValueError(f"`engine` must be one of {', '.join(get_args(Engine))}, got {engine!r}.")
    found = [m for m in model.modules() if isinstance(m, GatedFeedForward | GatedMLP)]
    if not found:
        raise ValueError(
            f"`model` must contain a GatedFeedForward or a GatedMLP, got {type(model).__name__}: "
            "only their blocks can be skipped."
        )
    runner = Runner(engine)
    for index, module in enumerate(found):
        if engine == "masked":
            module.skip = None
        elif isinstance(module, GatedMLP):
            module.skip = MLPSkipper(runner, index)
        else:
            module.skip = FeedForwardSkipper(runner, index)


@torch.no_grad()
def lay_out_by_unit(model: nn.Module) -> None:
    """Store each gated unit's outgoing weights contiguously, for inference on a CPU.

    Values and shapes do not change. The `rows` engine then reads contiguous memory.

    >>> layer = GatedFeedForward(8, 32)
    >>> lay_out_by_unit(layer)
    >>> layer.fc2.weight.stride()
    (1, 8)
    """
    for module in model.modules():
        if isinstance(module, GatedFeedForward):
            consumers = [module.fc2]
        elif isinstance(module, GatedMLP):
            consumers = [*(layer.linear for layer in module.layers()[1:]), module.output]
        else:
            continue
        for consumer in consumers:
            consumer.weight.data = consumer.weight.t().contiguous().t()


class Runner:
    """Runs the open blocks of gated feed-forwards with the fastest engine.

    Args:
        engine: Name of the engine to use. `auto` measures engines for each layer and batch size,
            and measures again from time to time, because open rates change.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.was_compiled = False  # whether torch.compile has traced a layer
        self._fastest: dict[Hashable, dict[Any, Fastest]] = {}  # measurements by layer

    def __call__(
        self,
        x: Tensor,
        gate: Gate,
        fc1: nn.Linear,
        activation: Callable[[Tensor], Tensor],
        fc2: nn.Linear,
        layer_id: Hashable,
        fc1_gate: nn.Linear | None = None,
    ) -> Tensor:
        """Return the output of a feed-forward for rows ``(rows, width)``."""
        maps = fc1, elementwise(activation), fc2
        scaled = gate.scale is not None
        net = FeedForward.from_linears(*maps, gate.block_size, fc1_gate, scaled, gate.most_open)
        tensors = (x, *net.tensors, *gate.parameters())
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        name = self._name(x, gate, net, needs_grad, layer_id) if len(x) else "dense"
        return run_gated(name, x, gate, net)

    def may_skip(self, gate: Gate) -> bool:
        """Return True if the blocks that a gate closes may be skipped.

        A gate that does not scale learns from closed blocks, so `auto` computes them. At its
        recompilation limit, torch.compile runs a model uncompiled, which must not change gradients.
        """
        if torch.compiler.is_compiling():
            self.was_compiled = True
            return False
        learns = gate.training and torch.is_grad_enabled() and gate.scale is None
        return (
            gate.input_dependent
            and (gate.policy in HARD_POLICIES or not gate.training)
            and not (learns and (self.was_compiled or self.engine == "auto"))
        )

    def _name(
        self, x: Tensor, gate: Gate, net: FeedForward, needs_grad: bool, layer_id: Hashable
    ) -> str:
        if self.engine != "auto":
            return "blocks" if self.engine == "rows" and needs_grad else self.engine
        few = len(x) <= _MAX_ROWS_BATCH
        key = (len(x).bit_length(), few, x.dtype, x.device, needs_grad, net.fc1[0].shape)
        # Measured per layer, because one may open all blocks while another closes most.
        known = self._fastest.setdefault(layer_id, {})
        if not needs_grad:
            # Only evaluation requests new measurements. Activation checkpointing runs a training
            # pass twice, and both runs must use the same engine.
            for old in known.values():
                old.outdated = old.outdated or old.uses >= _REMEASURE_AFTER
        found = known.get(key)
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if (found is None or found.outdated) and not captured:
            found = known[key] = fastest_engine(x, gate, net, needs_grad)
        if found is None:  # captured without an earlier run
            return candidates(x, needs_grad)[-1]
        found.uses += 1
        return found.captured if captured else found.eager

    def __getstate__(self) -> dict[str, Any]:
        # Measurements are specific to this instance and device.
        return {**self.__dict__, "_fastest": {}}


class FeedForwardSkipper:
    """Computes the open blocks of a `GatedFeedForward`.

    Args:
        runner: Runs the open blocks.
        layer_id: Identifies the layer.
    """

    def __init__(self, runner: Runner, layer_id: Hashable) -> None:
        self.runner = runner
        self.layer_id = layer_id

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can record the layer: the host reads nothing."""
        return self.runner.engine not in ("blocks", "rows")

    def __call__(self, layer: GatedFeedForward, h: Tensor) -> Tensor | None:
        """Return the output of a layer, or None if all blocks must be computed."""
        gate = layer.applied_gate
        if gate is None or not self._applies(layer, gate):
            return None
        parts = layer.fc1, layer.activation, layer.fc2
        rows = h.reshape(h.shape[:-1].numel(), h.shape[-1])
        out = self.runner(rows, gate, *parts, self.layer_id, layer.fc1_gate)
        return out.view(*h.shape[:-1], out.shape[-1])

    def _applies(self, layer: GatedFeedForward, gate: Gate) -> bool:
        own = vars(gate).get("hooks")  # hooks that `add_gates` installed
        parts = gate, layer.fc1, layer.fc1_gate, layer.activation, layer.fc2
        modules = [part for part in parts if isinstance(part, nn.Module)]
        return (
            self.runner.may_skip(gate)
            and _runs_as(gate, Gate)
            and all(_runs_as(m, nn.Linear) for m in modules if m not in (gate, layer.activation))
            and not any(has_hooks(m, own) for m in modules)
        )


class MLPSkipper:
    """Computes the open blocks in the hidden layers of a `GatedMLP`.

    Args:
        runner: Runs the open blocks.
        net_id: Identifies the net.
    """

    def __init__(self, runner: Runner, net_id: Hashable) -> None:
        self.runner = runner
        self.net_id = net_id

    def __call__(self, net: GatedMLP, h: Tensor) -> Tensor:
        """Return the logits for the normalised inputs of the first hidden layer."""
        hidden = list(net.hidden)
        pre_activation: Tensor | None = None  # set after a layer with skipped blocks
        for index, layer in enumerate(hidden):
            after = hidden[index + 1] if index + 1 < len(hidden) else None
            if pre_activation is not None:
                assert isinstance(layer, GatedLinear)
                h, pre_activation = layer.finish(h, pre_activation), None
            elif isinstance(layer, GatedLinear) and self._applies(layer, after, net.output):
                gate: Any = layer.gate
                consumer: Any = net.output if after is None else after.linear
                parts = layer.linear, layer.activation, consumer
                pre_activation = self.runner(h, gate, *parts, (self.net_id, index))
            else:
                h = layer(h)
        logits: Tensor = net.output(h) if pre_activation is None else pre_activation
        return logits

    def _applies(self, layer: GatedLinear, after: nn.Module | None, output: nn.Linear) -> bool:
        gate, dropout = layer.gate, layer.dropout
        following: list[nn.Module] = [output]
        if after is not None:
            if not isinstance(after, GatedLinear) or not _runs_as(after, GatedLinear):
                return False
            if after.gate is not None and after.gate.input_dependent:
                return False  # that gate reads all hidden units
            following = [after, after.linear]
        return (
            isinstance(gate, Gate)
            and self.runner.may_skip(gate)
            and _runs_as(layer, GatedLinear)
            and _runs_as(gate, Gate)
            and _runs_as(layer.linear, nn.Linear)
            and _runs_as(following[-1], nn.Linear)
            and _runs_as(layer.norm, nn.Identity)
            and (
                _runs_as(dropout, nn.Identity)
                or (_runs_as(dropout, nn.Dropout) and (dropout.p == 0 or not dropout.training))
            )
            and not any(map(has_hooks, (layer, *layer.children(), *following)))
        )


def _runs_as(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Return True if a module does not override the computation of a class."""
    methods = ["forward", *(["finish"] if cls is GatedLinear else [])]
    same = all(getattr(type(module), m, None) is getattr(cls, m) for m in methods)
    return same and "forward" not in vars(module)


def has_hooks(module: nn.Module, owner: object = None) -> bool:
    """Return True if a module has hooks other than those of `owner`."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return any(owner is None or getattr(hook, "__self__", None) is not owner for hook in hooks)


def run_gated(engine: str, x: Tensor, gate: Gate, net: FeedForward) -> Tensor:
    """Compute the gate, then the open blocks with the named engine."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        if engine == "triton":
            return _run_triton(x, gate, net)
        return _ENGINES[engine](x, gate.decide(x), net)
    g = gate.decide(x)  # before casting inputs, since gates compute in float32
    dtype = torch.get_autocast_dtype(kind)
    x, net = x.to(dtype), net.to(dtype)
    with torch.autocast(kind, enabled=False):
        if engine == "triton":
            return _run_triton(x, gate, net, g)
        return _ENGINES[engine](x, g, net)


def _run_triton(x: Tensor, gate: Gate, net: FeedForward, g: Tensor | None = None) -> Tensor:
    if not x.is_cuda:
        raise ValueError(f"The 'triton' engine needs a CUDA device, got {x.device}: use 'auto'.")
    try:
        from dg_lightning.runtime.triton_engine import decide_by_kernel, run_triton
    except ImportError as error:
        raise ModuleNotFoundError(
            "The 'triton' engine needs Triton, which is installed with torch for CUDA: use 'auto'."
        ) from error
    decided = decide_by_kernel(gate, x) if g is None else None
    g, counts = decided or (gate.decide(x) if g is None else g, None)
    return run_triton(x, g, net, counts)


def candidates(x: Tensor, needs_grad: bool) -> list[str]:
    """Return the engines that can run a batch and may be the fastest."""
    names = ["dense", "blocks"]
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if x.is_cuda and dtype.itemsize == 2 and torch.version.hip is None:
        with suppress(ImportError):
            from dg_lightning.runtime import triton_engine  # noqa: F401

            names.append("triton")
    if not x.is_cuda and len(x) <= _MAX_ROWS_BATCH and not needs_grad:
        names.append("rows")
    return names


@dataclass
class Fastest:
    """The fastest engines in eager execution and in a CUDA graph."""

    eager: str
    captured: str
    uses: int = 0
    outdated: bool = False


def fastest_engine(x: Tensor, gate: Gate, net: FeedForward, needs_grad: bool) -> Fastest:
    """Measure which engine is fastest on a batch, with a backward pass if needed."""
    x = x.detach()
    runs = {n: partial(_run_once, n, x, gate, net, needs_grad) for n in candidates(x, needs_grad)}
    # Measuring must not advance random generators or trigger hooks of activation checkpointing.
    with (
        torch.random.fork_rng([x.device] if x.is_cuda else []),
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        eager = {name: shortest_seconds(run, x.device) for name, run in runs.items()}
        captured = eager
        if x.is_cuda:
            captured = {name: seconds_on_gpu(run, x.device) for name, run in runs.items()}
    return Fastest(min(eager, key=eager.__getitem__), min(captured, key=captured.__getitem__))


def _run_once(name: str, x: Tensor, gate: Gate, net: FeedForward, needs_grad: bool) -> None:
    with torch.set_grad_enabled(needs_grad):
        if not needs_grad:
            run_gated(name, x, gate, net)
            return
        inputs = x.clone().requires_grad_()
        out = run_gated(name, inputs, gate, net)
        weights = [t for t in (*net.tensors, *gate.parameters()) if t.requires_grad]
        torch.autograd.grad(out.sum(), [inputs, *weights], allow_unused=True)
