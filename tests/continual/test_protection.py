from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dg_lightning import GatedMLP, add_gates, gate_layers
from dg_lightning.continual import Protection
from dg_lightning.gates.protocol import protected_mask

OPTIMIZERS: list[Any] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
    lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    lambda p: torch.optim.Adagrad(p, lr=0.05),
]


def open_units(net: nn.Module, tasks: list[list[int]]) -> list[dict[Any, Tensor]]:
    """Return which units each task opens, the same in every layer."""
    opened = []
    for units in tasks:
        masks = {}
        for gate in gate_layers(net).values():
            mask = torch.zeros(gate.units // gate.block_size, dtype=torch.bool)
            mask[units] = True
            masks[gate] = mask
        opened.append(masks)
    return opened


def use(opened: dict[Any, Tensor]) -> None:
    for gate, mask in opened.items():
        gate.logit.data.copy_(mask * 40.0 - 20.0)


def train(net: nn.Module, protection: Protection, optimizer: Any, steps: int = 5) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(torch.randn(16, 6)), torch.randint(0, 4, (16,))).backward()
        protection.before_step(optimizer)
        optimizer.step()


def mlp() -> Any:
    return GatedMLP(6, [8, 8], 4, gate={"kind": "static"})


def somebodys() -> Any:
    net = nn.Sequential(
        nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 4)
    )
    add_gates(net, feed_forward={"kind": "static"}, example=torch.randn(2, 6))
    return net


@pytest.mark.parametrize("make", [mlp, somebodys])
@pytest.mark.parametrize("optimize", OPTIMIZERS)
def test_what_a_finished_task_computes_never_changes_by_a_bit(make: Any, optimize: Any) -> None:
    torch.manual_seed(0)
    net, x = make(), torch.randn(32, 6)
    tasks = open_units(net, [[0, 1, 2], [2, 3], [4, 5, 6, 7]])
    protection, optimizer = Protection(net), optimize(net.parameters())
    answers = []
    for number, opened in enumerate(tasks):
        use(opened)
        before = [p.detach().clone() for p in net.parameters()]
        train(net, protection, optimizer)
        assert any(not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
        use(opened)  # the optimizer has moved logits, too
        answers.append(net.eval()(x).detach())
        net.train()
        protection.add(opened.__getitem__)
        protection.reset_state(optimizer)
        for earlier in range(number + 1):
            use(tasks[earlier])
            assert torch.equal(net.eval()(x), answers[earlier])
            net.train()


def test_a_connection_is_used_if_a_task_opens_both_of_its_ends() -> None:
    net: Any = GatedMLP(6, [3, 3], 4, gate={"kind": "static"})
    protection = Protection(net)
    for opened in open_units(net, [[0], [2]]):
        protection.add(opened.__getitem__)
    first, second = (layer.linear for layer in net.layers())
    assert protection.used[first.weight].all(1).tolist() == [True, False, True]
    expected = torch.diag(torch.tensor([True, False, True]))  # 0 -> 0 and 2 -> 2, not 0 -> 2
    assert torch.equal(protection.used[second.weight], expected)
    announced = protected_mask(second)
    assert announced is not None
    assert torch.equal(announced, expected)
    assert protection.used[second.bias].tolist() == [True, False, True]
    assert protection.used[net.output.weight].any(0).tolist() == [True, False, True]
    assert protection.used[net.output.bias].all()
    protection.end()
    assert protected_mask(second) is None


def test_outputs_of_other_classes_stay_free() -> None:
    net: Any = GatedMLP(6, [3], 4, gate={"kind": "static"})
    protection = Protection(net, head=net.output)
    (opened,) = open_units(net, [[1]])
    protection.add(opened.__getitem__, classes=[2, 3])
    assert protection.used[net.output.bias].tolist() == [False, False, True, True]
    assert protection.used[net.output.weight].nonzero().tolist() == [[2, 1], [3, 1]]


def test_a_norm_over_all_units_makes_a_task_use_all_rows_before_it() -> None:
    net: Any = GatedMLP(6, [3], 4, gate={"kind": "static"}, norm="layer")
    protection = Protection(net)
    (opened,) = open_units(net, [[1]])
    protection.add(opened.__getitem__)
    assert protection.used[net.layers()[0].linear.weight].all()
    assert protection.used[net.output.weight].any(0).tolist() == [False, True, False]


def test_shares_and_states() -> None:
    net = mlp()
    protection = Protection(net)
    optimizer = torch.optim.Adam(net.parameters())
    assert protection.share() == 0
    train(net, protection, optimizer)
    (opened,) = open_units(net, [[0]])
    protection.add(opened.__getitem__)
    protection.reset_state(optimizer)
    weight = net.layers()[0].linear.weight
    moment = optimizer.state[weight]["exp_avg"]
    assert not moment[0].any()
    assert moment[1].any()
    weights = [p for n, p in net.named_parameters() if "gate" not in n]
    used = 6 + 1 + 1 + 1 + 4 + 4  # a row, a bias, a connection, a bias, a column, all biases
    assert protection.share() == pytest.approx(used / sum(p.numel() for p in weights))


def test_weights_that_are_made_of_others_are_protected_as_a_whole() -> None:
    net: Any = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
        GatedMLP(5, [4], 4, gate={"kind": "static"}),
    )
    protection = Protection(net)
    (opened,) = open_units(net, [[0]])
    protection.add(opened.__getitem__)
    made = [used for p, used in protection.used.items() if p in set(net[0].parameters())]
    assert all(used.all() for used in made)
    assert not protection.used[net[1].layers()[0].linear.weight].all()


def test_a_weight_that_an_embedding_shares_is_used_as_a_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = GatedMLP(5, [4], 3, gate={"kind": "static"})
            self.embedding = nn.Embedding(4, 5)
            self.embedding.weight = self.net.layers()[0].linear.weight

    net = Tied()
    protection = Protection(net)
    (opened,) = open_units(net, [[0]])
    protection.add(opened.__getitem__)
    assert protection.used[net.embedding.weight].all()  # type: ignore[index]


def test_what_is_protected_keeps_the_values_of_the_task_that_used_it_first() -> None:
    net = mlp()
    protection, optimizer = Protection(net), torch.optim.SGD(net.parameters(), lr=0.1)
    first, second = open_units(net, [[0], [0, 1]])
    protection.add(first.__getitem__)
    weight = net.layers()[0].linear.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight += 1  # by somebody who does not know of tasks
    protection.add(second.__getitem__)
    protection.restore(optimizer)
    assert torch.equal(weight[0], before[0])
    assert torch.equal(weight[1], before[1] + 1)
