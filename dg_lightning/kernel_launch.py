"""Launch Triton kernels: those that are compiled already without Triton's look at all arguments."""

import os
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

__all__ = ["INTERPRETED", "VERSION", "Launch"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_DIRECTLY = (
    VERSION >= (3, 6) and not INTERPRETED
)  # before, and in the interpreter, it goes otherwise


class Launch:
    """Launches a kernel, which takes half the time from the second time on.

    Args:
        kernel: The kernel, with the tensors as its first arguments.
        **options: Of its launch.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[Hashable, Any] = {}

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
        device = tensors[0].device
        addresses = [tensor.data_ptr() for tensor in tensors]
        # What is compiled holds for pointers that are aligned as those were, and is launched on the
        # device of now.
        aligned = not any(address % 16 for address in addresses)
        grid = (programs, 1, 1)
        compiled = self._compiled.get((key, device)) if aligned else None
        if compiled is not None and device.index == torch.cuda.current_device():
            compiled[grid](*addresses, *numbers)  # tensors would be looked up, one by one
            return
        with torch.cuda.device_of(tensors[0]):
            compiled = self._kernel[grid](*tensors, *numbers, **self._options)
        if aligned and _DIRECTLY:
            self._compiled[key, device] = compiled
