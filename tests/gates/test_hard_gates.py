"""p and the hard g: values by hand, and gradients of every order and transform."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from dg_lightning import DynamicGate, GatedMLP, StaticGate
from dg_lightning.gates.policies import hard_gate, open_probability

SETTINGS: list[dict[str, Any]] = [
    {},
    {"floor": 3},
    {"policy": "top_k", "k": 2},
    {"policy": "top_k", "k": 2, "floor": 4},
    {"policy": "hard_concrete"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_values_and_gradients_by_hand(
    shape: tuple[int, ...], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    policy, k, floor = (settings.get(n) for n in ("policy", "k", "floor"))
    z, weights = (
        torch.randn(shape, dtype=dtype, requires_grad=True),
        torch.randn(shape, dtype=dtype),
    )
    p = open_probability(z / 0.7, policy or "threshold")
    g = hard_gate(p, torch.tensor(0.6), k, floor or 0)
    order = p.detach().sort(dim=-1, descending=True).values
    opened = p.detach() > 0.6 if k is None else p.detach() >= order[..., k - 1 : k]
    if floor:
        opened |= p.detach() >= order[..., floor - 1 : floor]
    assert torch.equal(g.detach(), opened.to(dtype))
    (first,) = torch.autograd.grad((g * weights).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    slope = (p * (1 - p)).detach() / 0.7
    torch.testing.assert_close(first.detach(), weights * slope)
    torch.testing.assert_close(second, weights * slope * (1 - 2 * p.detach()) / 0.7)


def test_a_temperature_that_is_trained_has_its_gradient() -> None:
    z, temperature = torch.randn(4, 3, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    g = hard_gate(torch.sigmoid(z / temperature), torch.tensor(0.5), None)
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
