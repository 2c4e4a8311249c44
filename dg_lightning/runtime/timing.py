"""Timing and memory measurements; alternatives are timed in turns and compared by medians."""

import math
import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

__all__ = ["median_seconds", "peak_bytes", "seconds_on_gpu", "shortest_seconds"]

_QUEUED = 6  # calls of a measurement on a GPU, which overlap with launches as in a real loop


def median_seconds(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int = 15,
    min_seconds: float = 0.01,
) -> dict[str, float]:
    """Return the median time per call of each function, measured in turns.

    Args:
        runs: The functions, by name.
        device: Device to synchronize before and after each measurement.
        rounds: Number of measurements of each function.
        min_seconds: Minimum duration of a measurement; calls are repeated to reach it.
    """
    repeats: dict[str, int] = {}
    for name, run in runs.items():
        for _ in range(3):
            run()
        repeats[name] = max(1, math.ceil(min_seconds / max(_seconds(run, 3, device), 1e-9)))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        names = list(runs) if turn % 2 else list(runs)[::-1]
        for name in names:
            taken[name].append(_seconds(runs[name], repeats[name], device))
    return {name: statistics.median(times) for name, times in taken.items()}


def shortest_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the shorter time per call of two measurements, after a warm-up call."""
    run()
    repeats = _QUEUED if device.type == "cuda" else 1
    return min(_seconds(run, repeats, device) for _ in range(2))


def seconds_on_gpu(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of a call on the GPU alone, as in a CUDA graph, after a warm-up call.

    Other work keeps the GPU busy while the call is launched.
    """
    run()
    busy = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(8):
        busy @ busy
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


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
    """Return the peak memory that a call allocates."""
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
    """Tracks the memory that torch operations allocate and free."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._known: set[int] = set()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._known.add(tensor.untyped_storage().data_ptr())
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in self._known:
                self._known.add(address)
                self.current += storage.nbytes()
                self.peak = max(self.peak, self.current)
                weakref.finalize(storage, self._free, address, storage.nbytes())
        return out

    def _free(self, address: int, size: int) -> None:
        self.current -= size
        self._known.discard(address)


def _tensors(tree: Any) -> list[Tensor]:
    leaves: list[Tensor] = []
    apply_to_collection(tree, Tensor, leaves.append)
    return [leaf for leaf in leaves if leaf.layout == torch.strided]  # others have no storage
