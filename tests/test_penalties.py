import pytest
import torch
from torch import nn

from dg_lightning import GatedMLP, gate_layers
from dg_lightning.compute import linear_maps
from dg_lightning.penalties import expected_macs_usage, linear_usage, mean_probabilities


def usage_terms(net: nn.Module) -> tuple[float, float]:
    gates = gate_layers(net)
    means = mean_probabilities(gates)
    macs = expected_macs_usage(means, list(gates.values()), linear_maps(net))
    return linear_usage(means).item(), macs.item()


def test_linear_usage_is_the_sum_over_layers_of_the_mean_probability() -> None:
    net = GatedMLP(6, [4, 2], 3, gate={"kind": "static"})
    net(torch.randn(5, 6))
    first, second = gate_layers(net).values()
    first.logit.data = torch.tensor([0.0, 1.0, -1.0, 2.0])  # type: ignore[attr-defined]
    second.logit.data = torch.tensor([0.5, -0.5])  # type: ignore[attr-defined]
    net(torch.randn(5, 6))
    by_hand = (0.5 + 0.7310586 + 0.2689414 + 0.8807971) / 4 + (0.6224593 + 0.3775407) / 2
    assert usage_terms(net)[0] == pytest.approx(by_hand)


def test_expected_macs_by_hand() -> None:
    net = GatedMLP(6, [4, 2], 3, gate={"kind": "static"}, input_gate={"kind": "static"})
    for gate, p in zip(gate_layers(net).values(), [0.9, 0.5, 0.25], strict=True):
        gate.logit.data.fill_(torch.logit(torch.tensor(p)).item())  # type: ignore[attr-defined]
    net(torch.randn(5, 6))
    by_hand = (24 * 0.9 * 0.5 + 8 * 0.5 * 0.25 + 6 * 0.25) / 38
    assert usage_terms(net)[1] == pytest.approx(by_hand)


def test_expected_macs_gives_no_credit_for_rows_behind_a_layer_norm() -> None:
    net = GatedMLP(6, [4], 3, gate={"kind": "static", "initial_open_rate": 0.6}, norm="layer")
    net(torch.randn(5, 6))
    assert usage_terms(net)[1] == pytest.approx((24 + 12 * 0.6) / 36)


def test_gradients_agree_with_finite_differences() -> None:
    net = GatedMLP(6, [4, 2], 3, gate={"kind": "dynamic"}, input_gate={"kind": "static"})
    gates = list(gate_layers(net).values())
    maps = linear_maps(net)
    means = torch.tensor([0.9, 0.4, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: expected_macs_usage(m, gates, maps), (means,))
    assert torch.autograd.gradcheck(linear_usage, (means,))


def test_a_gate_that_was_not_run_is_named() -> None:
    net = GatedMLP(6, [4], 3, gate={"kind": "static"})
    with pytest.raises(RuntimeError, match=r"'hidden.0.gate' has no probability"):
        mean_probabilities(gate_layers(net))
