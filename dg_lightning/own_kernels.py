"""Which of our own kernels run on a device: where one does not, torch does the same."""

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

__all__ = ["kernel_on"]


@cache
def kernel_on(
    device: torch.device, module: str, name: str, trial: Callable[[Any, torch.device], Any]
) -> Any:
    """Return the function of a module of Triton kernels, or None where it does not run.

    Args:
        device: A GPU.
        module: The module, below this package.
        name: The function.
        trial: Calls it once, with next to nothing to do.
    """
    if torch.version.hip is not None:
        return None
    try:
        function = getattr(import_module(f"dg_lightning.{module}"), name)
    except ImportError:  # Triton comes with torch for CUDA, not for every machine
        return None
    try:
        trial(function, device)
    except Exception as error:  # there is no compiler, its folder cannot be written, ...
        warnings.warn(
            f"Triton cannot run the kernel {name} on {device} ({type(error).__name__}: {error}): "
            "torch does it, a little slower.",
            stacklevel=2,
        )
        return None
    return function
