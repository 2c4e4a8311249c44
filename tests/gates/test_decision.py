"""p and g as one node of the graph, against the plain operations that it stands for."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from dg_lightning import DynamicGate, GatedMLP, StaticGate
from dg_lightning.gates.decision import decided, node_of, pull_at
from dg_lightning.gates.policies import deployed, open_probability

SETTINGS: list[dict[str, Any]] = [
    {},
    {"floor": 3},
    {"policy": "top_k", "k": 2},
    {"policy": "top_k", "k": 2, "floor": 4},
    {"policy": "hard_concrete"},
]


def by_plain_operations(
    z: Tensor, temperature: Tensor, threshold: Tensor, policy: Any, k: Any, floor: int
) -> tuple[Tensor, Tensor]:
    p = open_probability(z / temperature, policy)
    return p, deployed(p, threshold, k, floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_values_and_gradients_are_those_of_plain_operations(
    shape: tuple[int, ...], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    arguments = {"policy": "threshold", "k": None, "floor": 0, **settings}
    temperature, threshold = torch.tensor(0.7), torch.tensor(0.6)
    seen = []
    for function in (decided, by_plain_operations):
        torch.manual_seed(0)
        z = torch.randn(shape, dtype=dtype, requires_grad=True)
        p, g = function(z, temperature, threshold, **arguments)
        loss = (g * torch.randn(shape, dtype=dtype)).sum().square() + p.square().sum()
        (first,) = torch.autograd.grad(loss, z, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), z)
        seen.append((p.detach(), g.detach(), first.detach(), second))
    for one, plain in zip(*seen, strict=True):
        torch.testing.assert_close(one, plain)
    assert node_of(p) is None  # of plain operations


def test_a_pull_is_added_once_and_also_where_no_gradient_comes() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.sum()

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
            return None

    z = torch.randn(4, 3, requires_grad=True)
    temperature, threshold = torch.tensor(0.5), torch.tensor(0.5)
    p, g = decided(z, temperature, threshold, "threshold", None)
    by_hand = (p * (1 - p) / temperature).detach()
    node = node_of(p)
    assert node is node_of(g)
    pull_at(node, torch.tensor(2.0), 0.5)
    pull_at(node, torch.tensor([1.0, 2.0, 3.0]), 1.0)
    for pulled in (torch.tensor([2.0, 3.0, 4.0]), torch.zeros(3)):
        z.grad = None
        g.sum().backward(retain_graph=True)
        torch.testing.assert_close(z.grad, (1 + pulled) * by_hand)
    pull_at(node, torch.tensor(1.0), 1.0)
    z.grad = None
    Nothing.apply(g).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(z.grad, by_hand)


def test_a_temperature_that_is_trained_has_its_gradient() -> None:
    z, temperature = torch.randn(4, 3, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    _, g = decided(z, temperature, torch.tensor(0.5), "threshold", None)
    g.sum().backward()
    p = torch.sigmoid(z.detach() / 0.5)
    torch.testing.assert_close(temperature.grad, -(p * (1 - p) * z.detach() / 0.25).sum())


def test_what_is_not_a_number_is_seen_in_training() -> None:
    for floor in (0, 2):
        gate = StaticGate(4, min_open=floor)
        gate.logit.data[1] = torch.nan
        assert gate(torch.zeros(2, 3)).isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_transforms_of_functions_see_plain_operations(kind: Any) -> None:
    torch.manual_seed(0)
    net = GatedMLP(6, [16, 8], 3, gate={"kind": kind})
    x = torch.randn(1, 6, requires_grad=True)
    rows = [torch.autograd.grad(net(x)[0, row], x)[0] for row in range(3)]
    jacobian = torch.func.jacrev(net)(x.detach())
    torch.testing.assert_close(jacobian[0, :, 0], torch.cat(rows))
    batches = torch.randn(5, 2, 6)
    expected = torch.stack([net(batch) for batch in batches])
    torch.testing.assert_close(torch.vmap(net)(batches), expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = forward_ad.unpack_dual(net(dual)).tangent
    torch.testing.assert_close(tangent, jacobian[0, :, 0].sum(-1, keepdim=True).T)


def test_a_property_of_a_subclass_is_set() -> None:
    class Counts(DynamicGate):
        seen = 0

        @property
        def probability(self) -> Tensor | None:
            return None

        @probability.setter
        def probability(self, value: Tensor | None) -> None:
            self.seen += 1

    gate = Counts(3, 2)
    seen = gate.seen
    gate(torch.randn(4, 3))
    assert gate.seen == seen + 1
