"""The kernel of gates with a floor, against torch; on a CPU by Triton's interpreter."""

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, here, passes_interpreted, unless_it_runs_here

from dg_lightning.gates.decision import decided
from dg_lightning.gates.policies import top_k_mask

pytest.importorskip("triton")


@unless_it_runs_here
def test_without_a_gpu_it_is_interpreted() -> None:
    passes_interpreted(__file__)


FEW, MORE = [(1,), (5,), (3, 17)], [(64,), (4, 128), (2, 3, 33), (2, 1100)]


@here
@pytest.mark.parametrize("shape", FEW if INTERPRETED else FEW + MORE)
@pytest.mark.parametrize("floor", [1, 2, 5])
def test_it_opens_what_torch_opens(shape: tuple[int, ...], floor: int) -> None:
    from dg_lightning.gates.floor_kernel import decided_with_floor

    floor = min(floor, shape[-1])
    generator = torch.Generator().manual_seed(floor)
    temperature, threshold = torch.tensor([0.7, 0.9], device=DEVICE).unbind()
    drawn = torch.randn(shape, generator=generator) * 3
    # With ties, with all equal, with what sigmoid rounds to 0 and 1.
    for z in (drawn, drawn.round(), torch.full(shape, 0.3), drawn.sign() * 200):
        z = z.to(DEVICE)
        found = decided_with_floor(z, temperature, threshold, floor)
        assert found is not None
        p, g = (tensor.cpu() for tensor in found)
        expected = torch.sigmoid(z / temperature)
        # The interpreter has no exponential but Triton's own.
        torch.testing.assert_close(p, expected.cpu(), rtol=2e-6 if INTERPRETED else 0, atol=0)
        assert torch.equal(g, top_k_mask(p, floor, into=p > threshold.cpu()).float())


@here
def test_what_it_does_not_do_is_left_to_torch() -> None:
    from dg_lightning.gates.floor_kernel import decided_with_floor

    temperature, threshold = torch.tensor([1.0, 0.5], device=DEVICE).unbind()
    for z in (
        torch.randn(4, 8, device=DEVICE, dtype=torch.float64),
        torch.randn(8, 4, device=DEVICE).T,
        torch.randn(2, 9000, device=DEVICE),
    ):
        assert decided_with_floor(z, temperature, threshold, 2) is None
        _, g = decided(z, temperature, threshold, "threshold", None, 2)
        assert (g.sum(-1) >= 2).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_a_gate_on_a_gpu_uses_it_and_passes_the_gradient_of_p() -> None:
    temperature, threshold = torch.tensor([0.7, 0.95], device="cuda").unbind()
    z = torch.randn(6, 40, device="cuda", requires_grad=True)
    p, g = decided(z, temperature, threshold, "threshold", None, 4)
    expected = top_k_mask(p.cpu(), 4, into=p.detach().cpu() > 0.95)
    assert torch.equal(g.detach().cpu() != 0, expected)
    (g * 3).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(z.grad, 3 * (p * (1 - p)).detach() / 0.7)
