"""Tests of Triton kernels on a machine without a GPU: by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["DEVICE", "INTERPRETED", "here", "passes_interpreted", "unless_it_runs_here"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
here = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA")
unless_it_runs_here = pytest.mark.skipif(
    torch.cuda.is_available() or INTERPRETED, reason="it runs by itself here"
)


if INTERPRETED:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_numbers(tensor: Any, scope: Any) -> None:
        """Let loops have computed bounds: new versions of numpy refuse the interpreter's."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_numbers


def passes_interpreted(file: str) -> str:
    """Run a file of tests by the interpreter; see that they pass, and return what was printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
    return done.stdout
