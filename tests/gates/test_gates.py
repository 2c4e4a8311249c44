import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dg_lightning import DynamicGate, StaticGate
from dg_lightning.gates import Gate, make_gate

NETWORKS = ["linear", "low_rank", "mlp"]


def gates(**options: Any) -> list[Gate]:
    dynamic = [DynamicGate(5, 8, network=n, rank=3, hidden=6, **options) for n in NETWORKS]  # type: ignore[arg-type]
    return [StaticGate(8, **options), *dynamic]


def randomise(module: nn.Module, seed: int = 0, std: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def hand_logits(gate: Gate, h: Tensor) -> Tensor:
    """The logits written out without the gate's own code."""
    if isinstance(gate, StaticGate):
        return gate.logit
    assert isinstance(gate, DynamicGate)
    for layer in gate.network:
        if isinstance(layer, nn.Linear):
            h = h @ layer.weight.T + (layer.bias if layer.bias is not None else 0)
        else:
            h = h.clamp(min=0)
    return h


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("index", range(4))
def test_hard_gate_follows_the_equations_of_the_paper(
    index: int, threshold: float, temperature: float
) -> None:
    gate = gates(threshold=threshold, temperature=temperature, initial_open_rate=0.9)[index]
    gate.double()
    randomise(gate)
    h = torch.randn(32, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    g = gate(h)
    p = torch.sigmoid(hand_logits(gate, h) / gate.temperature)
    assert torch.equal(g, (p > gate.threshold).double())
    assert gate.probability is not None
    torch.testing.assert_close(gate.probability, p)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "threshold", "threshold": 0.6},
        {"policy": "top_k", "k": 3},
        {"policy": "bernoulli"},
        {"policy": "threshold", "block_size": 4},
        {"policy": "threshold", "threshold": 0.85, "min_open": 5, "initial_open_rate": 0.9},
    ],
    ids=["threshold", "top_k", "bernoulli", "block", "floor"],
)
@pytest.mark.parametrize("index", range(4))
def test_task_gradient_at_the_logit_is_dJ_dg_times_p_1_minus_p_over_tau(
    index: int, options: dict[str, Any]
) -> None:
    tau = 1.7
    gate = gates(temperature=tau, **options)[index].double()
    randomise(gate)
    h = torch.randn(16, 5, dtype=torch.float64)
    # A smooth activation, so that every unit has something to say to its gate.
    raw = torch.tanh(torch.randn(16, 8, dtype=torch.float64) + 0.3)
    logits: list[Tensor] = []
    plain = gate.logits

    def watched(h: Tensor) -> Tensor:
        z = plain(h)
        z.retain_grad()
        logits.append(z)
        return z

    gate.logits = watched  # type: ignore[method-assign]
    g = gate(h)
    g.retain_grad()
    cost = torch.exp(0.1 * (g * raw).sum(-1)).mean()
    cost.backward()
    (z,) = logits
    assert g.grad is not None
    assert z.grad is not None
    upstream = g.grad.unflatten(-1, (gate.blocks, gate.block_size)).sum(-1)
    p = torch.sigmoid(z.detach() / tau)
    expected = upstream * p * (1 - p) / tau
    if z.ndim == 1 and expected.ndim == 2:  # a static logit collects from every sample
        expected = expected.sum(0)
    torch.testing.assert_close(z.grad, expected)
    assert (z.grad != 0).all()


@pytest.mark.parametrize("policy", ["threshold", "bernoulli", "soft", "concrete", "hard_concrete"])
@pytest.mark.parametrize("index", range(4))
def test_every_unit_starts_at_the_initial_open_rate_at_any_temperature(
    index: int, policy: str
) -> None:
    gate = gates(temperature=4.0, initial_open_rate=0.85, policy=policy)[index]
    gate(torch.randn(64, 5))
    assert gate.probability is not None
    torch.testing.assert_close(
        gate.probability, torch.full_like(gate.probability, 0.85), atol=1e-6, rtol=0
    )


@given(
    blocks=st.integers(1, 12),
    block_size=st.integers(1, 4),
    floor=st.integers(0, 100).map("{}%".format) | st.integers(0, 12),
    threshold=st.floats(0, 0.99),
    policy=st.sampled_from(["threshold", "top_k", "bernoulli", "hard_concrete"]),
    training=st.booleans(),
    seed=st.integers(0, 2**20),
)
@pytest.mark.filterwarnings("ignore:`initial_open_rate")
def test_the_floor_holds_for_every_sample(
    blocks: int,
    block_size: int,
    floor: int | str,
    threshold: float,
    policy: Any,
    training: bool,
    seed: int,
) -> None:
    floor = min(floor, blocks) if isinstance(floor, int) else floor
    gate = DynamicGate(
        3,
        blocks * block_size,
        block_size=block_size,
        policy=policy,
        k=1 if policy == "top_k" else None,
        threshold=threshold,
        min_open=floor,
    )
    randomise(gate, seed, std=3)
    gate.train(training)
    torch.manual_seed(seed)
    g = gate(torch.randn(7, 3))
    count = floor if isinstance(floor, int) else float(floor[:-1]) / 100 * blocks
    open_blocks = (g != 0).float().sum(-1) / block_size
    assert (open_blocks >= count - 1e-6).all()
    assert g.shape == (7, blocks * block_size)


def test_the_floor_opens_the_most_probable_and_no_more() -> None:
    gate = StaticGate(4, threshold=0.9, initial_open_rate=0.95, min_open=2)
    gate.logit.data = torch.tensor([0.1, -1.0, 0.3, 0.2])
    assert gate(torch.zeros(1, 2)).tolist() == [0.0, 0.0, 1.0, 1.0]
    gate.logit.data = torch.tensor([9.0, 9.0, 9.0, -9.0])
    assert gate(torch.zeros(1, 2)).tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(("k", "count"), [(3, 3), ("50%", 4), ("30%", 3), ("100%", 8)])
def test_top_k_opens_exactly_k(k: int | str, count: int) -> None:
    gate = DynamicGate(5, 8, policy="top_k", k=k)
    randomise(gate)
    for training in (True, False):
        gate.train(training)
        assert (gate(torch.randn(20, 5)).sum(-1) == count).all()


def test_units_of_a_block_share_one_gate() -> None:
    gate = DynamicGate(5, 12, block_size=3)
    randomise(gate)
    g = gate(torch.randn(40, 5))
    assert torch.equal(g[:, ::3], g[:, 1::3])
    assert torch.equal(g[:, ::3], g[:, 2::3])
    assert gate.gate is not None
    assert gate.gate.shape == (40, 4)
    assert 0 < g.mean() < 1


@given(st.integers(0, 2**20), st.permutations(range(9)))
def test_batch_order_does_not_matter(seed: int, order: list[int]) -> None:
    gate = DynamicGate(5, 8, network="mlp", hidden=4, policy="top_k", k=3)
    randomise(gate, seed)
    h = torch.randn(9, 5, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(gate(h)[order], gate(h[order]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", range(4))
def test_gate_maths_stays_in_float32(index: int, dtype: torch.dtype) -> None:
    gate = gates()[index]
    randomise(gate)
    h = torch.randn(16, 5).to(dtype)
    expected = gate(h.float())
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(gate(h), expected)
    assert gate.probability is not None
    assert gate.probability.dtype == torch.float32
    gate.to(dtype)
    assert {t.dtype for t in gate.state_dict().values()} == {torch.float32}
    assert torch.equal(gate(h), expected)


def test_a_half_precision_default_does_not_reach_the_gate() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        gate = DynamicGate(5, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in gate.parameters()} == {torch.float32}


def test_a_copy_after_a_forward_pass_works_and_has_no_graph() -> None:
    gate = DynamicGate(5, 8)
    gate(torch.randn(3, 5))
    assert gate.probability is not None
    assert gate.probability.requires_grad
    for other in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        assert other.probability is None
        assert torch.equal(other(torch.ones(3, 5)), gate(torch.ones(3, 5)))


def test_temperature_threshold_and_floor_travel_in_the_state_dict() -> None:
    gate = StaticGate(8, temperature=1.5, threshold=0.6, min_open=3)
    gate.temperature.fill_(0.4)
    buffer = io.BytesIO()
    torch.save(gate.state_dict(), buffer)
    buffer.seek(0)
    other = StaticGate(8)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.temperature.item() == pytest.approx(0.4)
    assert other.threshold.item() == pytest.approx(0.6)
    other.shift_bias(-20.0)
    assert other(torch.zeros(1, 2)).sum() == 3


def test_shift_bias_and_revive() -> None:
    for gate in gates(temperature=2.0, initial_open_rate=0.75):
        h = torch.randn(6, 5)
        randomise(gate)
        before = gate.logits(h).detach().clone()
        gate.shift_bias(-1.25)
        torch.testing.assert_close(gate.logits(h), before - 1.25)
        gate.revive(torch.tensor([1, 4]))
        gate(h)
        assert gate.probability is not None
        revived = gate.probability[..., [1, 4]]
        torch.testing.assert_close(revived, torch.full_like(revived, 0.75))
        others = [0, 2, 3, 5, 6, 7]
        torch.testing.assert_close(gate.logits(h)[..., others], before[..., others] - 1.25)


def test_revive_takes_units_and_opens_their_blocks() -> None:
    gate = StaticGate(8, block_size=4, initial_open_rate=0.75)
    for units in (torch.tensor([5, 6]), torch.arange(8) == 7):
        gate.logit.data.fill_(-3.0)
        gate.revive(units)
        assert gate(torch.zeros(1, 2)).tolist() == [0.0] * 4 + [1.0] * 4


def test_deferred_initialisation_ends_like_the_direct_one() -> None:
    for kind in ("static", "dynamic"):
        settings: Any = {"kind": kind, "temperature": 2.0, "threshold": 0.6, "min_open": 3}
        with torch.device("meta"):
            gate = make_gate(settings, 5, 8)
        gate.to_empty(device="cpu")
        gate.reset_parameters()
        direct = make_gate(settings, 5, 8)
        for name in ("temperature", "threshold", "min_open"):
            assert torch.equal(gate.state_dict()[name], direct.state_dict()[name])
        h = torch.randn(4, 5)
        torch.testing.assert_close(gate.logits(h), direct.logits(h))


def test_a_gate_narrowed_from_float64_works() -> None:
    gate = DynamicGate(5, 8).double().bfloat16()
    assert gate(torch.randn(3, 5, dtype=torch.bfloat16)).shape == (3, 8)


@pytest.mark.parametrize(
    ("network", "macs"), [("linear", 5 * 4), ("low_rank", 5 * 3 + 3 * 4), ("mlp", 5 * 6 + 6 * 4)]
)
def test_decision_macs_of_gate_networks_with_blocks(network: Any, macs: int) -> None:
    gate = DynamicGate(5, 8, network=network, rank=3, hidden=6, block_size=2)
    assert gate.decision_macs(torch.tensor(5)).item() == macs
    assert gate.decision_macs().item() == macs
    assert StaticGate(8).decision_macs(torch.tensor([5, 2])).item() == 0


def test_a_gate_multiplies_units_block_by_block() -> None:
    gate = DynamicGate(6, 12, block_size=4, initial_spread=2.0, scale="probability")
    h, units = torch.randn(3, 5, 6), torch.randn(3, 5, 12)
    torch.testing.assert_close(gate(h, units), gate(h) * units)


def test_tokens_may_differ_from_the_start() -> None:
    torch.manual_seed(0)
    gate = DynamicGate(256, 64, initial_spread=2.0, temperature=0.5, initial_open_rate=0.7)
    z = (gate.logits(torch.randn(4000, 256)) / gate.temperature).detach()
    assert float(z.std(0).mean()) == pytest.approx(2.0, rel=0.1)
    assert float(z.mean()) == pytest.approx(math.log(0.7 / 0.3), abs=0.1)
    weight: Any = gate.network[0].weight
    before = weight.detach().clone()
    gate.revive(torch.tensor([3]))
    after = weight.detach()
    assert after[3].eq(0).all()
    assert torch.equal(after[4:], before[4:])
    with pytest.raises(ValueError, match="`initial_spread` must be at least 0"):
        DynamicGate(4, 4, initial_spread=-1.0)
