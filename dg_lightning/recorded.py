"""Many small operations on a GPU as one launch: recorded, and replayed where their tensors lie."""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Recorded"]

_MOST_KEPT = 4
_MOST_COUNTED = 64
_LARGEST = 2**24  # bytes that are copied: for more than these, launches do not matter

Result = TypeVar("Result")


class Recorded:
    """Computes a function; on a GPU by a replay, where it has been asked for alike before.

    There every small operation costs its launch, and a step of a small net has time for few. A
    replay reads and writes memory, not tensors: it stands for the function as long as the tensors
    that this reads lie where they lay when it was recorded. What is fresh in every step is copied
    to where it is read from, in one launch more, if it is not large. What is fresh and changed by
    the function is left where it is: mostly it lies where it lay in the step before. Where it does
    not, recordings, which take milliseconds, become rare: each needs to have been asked for twice
    as often as the one before.

    The function must not wait for the device. What it returns is written over by a later replay.

    >>> x = torch.ones(2)
    >>> Recorded()(lambda x: x + 1, fresh=[x]).tolist()
    [2.0, 2.0]
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Recording] = {}
        self._asked: dict[Hashable, int] = {}
        self._made = 0

    def __call__(
        self,
        function: Callable[..., Result],
        in_place: Sequence[Tensor] = (),
        fresh: Sequence[Tensor] = (),
        depends_on: Hashable = None,
    ) -> Result:
        """Return what a function of the fresh tensors returns, without a graph of autograd.

        Args:
            function: The function, always the same one.
            in_place: The tensors that it reads or changes beside its arguments.
            fresh: Its arguments, which it only reads.
            depends_on: Whatever else it depends on.
        """
        if not (fresh or in_place)[0].is_cuda:
            with torch.no_grad():
                return function(*fresh)
        # Of a tensor that lies where another one lay, a look at its size is all there is time for.
        key = (
            depends_on,
            *[t.data_ptr() for t in in_place],
            *[t.nbytes for t in in_place],
            *[t.shape for t in fresh],
            *[t.dtype for t in fresh],
        )
        kept = self._kept.get(key)
        if kept is None:
            if not _can_be_recorded(in_place, fresh) or not self._is_due(key):
                with torch.no_grad():
                    return function(*fresh)
            if len(self._kept) == _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            kept = self._kept[key] = _Recording(function, fresh, in_place)
        result: Result = kept(fresh)
        return result

    def _is_due(self, key: Hashable) -> bool:
        """Count how often something was asked for; tell whether to record it."""
        count = self._asked.pop(key, 0) + 1
        if count >= 2 << self._made:
            self._made += 1
            return True
        if len(self._asked) == _MOST_COUNTED:
            del self._asked[next(iter(self._asked))]
        self._asked[key] = count
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": {}, "_asked": {}, "_made": 0}


def _can_be_recorded(in_place: Sequence[Tensor], fresh: Sequence[Tensor]) -> bool:
    devices = {tensor.device for tensor in (*in_place, *fresh)}
    large = sum(tensor.nbytes for tensor in fresh) > _LARGEST
    return len(devices) == 1 and not large and not torch.cuda.is_current_stream_capturing()


class _Recording:
    """A function as a CUDA graph."""

    @torch.no_grad()
    def __init__(
        self, function: Callable[..., Any], fresh: Sequence[Tensor], in_place: Sequence[Tensor]
    ) -> None:
        device = (fresh or in_place)[0].device
        self._graph = torch.cuda.CUDAGraph()
        self._arguments = [torch.empty_like(tensor) for tensor in fresh]
        here, aside = torch.cuda.current_stream(device), _aside(device)
        aside.wait_stream(here)
        # Not by torch.cuda.graph: it empties the allocator's cache, and all would lie elsewhere.
        # Other threads, as those that pin memory for a loader, may go on with what they do.
        with torch.cuda.device(device), torch.cuda.stream(aside):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._result = function(*self._arguments)
            finally:
                self._graph.capture_end()
        here.wait_stream(aside)

    def __call__(self, fresh: Sequence[Tensor]) -> Any:
        if self._arguments:
            with torch.no_grad():
                torch._foreach_copy_(self._arguments, list(fresh))
        self._graph.replay()
        return self._result


@cache  # one for all: libraries keep memory for every stream that they have been used on
def _aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
