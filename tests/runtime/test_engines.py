from typing import Any

import pytest
import torch
from gated_nets import feed_forward, random_gate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dg_lightning.runtime.engines import FeedForward, _groups, masked, run_blocks, run_open_rows

ACTIVATIONS = [nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Softplus()]


def reference(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """One sample and one block at a time, by the formula."""
    (fc1, fc1_bias), (fc2, fc2_bias) = net.fc1, net.fc2
    out = torch.zeros(len(x), len(fc2), dtype=x.dtype)
    for sample in range(len(x)):
        for block in range(gate.shape[1]):
            if gate[sample, block]:
                units = slice(block * net.block_size, (block + 1) * net.block_size)
                z = fc1[units] @ x[sample]
                if fc1_bias is not None:
                    z = z + fc1_bias[units]
                made = net.activation(z)
                if net.fc1_gate is not None:
                    weight, bias = net.fc1_gate
                    v = weight[units] @ x[sample]
                    made = made * (v if bias is None else v + bias[units])
                out[sample] += fc2[:, units] @ made * gate[sample, block]
    return out if fc2_bias is None else out + fc2_bias


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 20),
    inputs=st.integers(1, 12),
    blocks=st.integers(1, 5),
    block=st.integers(1, 6),
    rate=st.sampled_from([0.0, 0.3, 1.0]),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    by_unit=st.booleans(),
    scaled=st.booleans(),
    glu=st.booleans(),
)
@pytest.mark.parametrize("engine", [masked, run_blocks, run_open_rows])
def test_every_engine_computes_the_formula(
    engine: Any,
    samples: Any,
    inputs: Any,
    blocks: Any,
    block: Any,
    rate: Any,
    activation: Any,
    bias: Any,
    by_unit: Any,
    scaled: Any,
    glu: Any,
) -> None:
    net = feed_forward(inputs, blocks, block, 3, activation, bias=bias, scaled=scaled, glu=glu)
    if by_unit:
        fc2 = net.fc2[0].detach().t().contiguous().t()
        maps = net.fc1, activation, (fc2, net.fc2[1])
        net = FeedForward(*maps, block, net.fc1_gate, scaled)
    x, gate = torch.randn(samples, inputs, dtype=torch.float64), random_gate(samples, blocks, rate)
    if scaled:
        gate = gate * torch.rand_like(gate)
    with torch.no_grad():
        expected = reference(x, gate, net)
        torch.testing.assert_close(engine(x, gate, net), expected)
        torch.testing.assert_close(engine(x, gate, net), expected)  # memory that is used again
    if engine is not run_open_rows:
        torch.testing.assert_close(engine(x, gate, net), expected)  # with gradients


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("glu", [False, True])
def test_gradients_by_blocks_are_those_of_finite_differences(
    activation: Any, rate: Any, glu: bool
) -> Any:
    net = feed_forward(4, 4, 3, 5, activation, glu=glu)
    gate = random_gate(6, 4, rate) * (torch.rand(6, 4, dtype=torch.float64) + 0.1)

    def run(x: Any, opened: Any, *tensors: Any) -> Any:
        fc1_gate = tensors[2:4] if glu else None
        own = FeedForward(tensors[:2], activation, tensors[-2:], 3, fc1_gate, scaled=True)
        scales = torch.zeros_like(gate).masked_scatter(gate != 0, opened)
        return run_blocks(x, scales, own)

    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    opened = gate[gate != 0].requires_grad_()
    assert torch.autograd.gradcheck(run, (x, opened, *net.tensors))


def test_open_gates_learn_what_they_do_masked_and_closed_ones_nothing() -> None:
    net = feed_forward(4, 4, 3, 5, nn.GELU())
    gate = random_gate(6, 4, 0.5).requires_grad_()
    x, weights = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    (expected,) = torch.autograd.grad((masked(x, gate, net) * weights).sum(), gate)
    (found,) = torch.autograd.grad((run_blocks(x, gate, net) * weights).sum(), gate)
    torch.testing.assert_close(found, expected * gate.detach())
    assert found[gate == 0].eq(0).all()
    assert expected[gate == 0].ne(0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", [run_blocks, run_open_rows])
def test_engines_work_in_every_precision(engine: Any, dtype: Any) -> None:
    net = feed_forward(16, 4, 8, 6, nn.ReLU(), dtype)
    x, gate = torch.randn(9, 16, dtype=dtype), random_gate(9, 4, 0.5, torch.float32)
    with torch.no_grad():
        expected = masked(x, gate, net)
        torch.testing.assert_close(engine(x, gate, net), expected, atol=0.03, rtol=0.03)


def test_only_open_weights_are_read_for_one_sample() -> None:
    net = feed_forward(5, 4, 2, 3, nn.ReLU())
    gate = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    x = torch.randn(1, 5, dtype=torch.float64)
    with torch.no_grad():
        expected = masked(x, gate, net)
        net.fc1[0][2:6] = torch.nan  # would show
        net.fc2[0][:, 2:6] = torch.nan
        torch.testing.assert_close(run_open_rows(x, gate, net), expected)
        torch.testing.assert_close(run_blocks(x, gate, net), expected)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(1, 40))
def test_groups_hold_every_block_once_and_as_many_samples_as_they_may(
    counts: list[int], most: int
) -> None:
    groups = _groups(counts, most)
    assert [block for start, stop in groups for block in range(start, stop)] == [
        *range(len(counts))
    ]
    sizes = [sum(counts[start:stop]) for start, stop in groups]
    for (start, stop), size in zip(groups, sizes, strict=True):
        assert size <= most or len([count for count in counts[start:stop] if count]) == 1
    assert all(a + counts[start] > most for a, (start, _) in zip(sizes, groups[1:], strict=False))


def test_no_gradient_of_what_needs_none() -> None:
    net = feed_forward(4, 2, 3, 5, nn.ReLU())
    frozen = FeedForward((net.fc1[0].detach(), None), nn.ReLU(), (net.fc2[0], net.fc2[1]), 3)
    run_blocks(
        torch.randn(6, 4, dtype=torch.float64), random_gate(6, 2, 0.5), frozen
    ).sum().backward()
    assert net.fc1[0].grad is None
    assert net.fc2[0].grad is not None
