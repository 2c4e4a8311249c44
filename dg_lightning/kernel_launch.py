"""Launch Triton kernels: those that are compiled already without Triton's look at all arguments."""

import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

__all__ = ["DIRECTLY", "INTERPRETED", "VERSION", "Launch"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
DIRECTLY = VERSION >= (3, 6) and not INTERPRETED  # what follows is made for these versions
# As Triton itself asks for them; torch's own functions call several others.
_device_of_now: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


class Launch:
    """Launches a kernel, which takes a third of the time from the second time on.

    Within a training step every line of Python costs several times what it costs in a loop of its
    own, because the processor's caches hold other things: there are few of them here.

    Args:
        kernel: The kernel, with the tensors as its first arguments; those of bools as bytes.
        **options: Of its launch.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        # What launches a compiled kernel, and its arguments between the stream and the tensors.
        self._compiled: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(
        self, programs: int, tensors: Sequence[Tensor], numbers: Sequence[Any], key: Hashable
    ) -> None:
        """Launch it.

        Args:
            programs: How many programs of it run.
            tensors: The tensors.
            numbers: All other arguments.
            key: What the compiled kernel hangs on: constants, and numbers that are specialized.
        """
        device, addresses, low_bits = tensors[0].get_device(), [], 0
        for tensor in tensors:
            address = tensor.data_ptr()
            addresses.append(address)
            low_bits |= address
        # What is compiled holds for pointers that are aligned as those were, and is launched on the
        # device of now.
        aligned = low_bits % 16 == 0
        known = self._compiled.get((key, device)) if aligned else None
        if known is not None and device == _device_of_now():
            launch, settings = known
            # Tensors would be looked up, one by one.
            launch(programs, 1, 1, _stream_of(device), *settings, *addresses, *numbers)
            return
        of_bytes = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in tensors]
        with torch.cuda.device_of(tensors[0]):
            compiled = self._kernel[(programs, 1, 1)](*of_bytes, *numbers, **self._options)
        if aligned and DIRECTLY:
            self._compiled[key, device] = _without_hooks(compiled)

    def repeatedly(
        self, programs: int, tensors: Sequence[Tensor], numbers: Sequence[Any], key: Hashable
    ) -> Callable[[], None]:
        """Launch it, and return what launches it with the same arguments again."""
        by_tensors = partial(self, programs, tensors, numbers, key)
        by_tensors()
        device = tensors[0].get_device()
        addresses = [tensor.data_ptr() for tensor in tensors]
        compiled = self._compiled.get((key, device))
        if compiled is None or any(address % 16 for address in addresses):
            return by_tensors
        launch, settings = compiled
        arguments = *settings, *addresses, *numbers

        def by_addresses() -> None:
            if device == _device_of_now():
                launch(programs, 1, 1, _stream_of(device), *arguments)
            else:
                by_tensors()  # which it also keeps alive

        return by_addresses


def _without_hooks(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return what launches a compiled kernel, and its arguments between stream and tensors.

    Without Triton's hooks for profilers, which take as long as the launch.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    hooks = (None, None, None)
    if VERSION == (3, 6) and not (run.global_scratch_size or run.profile_scratch_size):
        # What `run` calls, in three quarters of its time.
        scratch = (None, None)
        kind = run.launch_cooperative_grid, run.launch_pdl
        return run.launch, (function, *kind, *scratch, metadata, *hooks)
    return run, (function, metadata, *hooks)
