"""Triton kernels against plain torch: on a GPU, or interpreted on a CPU in a process of its own."""

from typing import Any

import pytest
import torch
from gated_nets import feed_forward, random_gate
from interpreted import DEVICE, INTERPRETED, here
from torch import nn

from dg_lightning.gates import DynamicGate
from dg_lightning.runtime.engines import FeedForward, masked

triton = pytest.importorskip("triton")
DTYPES = [torch.float64] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
ACTIVATIONS = [nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh()]


def close(found: Any, expected: Any, dtype: Any) -> None:
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}.get(dtype, 1e-9)
    scale = expected.abs().max().clamp(min=1e-3).item()
    torch.testing.assert_close(found, expected, atol=tolerance * scale, rtol=0)


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("samples", "inputs", "blocks", "block", "outputs", "rate", "bias", "glu"),
    [
        (50, 20, 4, 6, 10, 0.3, True, False),
        (3, 40, 3, 16, 5, 0.0, False, True),
        (140, 33, 4, 32, 70, 0.6, True, False),
        (7, 64, 1, 32, 64, 1.0, True, False),
        (141, 24, 4, 20, 40, 0.4, True, True),
        (201, 64, 2, 64, 64, 0.0, True, False),  # nobody opens anything
        (6, 16, 1, 1040, 8, 1.0, True, True),  # a row takes two turns
    ],
)
def test_values_and_gradients(
    samples: Any,
    inputs: Any,
    blocks: Any,
    block: Any,
    outputs: Any,
    rate: Any,
    bias: Any,
    glu: bool,
    dtype: Any,
) -> None:
    from dg_lightning.runtime.triton_engine import run_triton

    # The interpreter takes its time: there, one activation a case.
    chosen = [ACTIVATIONS[samples % 4]] if INTERPRETED else ACTIVATIONS
    for seed, activation in enumerate(chosen):
        torch.manual_seed(seed)
        scaled = samples % 2 == 1
        made = dtype, bias, DEVICE, scaled, glu
        net = feed_forward(inputs, blocks, block, outputs, activation, *made)
        x = torch.randn(samples, inputs, dtype=dtype, device=DEVICE, requires_grad=True)
        kind = torch.promote_types(dtype, torch.float32)
        gate = random_gate(samples, blocks, rate, kind).to(DEVICE)
        gate = (gate * (0.5 + torch.rand_like(gate) / 2) if scaled else gate).requires_grad_()
        weights = torch.randn(samples, outputs, dtype=dtype, device=DEVICE)
        wanted = [x, gate, *net.tensors]
        expected, found = masked(x, gate, net), run_triton(x, gate, net)
        close(found, expected, dtype)
        with torch.no_grad():
            close(run_triton(x, gate, net), expected, dtype)
        of_masked = torch.autograd.grad((expected * weights).sum(), wanted)
        of_kernels = torch.autograd.grad((found * weights).sum(), wanted)
        for index, (own, fc1_gate) in enumerate(zip(of_kernels, of_masked, strict=True)):
            assert own.isfinite().all()
            # Closed gates learn nothing here.
            close(own, fc1_gate * (gate.detach() != 0) if index == 1 else fc1_gate, dtype)


@here
def test_weights_by_unit_have_the_same_gradients() -> None:
    from dg_lightning.runtime.triton_engine import run_triton

    dtype = DTYPES[0]
    net = feed_forward(24, 3, 16, 20, nn.ReLU(), dtype, device=DEVICE)
    fc2 = net.fc2[0].detach().t().contiguous().t().requires_grad_()
    by_unit = FeedForward(net.fc1, net.activation, (fc2, net.fc2[1]), 16)
    x = torch.randn(40, 24, dtype=dtype, device=DEVICE)
    gate = random_gate(40, 3, 0.5, torch.float32).to(DEVICE)
    run_triton(x, gate, net).square().sum().backward()
    run_triton(x, gate, by_unit).square().sum().backward()
    assert fc2.grad is not None
    assert net.fc2[0].grad is not None
    close(fc2.grad, net.fc2[0].grad, dtype)


@here
def test_a_few_samples_read_weights_by_unit() -> None:
    from dg_lightning.runtime.triton_engine import run_triton

    dtype = DTYPES[0]
    net = feed_forward(24, 5, 48, 70, nn.ReLU(), dtype, device=DEVICE)
    fc2 = net.fc2[0].detach().t().contiguous().t()
    by_unit = FeedForward(net.fc1, net.activation, (fc2, net.fc2[1]), 48)
    for samples in (1, 16):
        x = torch.randn(samples, 24, dtype=dtype, device=DEVICE)
        gate = random_gate(samples, 5, 0.3, torch.float32).to(DEVICE)
        with torch.no_grad():
            close(run_triton(x, gate, by_unit), masked(x, gate, net), dtype)


@here
@pytest.mark.parametrize("has_bias", [(True, False), (False, True)])
def test_each_layer_may_have_a_bias_or_not(has_bias: tuple[bool, bool]) -> None:
    from dg_lightning.runtime.triton_engine import run_triton

    dtype = DTYPES[0]
    made: Any = {"dtype": dtype, "device": DEVICE}
    fc1, third = (nn.Linear(24, 60, bias=b, **made) for b in has_bias)
    net = FeedForward.from_linears(fc1, nn.SiLU(), nn.Linear(60, 7, **made), 20, third)
    for samples in (3, 20):
        x = torch.randn(samples, 24, **made)
        gate = random_gate(samples, 3, 0.6, torch.float32).to(DEVICE)
        with torch.no_grad():
            close(run_triton(x, gate, net), masked(x, gate, net), dtype)


@here
def test_rows_are_limited_to_what_gates_can_open() -> None:
    from dg_lightning.runtime.triton_engine import ROWS, Packing

    gate = torch.zeros(500, 8, device=DEVICE).scatter(1, torch.randint(8, (500, 2)).to(DEVICE), 1.0)
    packing = Packing(gate, most_open=2)
    assert int(packing.ends[-1]) <= packing.rows <= (500 * 2 // ROWS + 8) * ROWS
    assert packing.rows < Packing(gate).rows


@here
def test_packing_places_every_pair_once() -> None:
    from dg_lightning.runtime.triton_engine import ROWS, Packing

    gate = random_gate(333, 5, 0.4, torch.float32).to(DEVICE)
    packing = Packing(gate)
    ends = packing.ends.tolist()
    assert all(end % ROWS == 0 for end in ends)
    rows = packing.position[gate != 0].tolist()
    assert len(set(rows)) == len(rows) == int(gate.sum())
    assert packing.position[gate == 0].eq(-1).all()
    samples, blocks = gate.nonzero(as_tuple=True)
    for row, sample, block in zip(rows, samples.tolist(), blocks.tolist(), strict=True):
        assert int(packing.sample[row]) == sample
        assert [0, *ends][block] <= row < ends[block]
    padding = set(range(ends[-1])) - set(rows)
    assert all(int(packing.sample[row]) == -1 for row in padding)


@here
@pytest.mark.parametrize(
    "dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
)
@pytest.mark.parametrize("samples", [3, 77])
def test_one_kernel_decides_as_the_gate_does(dtype: Any, samples: int) -> None:
    from dg_lightning.runtime.triton_engine import Packing, decide_linear

    torch.manual_seed(0)
    gate = DynamicGate(300, 44, block_size=2, temperature=0.7, threshold=0.6).to(DEVICE)
    nn.init.normal_(gate.network[0].weight, std=0.06)  # type: ignore[arg-type]
    x = torch.randn(samples, 300, device=DEVICE).to(dtype)
    with torch.no_grad():
        expected = gate.decide(x)
        p: Any = gate.probability
        counts = decide_linear(gate, x)
        assert gate.gate is not None
        packing = Packing(gate.gate, counts if samples > 16 else None)
    torch.testing.assert_close(gate.probability, p, atol=1e-4, rtol=0)
    sure = (p - 0.6).abs() > 1e-3
    assert gate.gate is not None
    assert torch.equal(gate.gate[sure], expected[sure])
    assert (packing.position >= 0).sum() == gate.gate.sum()


@here
def test_an_unknown_activation_is_refused() -> None:
    from dg_lightning.runtime.triton_engine import run_triton

    net = feed_forward(4, 2, 16, 3, nn.Softplus(), DTYPES[0], device=DEVICE)
    with pytest.raises(ValueError, match=r"Softplus.*relu, gelu, silu, tanh"):
        run_triton(torch.randn(2, 4, dtype=DTYPES[0], device=DEVICE), torch.ones(2, 2), net)


@here
@pytest.mark.parametrize("glu", [False, True])
def test_no_samples_make_an_empty_output(glu: bool) -> None:
    from dg_lightning.runtime.triton_engine import run_triton

    dtype = DTYPES[0]
    net = feed_forward(24, 3, 16, 20, nn.ReLU(), dtype, device=DEVICE, glu=glu)
    x = torch.randn(0, 24, dtype=dtype, device=DEVICE, requires_grad=True)
    gate = torch.ones(0, 3, device=DEVICE)
    with torch.no_grad():
        assert run_triton(x, gate, net).shape == (0, 20)
    out = run_triton(x, gate, net)
    assert out.shape == (0, 20)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 24)
    assert not any(t.grad.any() for t in net.tensors if t.grad is not None)
