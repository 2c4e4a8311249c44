"""The kernel that drops and grows, against a sort by numpy; on a CPU by Triton's interpreter."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
here = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA")
# On a GPU many programs count together, and some have nothing to do.
SIZES = [2, 7, 64, 4096, 5001] + ([] if INTERPRETED else [132 * 4096 + 1, 2_000_003])


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="it runs by itself here")
def test_without_a_gpu_it_is_interpreted() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def first_largest(scores: Any, allowed: Any, count: int) -> Any:
    order = np.argsort(np.where(allowed, -scores, np.inf), kind="stable")
    mask = np.zeros(len(scores), bool)
    mask[order[:count]] = True
    return mask


def scores_of(kind: str, size: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.rand(size, generator=generator)
    if kind == "all alike":
        return torch.full((size,), 0.25)
    if kind == "many alike":
        return (drawn * 4).round() / 4
    return drawn * 10.0 ** (torch.rand(size, generator=generator) * 60 - 40)  # also denormal


@here
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("kind", ["drawn", "many alike", "all alike"])
@pytest.mark.parametrize("size", SIZES)
def test_it_keeps_and_grows_what_a_sort_does(size: int, kind: str, exclude: bool) -> None:
    from dg_lightning.rewiring.rewire_kernel import rewired_at_once

    generator = torch.Generator().manual_seed(size)
    keep, grow = (scores_of(kind, size, generator) for _ in range(2))
    old = torch.rand(size, generator=generator) < 0.4
    old[0], old[1] = True, False
    total = int(old.sum())
    for grown in {1, max(1, total // 3), total - 1} - {0}:
        kept = total - grown
        grown = min(grown, size - total) if exclude else grown
        tensors = [tensor.to(DEVICE) for tensor in (old, keep, grow)]
        found = rewired_at_once(tensors[0], tensors[1], tensors[2], kept, grown, exclude)
        if kept == 0:
            assert found is None
            continue
        stays = first_largest(keep.numpy(), old.numpy(), kept)
        comes = first_largest(grow.numpy(), ~(old.numpy() if exclude else stays), grown)
        assert found is not None
        assert torch.equal(found.cpu(), torch.from_numpy(stays | comes)), (kept, grown)


@here
def test_what_it_does_not_do_is_left_to_torch() -> None:
    from dg_lightning.rewiring.rewire_kernel import rewired_at_once

    old, scores = torch.eye(4, device=DEVICE).bool(), torch.rand(4, 4, device=DEVICE)
    assert rewired_at_once(old, scores.double(), scores.double(), 2, 2, False) is None
    assert rewired_at_once(old, scores.T, scores, 2, 2, False) is None
    assert rewired_at_once(old, scores, scores, 0, 4, False) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("structure", ["unstructured", "block:2"])
def test_an_update_on_a_gpu_is_the_one_on_a_cpu(structure: str) -> None:
    from dg_lightning.rewiring import Structure, rewired

    torch.manual_seed(0)
    for shape in ((64, 30), (8, 4, 4, 4), (1024, 3072)):
        keep, grow = torch.rand(shape), torch.rand(shape)
        blocks = Structure(structure)
        mask = blocks.ungroup(blocks.masks(torch.rand(shape) < 0.2), keep)
        expected = rewired(mask, keep, grow, 0.3, blocks)
        found = rewired(mask.cuda(), keep.cuda(), grow.cuda(), 0.3, blocks)
        assert torch.equal(found.cpu(), expected)
