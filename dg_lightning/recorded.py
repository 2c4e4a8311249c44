"""Many small operations on a GPU as one launch: recorded, and replayed where their tensors lie."""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Recorded"]

_MOST_KEPT = 4
_MOST_COUNTED = 64
_LARGEST = 2**24  # bytes of arguments: for more than these, launches matter less than memory

_address, _size = Tensor.data_ptr, attrgetter("nbytes")  # called in every step, by C alone
_kind = attrgetter("shape", "dtype")

Result = TypeVar("Result")


class Recorded:
    """Computes a function; on a GPU by a replay, where it has been asked for alike before.

    There every small operation costs its launch, and a step of a small net has time for few. A
    replay reads and writes memory, not tensors: it stands for the function as long as the tensors
    that this reads lie where they lay when it was recorded. What is fresh in every step mostly lies
    where it lay in the step before. Where it does not, an argument that is not large is copied to
    where it is read from, in one launch more; and recordings, which take milliseconds, become rare:
    each needs to have been asked for twice as often as the one before.

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
        read = (*in_place, *fresh)
        key = _key(in_place, fresh, depends_on)
        kept = self._kept.get(key)
        if kept is not None:
            kept.replay()
        elif not _can_be_recorded(read, fresh):
            with torch.no_grad():
                return function(*fresh)
        elif self._is_due(key):
            kept = self._keep(key, _Recording(function, fresh, read[0].device, copied=False))
            kept.replay()
        else:
            kept = self._by_copies(function, in_place, fresh, depends_on)
            if kept is None:
                with torch.no_grad():
                    return function(*fresh)
        result: Result = kept.result
        return result

    def _by_copies(
        self,
        function: Callable[..., Any],
        in_place: Sequence[Tensor],
        fresh: Sequence[Tensor],
        depends_on: Hashable,
    ) -> "_Recording | None":
        """Replay what was recorded with copies of the fresh tensors, or is worth to be now."""
        if not fresh:
            return None
        places = (*map(_address, in_place), *map(_size, in_place))
        key = (depends_on, "copied", *places, *map(_kind, fresh))
        kept = self._kept.get(key)
        if kept is None and self._is_due(key):
            kept = self._keep(key, _Recording(function, fresh, fresh[0].device, copied=True))
        if kept is not None:
            kept.take(fresh)
            kept.replay()
        return kept

    def _keep(self, key: Hashable, recording: "_Recording") -> "_Recording":
        if len(self._kept) == _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = recording
        return recording

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


def _key(
    in_place: Sequence[Tensor], fresh: Sequence[Tensor] = (), depends_on: Hashable = None
) -> tuple[Hashable, ...]:
    # Of a tensor that lies where another one lay, a look at its size is all there is time for.
    addresses = (*map(_address, in_place), *map(_address, fresh))
    return (depends_on, *addresses, *map(_size, in_place), *map(_kind, fresh))


def _can_be_recorded(read: Sequence[Tensor], fresh: Sequence[Tensor]) -> bool:
    devices = {tensor.device for tensor in read}
    if len(devices) > 1 or devices.pop().type != "cuda":
        return False
    large = sum(tensor.nbytes for tensor in fresh) > _LARGEST
    return not large and not torch.cuda.is_current_stream_capturing()


class _Recording:
    """A function as a CUDA graph."""

    @torch.no_grad()
    def __init__(
        self,
        function: Callable[..., Any],
        fresh: Sequence[Tensor],
        device: torch.device,
        *,
        copied: bool,
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._arguments = [torch.empty_like(t) for t in fresh] if copied else list(fresh)
        here, aside = torch.cuda.current_stream(device), _aside(device)
        aside.wait_stream(here)
        # Not by torch.cuda.graph: it empties the allocator's cache, and all would lie elsewhere.
        # Other threads, as those that pin memory for a loader, may go on with what they do.
        with torch.cuda.device(device), torch.cuda.stream(aside):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.result = function(*self._arguments)
            finally:
                self._graph.capture_end()
        here.wait_stream(aside)
        self.replay = self._graph.replay
        if not copied:  # another one lies there at every replay
            self._arguments = []

    def take(self, fresh: Sequence[Tensor]) -> None:
        """Copy arguments to where they are read from."""
        with torch.no_grad():
            torch._foreach_copy_(self._arguments, list(fresh))


@cache  # one for all: libraries keep memory for every stream that they have been used on
def _aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
