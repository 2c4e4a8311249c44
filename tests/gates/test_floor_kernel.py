"""The kernel of gates with a floor, against torch; on a CPU by Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from dg_lightning.gates.policies import deployed, top_k_mask

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
here = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA")


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="it runs by itself here")
def test_without_a_gpu_it_is_interpreted() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@here
@pytest.mark.parametrize("shape", [(1,), (5,), (64,), (3, 17), (4, 128), (2, 3, 33), (2, 1100)])
@pytest.mark.parametrize("floor", [1, 2, 5])
def test_it_opens_what_torch_opens(shape: tuple[int, ...], floor: int) -> None:
    from dg_lightning.gates.floor_kernel import with_floor

    floor = min(floor, shape[-1])
    generator = torch.Generator().manual_seed(floor)
    threshold = torch.tensor(0.9, device=DEVICE)
    drawn = torch.rand(shape, generator=generator)
    # With ties, with all equal, with what sigmoid rounds to 0 and 1.
    for p in (drawn, (drawn * 4).round() / 4, torch.full(shape, 0.3), drawn.round()):
        p = p.to(DEVICE)
        expected = top_k_mask(p.cpu(), floor, into=p.cpu() > 0.9)
        found = with_floor(p, threshold, floor)
        assert found is not None
        assert torch.equal(found.cpu(), expected.float())


@here
def test_what_it_does_not_do_is_left_to_torch() -> None:
    from dg_lightning.gates.floor_kernel import with_floor

    threshold = torch.tensor(0.5, device=DEVICE)
    for p in (
        torch.rand(4, 8, device=DEVICE, dtype=torch.float64),
        torch.rand(8, 4, device=DEVICE).T,
        torch.rand(2, 9000, device=DEVICE),
    ):
        assert with_floor(p, threshold, 2) is None
        assert (deployed(p, threshold, None, 2).sum(-1) >= 2).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_a_gate_on_a_gpu_uses_it_and_passes_the_gradient_of_p() -> None:
    p = torch.rand(6, 40, device="cuda", requires_grad=True)
    g = deployed(p, torch.tensor(0.95, device="cuda"), None, 4)
    expected = top_k_mask(p.cpu(), 4, into=p.detach().cpu() > 0.95)
    assert torch.equal(g.detach().cpu() != 0, expected)
    (g * 3).sum().backward()
    torch.testing.assert_close(p.grad, torch.full_like(p, 3.0))
