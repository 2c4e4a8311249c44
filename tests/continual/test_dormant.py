from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning.continual.dormant import WatchedUnits
from dg_lightning.gates.protocol import set_protected


def net_of(*sizes: int) -> Any:
    torch.manual_seed(0)
    first, middle, last = sizes
    return nn.Sequential(nn.Linear(first, middle), nn.ReLU(), nn.Linear(middle, last))


def watched(net: Any, decay: float = 0.9) -> WatchedUnits:
    return WatchedUnits(net[2], {net[0]: torch.arange(net[0].out_features)}, decay)


def marked(size: int, *units: int) -> Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, torch.tensor(units), True)


def test_figures_are_means_over_passes_from_the_first_on() -> None:
    net = net_of(4, 3, 2)
    units = watched(net)
    handle = units.watch()
    x = torch.randn(64, 4)
    for _ in range(3):
        net(x)
    net.eval()(torch.full((1, 4), 1e6))  # evaluation does not count
    size, mean, age = units.figures()
    hidden = net[:2](x)
    torch.testing.assert_close(size, hidden.abs().mean(0))
    torch.testing.assert_close(mean, hidden.mean(0))
    assert age.tolist() == [3, 3, 3]
    torch.testing.assert_close(units.utility(units.figures()), size * net[2].weight.abs().sum(0))
    handle.remove()
    net.train()(x)
    assert units.figures()[2].tolist() == [3, 3, 3]


def test_a_unit_that_never_acts_starts_anew_and_nothing_else_changes() -> None:
    net = net_of(4, 5, 2)
    with torch.no_grad():
        net[0].bias[3] = -100
    units, x = watched(net), torch.randn(64, 4)
    units.watch()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        net(x).square().sum().backward()
        optimizer.step()
    before, old = net(x).detach(), {n: p.detach().clone() for n, p in net.named_parameters()}
    figures = units.figures()
    dormant = units.is_dormant(figures, 0.01)
    assert dormant.tolist() == [False, False, False, True, False]
    units.revive(dormant, figures, [optimizer])
    assert torch.equal(net(x), before)  # a silent unit, and its heir without outgoing weights
    for name, p in list(net.named_parameters())[:3]:
        changed = p.detach() != old[name]
        others = changed[:, [0, 1, 2, 4]] if name == "2.weight" else changed[[0, 1, 2, 4]]
        assert not others.any()
    assert net[0].bias[3] > -1  # as a fresh layer has it
    assert not net[2].weight[:, 3].any()
    moment = optimizer.state[net[0].weight]["exp_avg"]
    assert not moment[3].any()
    assert moment[0].any()
    assert not optimizer.state[net[2].weight]["exp_avg_sq"][:, 3].any()
    assert units.figures()[2].tolist()[3] == 1  # the pass after it


def test_what_a_unit_has_added_on_average_stays_in_a_bias() -> None:
    net = net_of(4, 3, 2)
    with torch.no_grad():
        net[0].weight[1].zero_()
        net[0].bias[1] = 2.0  # a constant unit, which a bias replaces exactly
    units, x = watched(net), torch.randn(8, 4)
    units.watch()
    before = net(x).detach()
    units.revive(marked(3, 1), units.figures(), [])
    torch.testing.assert_close(net(x), before)


def test_fresh_weights_are_drawn_as_a_new_layer_draws_them() -> None:
    net = net_of(100, 200, 2)
    units = watched(net)
    units.revive(torch.ones(200, dtype=torch.bool), units.figures(), [])
    bound = 1 / 100**0.5
    assert net[0].weight.abs().max() <= bound
    assert net[0].weight.detach().std() == pytest.approx(bound / 3**0.5, rel=0.02)


def test_channels_of_convolutions_are_units_too() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    units = WatchedUnits(net[2], {net[0]: torch.arange(3)}, 0.5)
    units.watch()
    x = torch.randn(4, 1, 8, 8)
    net(x)
    torch.testing.assert_close(units.figures()[0], net[:2](x).mean((0, 2, 3)))
    units.revive(marked(3, 2), units.figures(), [])
    assert not net[2].weight[:, 2].any()


def test_both_makers_of_a_gated_unit_start_anew() -> None:
    class Swish(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 2)

    net = Swish()
    old = [net.a.weight.detach().clone(), net.b.weight.detach().clone()]
    order = torch.tensor([2, 0, 1])  # its second map makes units in another order
    units = WatchedUnits(net.c, {net.a: torch.arange(3), net.b: order})
    units.revive(marked(3, 0), units.figures(), [])
    assert (net.a.weight != old[0]).any(1).tolist() == [True, False, False]
    assert (net.b.weight != old[1]).any(1).tolist() == [False, True, False]


def test_units_of_finished_tasks_are_not_free() -> None:
    net = net_of(4, 3, 2)
    protected = torch.zeros(3, 4, dtype=torch.bool)
    protected[1, 2] = True
    set_protected(net[0], protected)
    assert watched(net).is_free().tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_figures_are_right_whatever_the_precision_of_the_weights(dtype: torch.dtype) -> None:
    net = net_of(4, 5, 2).to(dtype)
    units, x = watched(net, decay=0.99), torch.randn(64, 4).to(dtype)
    units.watch()
    passes = 600  # beyond the integers that bfloat16 can count
    for _ in range(passes):
        net(x)
    size, mean, age = units.figures()
    assert size.dtype == torch.promote_types(dtype, torch.float32)
    hidden = net[:2](x).detach().to(size.dtype)
    torch.testing.assert_close(size, hidden.abs().mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mean, hidden.mean(0), rtol=1e-4, atol=1e-6)
    assert age.tolist() == [passes] * 5
    wide = net[2].weight.detach().to(size.dtype).abs().sum(0)
    torch.testing.assert_close(units.utility(units.figures()), size * wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_state_goes_on_in_another_precision(dtype: torch.dtype) -> None:
    before, after = watched(net_of(4, 5, 2).to(dtype)), watched(net_of(4, 5, 2))
    before.watch()
    for _ in range(3):
        before.consumer(torch.randn(64, 5, dtype=dtype))
    after.load_state_dict(before.state_dict())
    after.watch()
    after.consumer(torch.randn(64, 5))
    assert after.figures()[2].tolist() == [4] * 5
