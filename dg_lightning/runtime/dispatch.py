"""Selection of the engine of a gated feed-forward, by name or by measurement."""

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dg_lightning.gates import Gate
from dg_lightning.runtime.engines import dense, run_blocks, run_open_rows
from dg_lightning.runtime.feed_forward import FeedForward, elementwise
from dg_lightning.runtime.timing import seconds_on_gpu, shortest_seconds

__all__ = ["Engine", "Fastest", "Runner", "candidates", "fastest_engine", "run_gated"]

Engine: TypeAlias = Literal["auto", "masked", "blocks", "rows", "triton", "graph"]

MAX_ROWS_BATCH = 4  # largest batch for the engine `rows`
_REMEASURE_AFTER = 1000  # uses; open rates change during training
_ENGINES = {"dense": dense, "blocks": run_blocks, "rows": run_open_rows}


def run_gated(engine: str, x: Tensor, gate: Gate, net: FeedForward) -> Tensor:
    """Let the gate decide, and compute the open blocks with the named engine."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        if engine == "triton":
            return _run_triton(x, gate, net)
        return _ENGINES[engine](x, gate.decide(x), net)
    g = gate.decide(x)  # before the inputs are cast: gates compute in float32
    dtype = torch.get_autocast_dtype(kind)
    x, net = x.to(dtype), net.to(dtype)
    with torch.autocast(kind, enabled=False):
        if engine == "triton":
            return _run_triton(x, gate, net, g)
        return _ENGINES[engine](x, g, net)


def _run_triton(x: Tensor, gate: Gate, net: FeedForward, g: Tensor | None = None) -> Tensor:
    if not x.is_cuda:
        raise ValueError(f"The engines triton and graph run on CUDA, got {x.device}: use 'auto'.")
    try:
        from dg_lightning.runtime.triton_engine import decide_by_kernel, run_triton
    except ImportError as error:
        raise ModuleNotFoundError(
            "The engine 'triton' needs Triton 3.3 or later, as torch for CUDA has it from 2.7 on: "
            "use 'auto'."
        ) from error
    packing = decide_by_kernel(gate, x) if g is None else None
    if packing is not None:
        assert gate.gate is not None
        assert gate.probability is not None
        g = gate.scaled(gate.gate, gate.probability)
    elif g is None:
        g = gate.decide(x)
    assert g is not None
    return run_triton(x, g, net, packing)


def candidates(x: Tensor, needs_grad: bool) -> list[str]:
    """List the engines that can run a batch and may be fastest."""
    names = ["dense", "blocks"]
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if x.is_cuda and dtype.itemsize == 2 and torch.version.hip is None:
        with suppress(ImportError):
            from dg_lightning.runtime import triton_engine  # noqa: F401

            names.append("triton")
    if not x.is_cuda and len(x) <= MAX_ROWS_BATCH and not needs_grad:
        names.append("rows")
    return names


class Runner:
    """Runs the open blocks of gated feed-forwards, by the engine that is fastest.

    Args:
        engine: `auto` measures engines for each layer and size of batch, and again from time to
            time, because open rates change; another name is taken as it is.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.was_compiled = False  # whether torch.compile has traced a layer
        # By the place of the layer: measurements, and views of its weights.
        self._fastest: dict[Hashable, dict[Any, Fastest]] = {}
        self._views: dict[Hashable, dict[Any, Any]] = {}

    def __call__(
        self,
        x: Tensor,
        gate: Gate,
        first: nn.Linear,
        activation: Callable[[Tensor], Tensor],
        second: nn.Linear,
        place: Hashable,
        other: nn.Linear | None = None,
    ) -> Tensor:
        """Return what a feed-forward makes of rows ``(rows, width)``; `place` names the layer."""
        views = self._views.setdefault(place, {})
        maps = first, elementwise(activation), second
        net = FeedForward.of(*maps, gate.block_size, other, gate.scale is not None, views)
        tensors = (x, *net.tensors, *gate.parameters())
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        name = self._name(x, gate, net, needs_grad, place) if len(x) else "dense"
        return run_gated(name, x, gate, net)

    def may_skip(self, gate: Gate) -> bool:
        """Return whether blocks that a gate closes may be skipped.

        A gate that does not scale learns from closed blocks. Past its limit of recompilations,
        torch.compile runs a model uncompiled, which must not change what is learned.
        """
        if torch.compiler.is_compiling():
            self.was_compiled = True
            return False
        learns = gate.training and torch.is_grad_enabled() and gate.scale is None
        return not (learns and self.was_compiled)

    def _name(
        self, x: Tensor, gate: Gate, net: FeedForward, needs_grad: bool, place: Hashable
    ) -> str:
        if self.engine != "auto":
            rows = "blocks" if needs_grad else "rows"
            return {"graph": "triton", "rows": rows}.get(self.engine, self.engine)
        few = len(x) <= MAX_ROWS_BATCH
        key = (len(x).bit_length(), few, x.dtype, x.device, needs_grad, net.first[0].shape)
        # By layer: one may open all blocks where another closes most.
        known = self._fastest.setdefault(place, {})
        if not needs_grad:
            # Measured again after an evaluation only: checkpointing repeats a training pass, which
            # must not choose another engine then.
            for old in known.values():
                old.outdated = old.outdated or old.uses >= _REMEASURE_AFTER
        found = known.get(key)
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if (found is None or found.outdated) and not captured:
            found = known[key] = fastest_engine(x, gate, net, needs_grad)
        if found is None:  # captured without a run before it
            return candidates(x, needs_grad)[-1]
        found.uses += 1
        return found.captured if captured else found.eager

    def __getstate__(self) -> dict[str, Any]:
        # Measurements and views are specific to this instance and device.
        return {**self.__dict__, "_fastest": {}, "_views": {}}


@dataclass
class Fastest:
    """The engine that is fastest where the host launches kernels, and in a CUDA graph."""

    eager: str
    captured: str
    uses: int = 0
    outdated: bool = False


def fastest_engine(x: Tensor, gate: Gate, net: FeedForward, needs_grad: bool) -> Fastest:
    """Return the engine that is fastest on a batch, including the backward pass if needed."""
    x = x.detach()
    runs = {n: partial(_run_once, n, x, gate, net, needs_grad) for n in candidates(x, needs_grad)}
    # Measuring must not change what stochastic gates sample afterwards, nor be seen by hooks of
    # checkpointing.
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
