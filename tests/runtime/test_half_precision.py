"""Every engine in every precision against the formula in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gated_nets import feed_forward, random_gate
from torch import Tensor, nn

from dg_lightning.runtime.engines import FeedForward, dense, masked, run_blocks, run_open_rows

TOLERANCES = {
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
    torch.float32: 2e-5,
}  # relative to the largest
SHAPES = [(5, 16, 3, 8, 12), (64, 128, 8, 16, 96), (257, 256, 4, 64, 256)]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def triton(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    from dg_lightning.runtime.triton_engine import run_triton

    return run_triton(x, gate, net)


ENGINES: dict[str, Callable[[Tensor, Tensor, FeedForward], Tensor]] = {
    "masked": masked,
    "dense": dense,
    "blocks": run_blocks,
    "rows": run_open_rows,
    "triton": triton,
}
CASES = [
    pytest.param(device, engine, marks=marks)
    for device, marks in (("cpu", []), ("cuda", [needs_cuda, pytest.mark.cuda]))
    for engine in ENGINES
    if (device, engine) != ("cpu", "triton")
]


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    scale = expected.abs().max().clamp(min=1e-2).item()
    torch.testing.assert_close(
        found.detach().double().cpu(),
        expected.detach().cpu(),
        atol=TOLERANCES[dtype] * scale,
        rtol=0,
        msg=lambda text: f"{what}: {text}",
    )


@pytest.mark.parametrize(("device", "engine"), CASES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("scaled", [False, True], ids=["hard", "scaled"])
def test_values_and_gradients_are_those_of_float64(
    device: str, engine: str, dtype: torch.dtype, shape: Any, glu: bool, scaled: bool
) -> None:
    samples, inputs, blocks, block, outputs = shape
    for seed, activation in enumerate((nn.GELU(), nn.SiLU())):
        torch.manual_seed(seed)
        net = feed_forward(
            inputs, blocks, block, outputs, activation, dtype, True, device, scaled, glu
        )
        x = torch.randn(samples, inputs, dtype=dtype, device=device, requires_grad=True)
        gate = random_gate(samples, blocks, 0.4, torch.float32).to(device)
        gate = (gate * (0.5 + torch.rand_like(gate) / 2) if scaled else gate).requires_grad_()
        weights = torch.randn(samples, outputs, dtype=dtype, device=device)
        wanted = [x, gate, *net.tensors]
        exact = masked(x.double(), gate.double(), net.to(torch.float64))
        gradients = torch.autograd.grad((exact * weights.double()).sum(), wanted)
        if engine == "rows":
            with torch.no_grad():
                close(ENGINES[engine](x, gate, net), exact, dtype, "output")
            continue
        found = ENGINES[engine](x, gate, net)
        close(found, exact, dtype, "output")
        own = torch.autograd.grad((found * weights).sum(), wanted)
        for index, (mine, fc1_gate) in enumerate(zip(own, gradients, strict=True)):
            # Engines that skip blocks give closed gates no gradient.
            is_gate = index == 1 and engine != "masked"
            expected = torch.where(gate != 0, fc1_gate, 0.0) if is_gate else fc1_gate
            close(mine, expected.double(), dtype, f"gradient {index}")
