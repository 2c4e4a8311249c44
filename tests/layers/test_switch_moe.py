"""The mixture of experts against a plain loop, hand-counted MACs, and its limits."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning import SwitchMoE
from dg_lightning.compute.macs import uncounted_modules
from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.gates.protocol import gate_layers


def small(**arguments: Any) -> SwitchMoE:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"width": 6, "experts": 4, "expert_width": 5}
    return SwitchMoE(8, 3, **{**defaults, **arguments})


def by_hand(moe: SwitchMoE, x: Tensor, capacity: float) -> Tensor:
    """Sample by sample, expert by expert, in the order of the batch."""
    experts, width, hidden = moe.router.experts, 6, moe.router.block_size
    taken = [0] * experts
    outputs = []
    for sample in x:
        h = torch.relu(moe.stem(sample))
        p = torch.softmax(moe.router.linear(h), 0)
        chosen = p.argsort(descending=True)[: moe.router.k].tolist()
        total = sum(p[e] for e in chosen) if moe.router.k > 1 else 1.0
        mixed, room = torch.zeros(width), False
        for e in chosen:
            taken[e] += 1
            if taken[e] > capacity:
                continue
            room = True
            rows = slice(e * hidden, (e + 1) * hidden)
            inner = torch.relu(moe.experts.fc1.weight[rows] @ h + moe.experts.fc1.bias[rows])
            out = moe.experts.fc2.weight[:, rows] @ inner
            out = out + moe.experts.bias[e * width : (e + 1) * width]
            mixed = mixed + p[e] / total * out
        outputs.append(moe.output(torch.relu(mixed if room else h)))
    return torch.stack(outputs)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_evaluation_equals_a_plain_loop_and_drops_nobody(k: int) -> None:
    moe, x = small(top_k=k, capacity_factor=0.1).eval(), torch.randn(17, 8)
    torch.testing.assert_close(moe(x), by_hand(moe, x, capacity=17))


@pytest.mark.parametrize(("k", "factor", "capacity"), [(1, 1.0, 5), (2, 0.5, 5), (2, 1.2, 11)])
def test_training_drops_what_is_above_the_capacity(k: int, factor: float, capacity: int) -> None:
    moe, x = small(top_k=k, capacity_factor=factor), torch.randn(18, 8)
    torch.testing.assert_close(moe(x), by_hand(moe, x, capacity))
    assert moe.router.capacity == capacity
    assert moe.router.gate is not None
    assert moe.router.chosen is not None
    sent = (moe.router.gate != 0).sum(0)
    assert sent.tolist() == moe.router.chosen.sum(0).clamp(max=capacity).tolist()


def test_a_prediction_does_not_hang_on_the_batch() -> None:
    moe, x = small(top_k=2, capacity_factor=0.1).eval(), torch.randn(9, 8)
    alone = torch.cat([moe(sample[None]) for sample in x])
    torch.testing.assert_close(moe(x), alone)


def test_without_a_limit_is_as_with_a_capacity_that_is_never_reached() -> None:
    x = torch.randn(16, 8)
    assert torch.equal(small(capacity_factor=None)(x), small(capacity_factor=4.0)(x))


def test_one_expert_is_the_dense_net() -> None:
    moe, x = small(experts=1, expert_width=20, capacity_factor=None), torch.randn(7, 8)
    fc2 = nn.Linear(20, 6)
    fc2.weight, fc2.bias = moe.experts.fc2.weight, moe.experts.bias
    dense = nn.Sequential(
        moe.stem, nn.ReLU(), moe.experts.fc1, nn.ReLU(), fc2, nn.ReLU(), moe.output
    )
    torch.testing.assert_close(moe(x), dense(x))


def test_losses_by_hand() -> None:
    moe = small(top_k=1, load_balance=2.0, z_loss=3.0)
    with torch.no_grad():
        moe.router.linear.weight.zero_()
    moe(torch.randn(8, 8))
    # All logits are 0: p is 1/4 each, the first expert gets everything, logsumexp is ln 4.
    assert moe.router.load_balance_loss().item() == pytest.approx(4 * 1 * 0.25)
    loss = moe.auxiliary_loss()
    assert loss.item() == pytest.approx(2.0 * 1.0 + 3.0 * torch.tensor(4.0).log().item() ** 2)
    loss.backward()
    assert moe.router.linear.weight.grad is not None


def test_gradients_reach_the_router_and_the_experts_that_were_used() -> None:
    moe, x = small(top_k=2), torch.randn(32, 8)
    moe(x).square().sum().backward()
    assert moe.router.linear.weight.grad is not None
    assert moe.router.chosen is not None
    assert moe.router.linear.weight.grad.abs().sum() > 0
    assert moe.experts.fc1.weight.grad is not None
    used = moe.experts.fc1.weight.grad.view(4, 5, 6).abs().sum((1, 2)) > 0
    assert used.tolist() == moe.router.chosen.any(0).tolist()


def test_the_ledger_counts_the_papers_net_as_the_paper_should_have() -> None:
    moe = SwitchMoE(784, 10, width=512, experts=8, expert_width=512, top_k=2).eval()
    ledger = ComputeLedger(moe)
    moe(torch.randn(3, 784))
    ledger.update(moe, 3)
    report = ledger.report(moe)
    # Stem, router, two experts of two maps each, output.
    assert report.macs == 784 * 512 + 512 * 8 + 2 * 2 * 512 * 512 + 512 * 10 == 1_459_200
    assert report.gate_macs == 512 * 8
    assert sum(p.numel() for p in moe.parameters()) == 4_613_642
    assert uncounted_modules(moe) == {}


def test_what_was_dropped_is_not_counted() -> None:
    moe = small(top_k=1, capacity_factor=1.0)
    with torch.no_grad():
        moe.router.linear.weight.zero_()  # everybody to the first expert, which takes 2 of 8
    ledger = ComputeLedger(moe)
    moe(torch.randn(8, 8))
    ledger.update(moe, 8)
    experts = 2 * (6 * 5 + 5 * 6) / 8
    assert ledger.report(moe).macs == 8 * 6 + 6 * 4 + experts + 6 * 3


def test_a_router_is_a_gate_that_says_what_it_cannot_do() -> None:
    moe = small(top_k=1)
    router = gate_layers(moe)["router"]
    with pytest.raises(ValueError, match="router"):
        router.shift_bias(0.1)
    with pytest.raises(ValueError, match="router"):
        router.set_min_open(2)
    with pytest.raises(ValueError, match="router"):
        router.revive(torch.tensor([0]))
    logits: Tensor = moe(torch.randn(4, 8))
    logits.sum().backward()
    copy.deepcopy(moe)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 5}, "from 1 to 4 experts, got 5"),
        ({"capacity_factor": 0.0}, "above 0, got 0"),
        ({"width": 0}, "at least 1"),
    ],
)
def test_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**arguments)
