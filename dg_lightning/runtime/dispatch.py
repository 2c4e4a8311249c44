"""Which engine runs a gated feed-forward, by name or by measuring."""

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from dg_lightning.gates import Gate
from dg_lightning.runtime.engines import by_blocks, by_open_rows, dense
from dg_lightning.runtime.feed_forward import FeedForward
from dg_lightning.runtime.timing import shortest_seconds

__all__ = ["FEW", "candidates", "fastest_engine", "run_gated"]

FEW = 4  # samples that the engine of open rows takes one by one
_ENGINES = {"dense": dense, "blocks": by_blocks, "rows": by_open_rows}


def run_gated(engine: str, x: Tensor, gate: Gate, net: FeedForward) -> Tensor:
    """Let the gate decide, and run what it opens by the engine of that name."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        if engine == "triton":
            return _by_kernels(x, gate, net)
        return _ENGINES[engine](x, gate.decide(x), net)
    g = gate.decide(x)  # reads what is there, as a gate does, before it is rounded
    dtype = torch.get_autocast_dtype(kind)
    x, net = x.to(dtype), net.to(dtype)
    with torch.autocast(kind, enabled=False):
        if engine == "triton":
            return _by_kernels(x, gate, net, g)
        return _ENGINES[engine](x, g, net)


def _by_kernels(x: Tensor, gate: Gate, net: FeedForward, g: Tensor | None = None) -> Tensor:
    if not x.is_cuda:
        raise ValueError(f"The engines triton and graph run on CUDA, got {x.device}: use 'auto'.")
    try:
        from dg_lightning.runtime.triton_engine import by_kernels, decided_by_kernel
    except ImportError as error:
        raise ModuleNotFoundError(
            "The engine 'triton' needs Triton 3.3 or later, as torch for CUDA has it from 2.7 on: "
            "use 'auto'."
        ) from error
    packing = decided_by_kernel(gate, x) if g is None else None
    if packing is not None:
        g = gate.gate
    elif g is None:
        g = gate.decide(x)
    assert g is not None
    return by_kernels(x, g, net, packing)


def candidates(x: Tensor, learns: bool) -> list[str]:
    """List the engines that can run a batch and may be the fastest."""
    names = ["dense", "blocks"]
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if x.is_cuda and dtype.itemsize == 2 and torch.version.hip is None:
        with suppress(ImportError):
            import dg_lightning.runtime.triton_engine  # noqa: F401

            names.append("triton")
    if not x.is_cuda and len(x) <= FEW and not learns:
        names.append("rows")
    return names


def fastest_engine(x: Tensor, gate: Gate, net: FeedForward, learns: bool) -> str:
    """Measure the engines on a batch, with the backward pass if it `learns`."""
    x = x.detach()
    # Gates that draw must draw the same afterwards as if nobody had measured.
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        taken = {
            name: shortest_seconds(partial(_once, name, x, gate, net, learns), x.device)
            for name in candidates(x, learns)
        }
    return min(taken, key=lambda name: taken[name])


def _once(name: str, x: Tensor, gate: Gate, net: FeedForward, learns: bool) -> None:
    with torch.set_grad_enabled(learns):
        if not learns:
            run_gated(name, x, gate, net)
            return
        inputs = x.clone().requires_grad_()
        out = run_gated(name, inputs, gate, net)
        weights = [t for t in (*net.tensors, *gate.parameters()) if t.requires_grad]
        torch.autograd.grad(out.sum(), [inputs, *weights], allow_unused=True)
