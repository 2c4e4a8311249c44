"""Time functions without torch.utils.benchmark, which looks for compilers when imported."""

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

_QUEUED = 6  # calls per measurement on a GPU, so that launches overlap as in a real loop


def median_seconds(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int = 15,
    min_seconds: float = 0.01,
) -> dict[str, float]:
    """Return the median time per call of each function, measured alternately.

    Args:
        runs: The functions, by name.
        device: Device to synchronize before and after each measurement.
        rounds: Number of measurements of each function.
        min_seconds: Minimum duration of a measurement, reached by repeating calls.
    """
    repeats: dict[str, int] = {}
    for name, run in runs.items():
        _seconds(run, 3, device)
        repeats[name] = max(1, math.ceil(min_seconds / max(_seconds(run, 3, device), 1e-9)))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(_seconds(run, repeats[name], device))
    return {name: statistics.median(times) for name, times in taken.items()}


def shortest_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the shorter of two measured times per call, after a warm-up call."""
    run()
    calls = _QUEUED if device.type == "cuda" else 1
    return min(_seconds(run, calls, device) for _ in range(2))


def seconds_on_gpu(run: Callable[[], object], device: torch.device) -> float:
    """Return the time that a call takes on the GPU, after a warm-up call.

    Other work keeps the GPU busy during the launches, so they add no time, as in a CUDA graph.
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


def _seconds(run: Callable[[], object], calls: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
