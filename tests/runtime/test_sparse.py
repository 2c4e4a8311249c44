from typing import Any

import pytest
import torch
from torch import nn

from dg_lightning.rewiring.structures import Structure
from dg_lightning.runtime.sparse import SparseLinear, fastest_form, with_fast_connections


def sparse_linear(structure: Any, density: Any = 0.25, outputs: Any = 32, inputs: Any = 64) -> Any:
    """Make a linear map whose mask keeps to a structure of the rewiring callbacks."""
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs)
    kind = Structure(structure)
    scores = torch.rand_like(linear.weight)
    groups = kind.groups(scores)
    count = kind.count(linear.weight, density)
    chosen = torch.zeros_like(groups, dtype=torch.bool)
    chosen.scatter_(1, groups.topk(count, 1).indices, True)
    linear.weight.data *= kind.ungroup(chosen, linear.weight)
    return linear


@pytest.mark.parametrize("structure", ["unstructured", "fan_in", "block:16", "2:4"])
@pytest.mark.parametrize("form", ["dense", "csr", "bag", "block"])
@pytest.mark.parametrize("batch", [1, 7])
def test_every_form_is_the_same_map(structure: Any, form: Any, batch: Any) -> None:
    linear = sparse_linear(structure)
    x = torch.randn(batch, 64)
    with torch.no_grad():
        torch.testing.assert_close(SparseLinear(linear, form)(x), linear(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["csr", "bag", "block"])
def test_outputs_without_any_connection_and_no_bias(form: Any) -> None:
    linear = nn.Linear(32, 16, bias=False)
    linear.weight.data.zero_()
    with torch.no_grad():
        assert SparseLinear(linear, form)(torch.randn(3, 32)).eq(0).all()
        linear.weight.data[5, 7] = 2.0
        x = torch.randn(3, 32)
        found = SparseLinear(linear, form)(x)
    torch.testing.assert_close(found[:, 5], 2 * x[:, 7])
    assert found[:, :5].eq(0).all()


def test_a_full_map_is_left_dense_and_blocks_must_divide() -> None:
    assert fastest_form(nn.Linear(16, 16), [4]).keys() == {"dense"}
    with pytest.raises(ValueError, match="do not divide"):
        SparseLinear(nn.Linear(20, 16), "block")
    with pytest.raises(ValueError, match="`form` must be"):
        SparseLinear(nn.Linear(16, 16), "band")  # type: ignore[arg-type]


def test_a_net_keeps_its_values_whatever_is_faster() -> None:
    net = nn.Sequential(nn.Flatten(), sparse_linear("block:16", 0.1), nn.ReLU(), nn.Linear(32, 4))
    fast, notes = with_fast_connections(net, [4])
    x = torch.randn(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), atol=1e-5, rtol=1e-5)
    assert len(notes) == 1
    assert "slower: using dense" in notes[0] or "times as fast as dense" in notes[0]
    assert isinstance(net[1], nn.Linear)


@pytest.mark.parametrize("form", ["csr", "bag", "block"])
def test_it_can_be_saved_and_takes_inputs_of_any_shape(form: Any) -> None:
    linear = sparse_linear("block:16")
    made = SparseLinear(linear, form)
    assert set(made.state_dict()) == {"weight", "bias"}
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        torch.testing.assert_close(made(x), linear(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(made(x[0, 0]), linear(x[0, 0]), atol=1e-5, rtol=1e-5)
        double = made.double()(x.double())
    torch.testing.assert_close(double.float(), linear(x).detach(), atol=1e-5, rtol=1e-5)
