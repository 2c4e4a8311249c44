import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

from dg_lightning import gate_layers
from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.layers import GPT
from dg_lightning.surgery import convert, find_units
from dg_lightning.surgery.conversion import (
    _carried,
    _feed_forwards,
    _largest_share_mask,
    _with_teacher,
    cluster,
    cluster_units,
    reorder_units,
)
from dg_lightning.surgery.gating import build_gates

GATE: Any = {"kind": "dynamic", "block_size": 8, "scale": "probability"}


def test_units_that_are_active_together_become_neighbours() -> None:
    torch.manual_seed(0)
    group = torch.arange(48) % 6  # neighbours belong to different groups
    active = (torch.rand(500, 6) < 0.3).float()
    activity = active[:, group] * (0.5 + torch.rand(500, 48))
    order = cluster_units(activity, 8)
    assert sorted(order.tolist()) == list(range(48))
    blocks = group[order].view(6, 8)
    assert all(len(set(block.tolist())) == 1 for block in blocks)


def test_blocks_have_one_size_even_if_all_units_are_alike() -> None:
    order = cluster_units(torch.ones(10, 12), 3)
    assert sorted(order.tolist()) == list(range(12))


class FusedSwiGLU(nn.Module):
    """Both halves of its units come from one map, as in some models of others."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(6, 16)
        self.down = nn.Linear(8, 6)

    def forward(self, h: Tensor) -> Tensor:
        a, b = self.both(h).chunk(2, -1)
        out: Tensor = h + self.down(F.silu(a) * b)
        return out


@pytest.mark.parametrize(
    "make", [lambda: GPT([5], 9, width=8, depth=1, heads=2), FusedSwiGLU], ids=["plain", "fused"]
)
def test_in_another_order_the_model_computes_the_same(make: Any) -> None:
    torch.manual_seed(0)
    model = make().double()
    x = torch.randint(9, (2, 5)) if isinstance(model, GPT) else torch.randn(3, 6).double()
    expected = model(x)
    for units in find_units(model, x).units.values():
        if units.kind == "feed_forward":
            before = copy.deepcopy(model.get_submodule(units.consumer).weight)
            order = torch.randperm(units.size)
            reorder_units(model, units, order)
            after: Any = model.get_submodule(units.consumer).weight
            assert torch.equal(after, before[:, order])
    torch.testing.assert_close(model(x), expected)


def test_a_block_carries_the_length_of_what_it_adds() -> None:
    torch.manual_seed(0)
    weight, units = torch.randn(5, 12), torch.randn(7, 12)
    squares = torch.einsum("obi,obj->bij", weight.view(5, 3, 4), weight.view(5, 3, 4))
    added = torch.stack(
        [units[:, 4 * b : 4 * b + 4] @ weight[:, 4 * b : 4 * b + 4].T for b in range(3)], 1
    )
    lengths = added.norm(dim=-1)
    expected = lengths / lengths.sum(-1, keepdim=True)
    torch.testing.assert_close(_carried(units, squares), expected)
    assert int(_largest_share_mask(expected, 1 / 3).sum()) == 7


def copying(batch: int = 16) -> list[Tensor]:
    """Sequences in which a byte says how the next ones go on."""
    torch.manual_seed(0)
    start, step = torch.randint(32, (8, batch, 1)), torch.randint(1, 5, (8, batch, 1))
    return list((start + step * torch.arange(13)) % 32)


@pytest.fixture(scope="module")
def trained() -> GPT:
    torch.manual_seed(0)
    net = GPT([12], 32, width=32, depth=2, heads=2, hidden=64)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(20):
        for x in copying():
            optimizer.zero_grad()
            next_token(net)(x).backward()
            optimizer.step()
    return net


def next_token(net: nn.Module) -> Any:
    return lambda x: F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def test_a_trained_model_keeps_what_it_can_at_half_of_its_macs(trained: GPT) -> None:
    net = copy.deepcopy(trained)
    fresh = GPT([12], 32, width=32, depth=2, heads=2)
    untrained = float(next_token(fresh)(copying()[0]).detach())
    steps: Any = {"teach_steps": 60, "tune_steps": 80, "learning_rate": 1e-3, "progress": False}
    example = copying()[0][:, :-1]
    torch.manual_seed(0)
    done = convert(net, copying(), gate=GATE, loss=next_token(net), example=example, **steps)
    dense = [float(next_token(trained)(x).detach()) for x in copying()]
    assert done.loss_before == pytest.approx(sum(dense) / len(dense), rel=1e-3)
    assert done.loss_before < 0.7 * untrained
    assert done.loss_after < done.loss_before + 0.05
    # The ledger agrees with what is said to be used.
    ledger = ComputeLedger(net)
    for x in copying():
        net(x[:, :-1])
        ledger.update(net, samples=x[:, :-1].numel())
    report = ledger.report(net)
    maps = [layer for layer in report.layers if "feed_forward" in layer.name]
    used = sum(m.macs + m.gate_macs for m in maps) / sum(m.macs_dense for m in maps)
    assert done.used == pytest.approx(used, abs=1e-6)
    assert used == pytest.approx(0.5, abs=0.005)
    assert "50.0%" in str(done)
    gates: Any = gate_layers(net).values()
    assert all(0 < float(gate.gate.mean()) < 1 for gate in gates)


def test_the_dense_model_is_a_target(trained: GPT) -> None:
    net, x = copy.deepcopy(trained), copying()[0]
    tuned = _with_teacher(net, next_token(net), 3.0)
    torch.testing.assert_close(tuned(x), next_token(trained)(x))  # nothing to add yet
    with torch.no_grad():
        net.output.weight.mul_(1.5)
    kinds = [Categorical(logits=model(x[:, :-1])) for model in (trained, net)]
    expected = next_token(net)(x) + 3.0 * kl_divergence(*kinds).mean()
    torch.testing.assert_close(tuned(x), expected)
    gradient = torch.autograd.grad(tuned(x), net.output.weight)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, net.output.weight))


def test_bad_input_gets_one_line(trained: GPT) -> None:
    net = copy.deepcopy(trained)
    given: Any = {"gate": GATE, "loss": next_token(net), "example": copying()[0][:, :-1]}
    for options, message in (
        ({"budget": 1.5}, "`budget` must be above 0 and below 1"),
        ({"budget": 0.01}, "`budget` .* 0.01"),
        ({"gate": {"kind": "static"}}, "`gate` must be dynamic"),
        ({"tune_steps": 0}, "must be at least 1"),
        ({"distill": -1.0}, "`distill` .* -1.0"),
        ({"distill": float("nan")}, "`distill` .* nan"),
        (
            {"distill": 1.0, "loss": lambda x: trained(x[:, :-1]).mean()},
            "`distill` needs a `loss` that calls",
        ),
        ({"only": ["none"]}, "'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(net, copying(), **{**given, **options})
    with pytest.raises(TypeError, match="for a batch: pass `loss`"):
        convert(net, copying(), **{**given, "loss": None})
    with pytest.raises(ValueError, match="`batches`"):
        convert(net, iter(copying()), **given)
    with pytest.raises(ValueError, match="`batches`"):
        convert(net, [], **given)
    with pytest.raises(ValueError, match="no feed-forward layer to convert"):
        convert(nn.Linear(2, 2), copying(), **{**given, "example": torch.zeros(1, 2)})
    assert not gate_layers(net, required=False)
    assert torch.equal(net.output.weight, trained.output.weight)


STEPS: Any = {"teach_steps": 20, "tune_steps": 20, "progress": False}


def test_it_works_in_mixed_precision_and_holds_its_own_gates_only(trained: GPT) -> None:
    net = copy.deepcopy(trained)
    given: Any = {"gate": GATE, "loss": next_token(net), "example": copying()[0][:, :-1], **STEPS}
    with torch.autocast("cpu", torch.bfloat16):
        convert(net, copying(), budget=0.8, layers=["blocks.0.*"], **given)
        done = convert(net.train(), copying(), budget=0.4, layers=["blocks.1.*"], **given)
    assert net.training
    opened = [float(gate.gate.float().mean()) for gate in gate_layers(net).values()]  # type: ignore[union-attr]
    assert done.used == pytest.approx(0.4, abs=0.01)
    assert opened[1] == pytest.approx(0.4, abs=0.1)
    assert opened[0] > 0.6  # as before


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_in_mixed_precision_it_learns_from_the_weights_of_now(trained: GPT, device: str) -> None:
    # Within one autocast context, torch keeps the weights that it has cast.
    net = copy.deepcopy(trained).to(device)
    given: Any = {"loss": next_token(net), "example": copying()[0][:, :-1], "progress": False}
    with torch.autocast(device, torch.bfloat16):
        done = convert(net, copying(), gate=GATE, teach_steps=5, tune_steps=30, **given)
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        losses = [float(next_token(net.eval())(x.to(device))) for x in copying()]
    assert done.loss_after == pytest.approx(sum(losses) / len(losses), rel=1e-3)


@pytest.mark.parametrize("halves", [False, True])
def test_a_loss_that_casts_to_half_precision_may_round(trained: GPT, halves: bool) -> None:
    net = copy.deepcopy(trained)
    batch = copying()[0]
    found = _feed_forwards(net, batch[:, :-1], None)
    gates = build_gates(net, found, {"feed_forward": GATE})
    exact, rounding = next_token(net), iter([0.0, 1e-3])

    def loss(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=halves):
            value: Tensor = exact(batch) + next(rounding)
            return value

    if halves:
        cluster(net, found, gates, loss, batch)
    else:
        with pytest.raises(ValueError, match="GPT"):
            cluster(net, found, gates, loss, batch)


class OwnWeights(GPT):
    """A model with a weight of its own for each unit, which nobody can see."""

    def __init__(self) -> None:
        super().__init__([12], 32, width=32, depth=1, heads=2, hidden=64)
        gains = nn.Parameter(torch.linspace(-2, 2, 64))
        self.gains = gains
        layer: Any = self.blocks[0].feed_forward
        layer.activation.register_forward_hook(lambda _, __, units: units * gains)
        layer.fc2.weight.data.mul_(20)


def test_units_that_cannot_change_places_stay_where_they_are() -> None:
    torch.manual_seed(0)
    net = OwnWeights()
    x = copying()[0]
    expected = net(x[:, :-1])
    with pytest.raises(ValueError, match="OwnWeights"):
        convert(net, copying(), gate=GATE, loss=next_token(net), example=x[:, :-1], **STEPS)
    torch.testing.assert_close(net(x[:, :-1]), expected)
