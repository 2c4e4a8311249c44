"""Selection of the engine of a gated feed-forward, by name or by measurement."""

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from dg_lightning.gates import Gate
from dg_lightning.runtime.engines import dense, run_blocks, run_open_rows
from dg_lightning.runtime.feed_forward import FeedForward
from dg_lightning.runtime.timing import shortest_seconds

__all__ = ["MAX_ROWS_BATCH", "candidates", "fastest_engine", "run_gated"]

MAX_ROWS_BATCH = 4  # largest batch for the engine `rows`
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
            import dg_lightning.runtime.triton_engine  # noqa: F401

            names.append("triton")
    if not x.is_cuda and len(x) <= MAX_ROWS_BATCH and not needs_grad:
        names.append("rows")
    return names


def fastest_engine(x: Tensor, gate: Gate, net: FeedForward, needs_grad: bool) -> str:
    """Return the engine that is fastest on a batch, including the backward pass if needed."""
    x = x.detach()
    # Measuring must not change what stochastic gates sample afterwards.
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        seconds = {
            name: shortest_seconds(partial(_run_once, name, x, gate, net, needs_grad), x.device)
            for name in candidates(x, needs_grad)
        }
    return min(seconds, key=lambda name: seconds[name])


def _run_once(name: str, x: Tensor, gate: Gate, net: FeedForward, needs_grad: bool) -> None:
    with torch.set_grad_enabled(needs_grad):
        if not needs_grad:
            run_gated(name, x, gate, net)
            return
        inputs = x.clone().requires_grad_()
        out = run_gated(name, inputs, gate, net)
        weights = [t for t in (*net.tensors, *gate.parameters()) if t.requires_grad]
        torch.autograd.grad(out.sum(), [inputs, *weights], allow_unused=True)
