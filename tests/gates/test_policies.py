import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev

from dg_lightning import GatedMLP
from dg_lightning.gates import DynamicGate, StaticGate, straight_through, top_k_mask
from dg_lightning.gates.policies import hard_gate, logit_for, open_probability, sample_gate


def test_straight_through_is_hard_forward_and_soft_backward() -> None:
    z = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    p = torch.sigmoid(z / 0.7)
    hard = (p > 0.4).double()
    g = straight_through(hard, p)
    assert torch.equal(g, hard)
    weight = torch.arange(1.0, 8.0, dtype=torch.float64)
    (grad,) = torch.autograd.grad((weight * g).sum(), z)
    torch.testing.assert_close(grad, weight * p * (1 - p) / 0.7)


def test_top_k_mask_marks_exactly_k_and_breaks_ties_by_position() -> None:
    scores = torch.tensor([[0.2, 0.9, 0.2, 0.2], [0.5, 0.5, 0.5, 0.5]])
    assert top_k_mask(scores, 2).tolist() == [
        [True, True, False, False],
        [True, True, False, False],
    ]


@pytest.mark.parametrize("shape", [(500, 7), (3, 50), (40,), (2, 9, 5)])  # tall, wide, flat, deep
def test_ties_go_to_the_first_in_every_shape(shape: tuple[int, ...]) -> None:
    scores = torch.randint(3, shape, generator=torch.Generator().manual_seed(0)).float()
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :4]
    expected = torch.zeros(shape).scatter(-1, order, 1.0).bool()
    assert torch.equal(top_k_mask(scores, 4), expected)


@pytest.mark.parametrize("settings", [{"policy": "top_k", "k": 2}, {"min_open": 2}], ids=str)
def test_programs_take_any_batch_size(settings: Any) -> None:
    gate = DynamicGate(6, 8, initial_spread=1.0, **settings).eval()
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(gate, (torch.randn(20, 6),), dynamic_shapes=(batch,)).module()
    for size in (3, 50):
        x = torch.randn(size, 6)
        assert torch.equal(program(x), gate(x))


def test_hard_concrete_probability_is_the_chance_of_a_nonzero_sample() -> None:
    torch.manual_seed(0)
    z = torch.tensor([-3.0, -1.0, 0.0, 2.0])
    p = open_probability(z, "hard_concrete")
    # P(z != 0) = sigmoid(log alpha - beta * log(-gamma / zeta)), Louizos et al., equation 12
    torch.testing.assert_close(p, torch.sigmoid(z - 2 / 3 * math.log(0.1 / 1.1)))
    draws = sample_gate(z.expand(200_000, 4), p.expand(200_000, 4), "hard_concrete")
    assert draws.min() == 0
    assert draws.max() == 1
    torch.testing.assert_close((draws != 0).float().mean(0), p, atol=5e-3, rtol=0)


def test_concrete_sample_is_above_one_half_with_chance_p_and_passes_gradient() -> None:
    torch.manual_seed(0)
    z = torch.tensor([-1.0, 0.5]).expand(200_000, 2).clone().requires_grad_()
    p = open_probability(z, "concrete")
    draws = sample_gate(z, p, "concrete")
    torch.testing.assert_close((draws > 0.5).float().mean(0), p[0], atol=5e-3, rtol=0)
    assert ((draws > 0) & (draws <= 1)).all()
    (grad,) = torch.autograd.grad(draws.sum(), z)
    torch.testing.assert_close(grad, draws * (1 - draws) / (2 / 3))


@pytest.mark.parametrize("policy", ["threshold", "hard_concrete"])
def test_logit_for_inverts_open_probability(policy: str) -> None:
    z = torch.tensor(logit_for(0.83, policy))  # type: ignore[arg-type]
    assert open_probability(z, policy).item() == pytest.approx(0.83)  # type: ignore[arg-type]


def test_bernoulli_draws_anew_for_every_sample_and_is_a_threshold_at_evaluation() -> None:
    torch.manual_seed(0)
    gate = StaticGate(3, policy="bernoulli", initial_open_rate=0.7)
    g = gate(torch.zeros(50_000, 8))
    assert g.shape == (50_000, 3)
    assert set(g.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(g.mean(0), torch.full((3,), 0.7), atol=1e-2, rtol=0)
    gate.eval()
    assert gate(torch.zeros(2, 8)).tolist() == [1.0, 1.0, 1.0]
    gate.threshold.fill_(0.71)
    assert gate(torch.zeros(2, 8)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("policy", ["soft", "concrete", "hard_concrete"])
def test_relaxed_policies_are_hard_at_evaluation(policy: str) -> None:
    torch.manual_seed(0)
    gate = StaticGate(64, policy=policy)  # type: ignore[arg-type]
    torch.nn.init.normal_(gate.logit, std=3)
    gate.eval()
    g = gate(torch.zeros(5, 8))
    assert gate.probability is not None
    assert torch.equal(g, (gate.probability > 0.5).float())


def test_soft_policy_is_p_in_training() -> None:
    gate = StaticGate(4, policy="soft", initial_open_rate=0.6)
    torch.testing.assert_close(gate(torch.zeros(1, 2)), torch.full((4,), 0.6))


@pytest.mark.parametrize("shape", [(9,), (40, 9), (5, 8, 9)])
@pytest.mark.parametrize("floor", [0, 1, 4, 9])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of vmap
def test_a_floor_opens_the_largest(shape: tuple[int, ...], floor: int) -> None:
    p = (torch.rand(shape, generator=torch.Generator().manual_seed(floor)) * 8).round() / 8
    for threshold in (0.2, 0.7, 1.0):  # almost all rows have enough, some, none
        is_open = p > threshold
        expected = is_open | top_k_mask(p, floor)
        limit = torch.tensor(threshold)
        assert torch.equal(hard_gate(p, limit, None, floor), expected.float())
        per_sample = torch.func.vmap(lambda row, t=limit: hard_gate(row, t, None, floor))
        if len(shape) > 1:
            assert torch.equal(per_sample(p), expected.float())


def test_a_floor_is_compiled_in_one_piece() -> None:
    gate = DynamicGate(6, 8, min_open=3, threshold=0.9)
    torch.nn.init.normal_(gate._maps[0].weight)
    compiled = torch.compile(gate, fullgraph=True, backend="eager")
    h = torch.randn(20, 6)
    expected = gate(h)
    assert (expected.sum(-1) >= 3).all()
    torch.testing.assert_close(compiled(h), expected)


@pytest.mark.parametrize("policy", ["threshold", "top_k"])
@pytest.mark.parametrize("trains", [False, True])
def test_forward_and_reverse_mode_have_the_same_jacobian(policy: str, trains: bool) -> None:
    gate: Any = {"kind": "dynamic", "policy": policy} | ({"k": 3} if policy == "top_k" else {})
    net = GatedMLP(6, [8, 8], 3, gate=gate).double().requires_grad_(trains)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(6, dtype=torch.double)

    def outputs(x: Tensor) -> Tensor:
        out: Tensor = net(x.unsqueeze(0))[0]
        return out

    forward, reverse = (jacobian(outputs)(x) for jacobian in (jacfwd, jacrev))
    assert reverse.abs().max() > 0
    torch.testing.assert_close(forward, reverse)


def test_a_derivative_at_an_outer_level_goes_through_hard_gates() -> None:
    net = GatedMLP(6, [8], 3, gate={"kind": "dynamic"}).double().requires_grad_(False)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(6, dtype=torch.double)

    def loss(x: Tensor) -> Tensor:
        out: Tensor = net(x.unsqueeze(0)).pow(2).sum()
        return out

    def nested(x: Tensor) -> Tensor:
        out: Tensor = grad(lambda y: loss(x) * y)(torch.tensor(2.0, dtype=torch.double))
        return out

    torch.testing.assert_close(grad(nested)(x), grad(loss)(x))
