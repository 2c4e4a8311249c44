"""CUDA graphs for machines without a GPU: operations are recorded, undone, and run again.

What a graph holds is the tensors of its operations: Python runs once, results are written to the
tensors of the recording. (Freed memory that is used again, as in a pool, cannot be shown.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dg_lightning.training import captured


class Graph:
    """The operations of a recording."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    @torch.no_grad()
    def replay(self) -> None:
        with torch.autocast("cpu", enabled=False):
            for function, args, kwargs, recorded in self.operations:
                results = tree_leaves(function(*args, **kwargs))
                for new, place in zip(results, tree_leaves(recorded), strict=True):
                    if isinstance(new, Tensor) and new.data_ptr() != place.data_ptr():
                        place.detach().copy_(new)


class Recorder(TorchDispatchMode):
    """Records operations, and remembers what they overwrite."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.overwritten: dict[int, tuple[Tensor, Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(given):
                    if isinstance(tensor, Tensor):
                        storage = tensor.untyped_storage()
                        known = (tensor, storage.clone())
                        self.overwritten.setdefault(storage.data_ptr(), known)
        out = function(*args, **kwargs)
        self.graph.operations.append((function, args, kwargs, out))
        return out


@contextmanager
def recording(graph: Graph, *_: Any) -> Iterator[None]:
    """Take the place of `torch.cuda.graph`."""
    random, recorder = torch.get_rng_state(), Recorder(graph)
    try:
        with recorder:
            yield
    finally:
        for tensor, before in recorder.overwritten.values():
            tensor.untyped_storage().copy_(before)
        torch.set_rng_state(random)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU capture steps."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    for name in ("Stream", "current_stream", "set_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    real = captured.capture_blocker

    def why_not(module: Any, trainer: Any) -> str | None:
        known = {n: getattr(trainer, n) for n in ("optimizers", "callbacks", "precision_plugin")}
        single = SingleDeviceStrategy(device=torch.device("cuda:0"))
        return real(module, SimpleNamespace(strategy=single, **known))

    monkeypatch.setattr(captured, "capture_blocker", why_not)
