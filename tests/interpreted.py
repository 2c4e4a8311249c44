"""Tests of Triton kernels on a machine without a GPU: by Triton's interpreter."""

import os
from typing import Any

import pytest
import torch

__all__ = ["DEVICE", "INTERPRETED", "here"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
here = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA")

if INTERPRETED:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_numbers(tensor: Any, scope: Any) -> None:
        """Let loops have computed bounds: new versions of numpy refuse the interpreter's."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_numbers
