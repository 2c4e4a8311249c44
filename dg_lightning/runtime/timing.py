"""How long things take, compared fairly: in turns, by medians."""

import math
import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

__all__ = ["median_seconds", "peak_bytes", "shortest_seconds"]


def median_seconds(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int = 15,
    least: float = 0.01,
) -> dict[str, float]:
    """Return the median time of a call of each, measured in turns.

    Args:
        runs: What to call, by name.
        device: What to wait for before and after a measurement.
        rounds: How often each is measured.
        least: Seconds of a measurement: calls are repeated until it is so long.
    """
    repeats: dict[str, int] = {}
    for name, run in runs.items():
        for _ in range(3):
            run()
        repeats[name] = max(1, math.ceil(least / max(_seconds(run, 3, device), 1e-9)))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        names = list(runs) if turn % 2 else list(runs)[::-1]
        for name in names:
            taken[name].append(_seconds(runs[name], repeats[name], device))
    return {name: statistics.median(times) for name, times in taken.items()}


def shortest_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the shorter time of two calls, after one that may compile something."""
    run()
    return min(_seconds(run, 1, device) for _ in range(2))


def _seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(run: Callable[[], Tensor], device: torch.device) -> int:
    """Return how much memory a call takes beside what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = int(torch.cuda.memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    allocations = _Allocations()
    with allocations:
        run()
    return allocations.peak


class _Allocations(TorchDispatchMode):
    """Follows what the operations of torch allocate and let go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._known.add(tensor.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._let_go, storage._cdata, storage.nbytes())
        return out

    def _let_go(self, address: int, size: int) -> None:
        self.now -= size
        self._known.discard(address)


def _tensors(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.layout == torch.strided]  # others have no storage
