"""Units are found by what a model does, and the model is left as it was."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo_models import GroupedAttention

from dg_lightning import GatedMLP
from dg_lightning.surgery import find_units

X = torch.randn(3, 8)


class SwiGLU(nn.Module):
    """A feed-forward of gated units beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return out


class Fused(nn.Module):
    """Gated units whose two halves come from one map, interleaved or one after the other."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 12), nn.Linear(6, 8)
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(x)
        a, b = (h[..., ::2], h[..., 1::2]) if self.interleaved else h.chunk(2, -1)
        out: Tensor = self.down(a.sigmoid() * b)
        return out


class Reads(nn.Module):
    """Two maps with something between them."""

    def __init__(self, between: Any, back: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between, self.back = between, back or (lambda x, h, y: y)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.back(x, h, self.second(self.between(h)))


class Twice(Reads):
    def forward(self, x: Tensor) -> Any:
        return self.second(self.second(self.first(x)).relu())


class Adds(Reads):
    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self.first(x)) + x)


class Tied(Reads):
    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.other = nn.Linear(8, 8)
        self.other.weight = self.second.weight


def test_every_pair_of_a_chain_is_found() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    found = find_units(net, X)
    assert [(u.kind, list(u.producers), u.blocks) for u in found.units.values()] == [
        ("feed_forward", ["0"], 4),
        ("feed_forward", ["2"], 6),
    ]
    assert found.skipped == {"0": "it reads the model's input"}
    assert found.calls_per_sample == {"0": 1, "2": 1, "4": 1}


def test_both_makers_of_gated_units_are_found() -> None:
    (units,) = find_units(SwiGLU(), X).units.values()
    assert list(units.producers) == ["gate", "up"]
    assert units.is_tokenwise


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_halves_of_a_fused_map_are_told_apart(interleaved: bool) -> None:
    (units,) = find_units(Fused(interleaved), X).units.values()
    expected = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] if interleaved else [*range(6), *range(6)]
    assert units.producers["both"].tolist() == expected


def test_units_in_another_order_keep_their_names() -> None:
    (units,) = find_units(Reads(lambda h: h.relu().flip(-1)), X).units.values()
    assert units.producers["first"].tolist() == [*reversed(range(8))]


def test_heads_that_share_keys_close_together() -> None:
    (units,) = find_units(GroupedAttention(), torch.randn(2, 5, 8)).units.values()
    assert (units.kind, units.blocks, units.block_size) == ("heads", 2, 4)
    assert units.producers["q"].tolist() == [0] * 4 + [1] * 4
    assert units.producers["kv"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert not units.is_tokenwise


def test_channels_go_through_pooling_and_flattening() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    (units,) = find_units(net, torch.randn(2, 3, 6, 6)).units.values()
    assert (units.kind, units.blocks, units.block_size) == ("channels", 4, 4)
    assert units.between == ("1",)


@pytest.mark.parametrize("example", [torch.zeros(1, 8), torch.ones(1, 8), torch.randn(8)])
def test_any_example_will_do(example: Tensor) -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    (units,) = find_units(net, example).units.values()
    assert units.producers["0"].tolist() == [*range(64)]


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Reads(nn.LayerNorm(8)), "units are mixed on the way to it"),
        (Reads(lambda h: h.softmax(-1)), "units are mixed on the way to it"),
        (Reads(lambda h: h - h.mean(-1, keepdim=True)), "units are mixed on the way to it"),
        (Reads(torch.relu, lambda x, h, y: y + h), "read elsewhere"),
        (Reads(torch.relu, lambda x, h, y: (y, {"h": h})), "read elsewhere"),
        (Twice(None), "second runs several times"),
        (Reads(torch.detach), "it reads from no other layer"),
        (Adds(torch.relu), "the model's input is mixed into"),
        (Reads(lambda h: h * (torch.arange(8) < 4)), "some units were inactive"),
        (Tied(), "the weight of second is tied to another module's"),
    ],
)
def test_what_is_left_alone_has_a_reason(net: nn.Module, reason: str) -> None:
    found = find_units(net, X)
    assert not found.units
    assert reason in found.skipped["second"]


def test_maps_that_cannot_be_seen_are_named() -> None:
    net = nn.MultiheadAttention(8, 2, batch_first=True)
    found = find_units(net, (X[None], X[None], X[None]))
    assert "did not run as a module" in found.skipped["out_proj"]
    plain: Any = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    quantized = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
    assert find_units(quantized, X).skipped["2"] == "its weight is quantized"


def test_the_maps_of_gates_are_no_maps_of_the_net() -> None:
    net = GatedMLP(8, [6], 2, gate={"kind": "dynamic", "network": "low_rank", "rank": 2})
    found = find_units(net, X)
    assert found.skipped["output"] == "it already has a gate"
    assert not any("gate" in name for name in found.skipped)


def test_the_model_is_left_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight.requires_grad_(False)
    net[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.no_grad():
        assert find_units(net, X).units
    assert torch.equal(torch.rand(1), expected)
    assert [child.training for child in net] == [True, False, True, True]
    assert [p.requires_grad for p in net.parameters()] == [False, True, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None and not m._forward_hooks for m in net for p in m.parameters())


def test_an_error_in_the_model_leaves_no_hook_behind() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(ValueError, match="cannot run on `example`"):
        find_units(net, X)
    assert net.training
    assert not any(child._forward_hooks for child in net)


def test_an_example_is_taken_from_the_model_or_asked_for() -> None:
    net: Any = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"Sequential .* pass an `example`"):
        find_units(net)
    net.example_input_array = X
    assert find_units(net).units
    del net.example_input_array
    net.dummy_inputs = {"input": X}
    assert find_units(net).units


def clipped(h: Tensor) -> Tensor:
    length: Tensor = h.norm(dim=-1, keepdim=True)
    return h / length.clamp(min=3)


class Branches(nn.Module):
    """Takes another path every time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.second = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 2)
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.turn += 1
        if self.turn % 2:
            h = h + self.other(x)
        out: Tensor = self.second(h.relu())
        return out


class Counts(nn.Module):
    """Keeps a mean of what it sees, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 2)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        out: Tensor = self.second(h.relu())
        return out


def test_units_that_are_mixed_only_where_they_are_large_are_seen() -> None:
    found = find_units(Reads(clipped), torch.zeros(2, 8))
    assert "units are mixed" in found.skipped["second"]


def test_a_path_that_depends_on_the_input_is_left_alone() -> None:
    found = find_units(Branches(), X)
    assert found.skipped["second"] == "it reads from different layers for different inputs"


def test_what_a_model_counts_is_as_before() -> None:
    net = Counts()
    assert find_units(net, X).units
    assert not net.mean.any()


def test_later_positions_that_need_earlier_ones_are_not_decided_by_position() -> None:
    (units,) = find_units(Reads(lambda h: h.relu().cumsum(1)), torch.randn(2, 5, 8)).units.values()
    assert not units.is_tokenwise


def test_weights_that_are_made_of_others_are_no_maps() -> None:
    net = Reads(torch.relu)
    nn.utils.parametrizations.weight_norm(net.second)
    found = find_units(net, X)
    assert not found.units
    torch.nn.utils.prune.l1_unstructured(net.first, "weight", amount=0.3)
    assert not find_units(net, X).units


class Uses(nn.Module):
    """Hands units to a function of them, its maps and the input, which may use them twice."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 6), nn.Linear(6, 2), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.first(x), x)


def topk(h: Tensor) -> Tensor:
    return torch.zeros_like(h).scatter(-1, h.abs().topk(3, -1).indices, 1.0)


HIDDEN_USES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "top-k mask": lambda net, h, x: net.second(h * topk(h)),
    "mask above the mean": lambda net, h, x: net.second(h * (h > h.mean(-1, keepdim=True))),
    "detached norm": lambda net, h, x: net.second(h / h.detach().norm(dim=-1, keepdim=True)),
    "weight read twice": lambda net, h, x: (
        net.second(h) + nn.functional.linear(x, net.first.weight).sum(-1, keepdim=True)
    ),
    "bias read twice": lambda net, h, x: net.second(h.relu()) + net.first.bias.sum(),
    "detached output": lambda net, h, x: (net.second(h.relu()), h.detach()),
    "output of integers": lambda net, h, x: (net.second(h.relu()), h.argmax(-1)),
    "output by name": lambda net, h, x: {"out": net.second(h), "log": {"h": h.detach().mean()}},
}


@pytest.mark.parametrize("name", HIDDEN_USES)
def test_units_that_act_where_they_are_closed_are_left_alone(name: str) -> None:
    net = Uses(HIDDEN_USES[name]).eval()
    weights = {key: value.clone() for key, value in net.state_dict().items()}
    found = find_units(net, X)
    assert not found.units
    assert "second" in found.skipped
    for key, value in net.state_dict().items():
        assert torch.equal(value, weights[key])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_units_of_other_precisions_are_found(dtype: torch.dtype) -> None:
    net = Uses(lambda net, h, x: net.second(h.exp())).to(dtype)
    assert list(find_units(net, X).units) == ["second"]


class Chooses(nn.Module):
    """Takes another branch when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 2)
        self.up2, self.down2 = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        h = self.up(x).relu()
        out: Tensor = self.down2(self.up2(h).relu()) if other else self.down(h)
        return out


def test_more_examples_show_other_branches() -> None:
    found = find_units(Chooses(), X)
    assert set(found.units) == {"down"}
    found = find_units(Chooses(), X, [(X, True)])
    assert set(found.units) == {"down2"}
    assert "read elsewhere" in found.skipped["down"]
    assert "read elsewhere" in found.skipped["up2"]


class PlainLinear(nn.Linear):
    """A linear map that is written out, as in Falcon."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class Standardized(nn.Conv2d):
    """A convolution whose weights are standardized, as in BiT."""

    def forward(self, input: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean()) / self.weight.std()
        return nn.functional.conv2d(input, weight, self.bias)


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (nn.Sequential(PlainLinear(8, 6), nn.ReLU(), PlainLinear(6, 2)), X),
        (
            nn.Sequential(Standardized(3, 6, 1), nn.ReLU(), Standardized(6, 2, 1)),
            torch.randn(2, 3, 4, 4),
        ),
    ],
)
def test_maps_of_other_classes_are_found_or_named(net: nn.Module, x: Tensor) -> None:
    found = find_units(net, x)
    assert {"0", "2"} <= {*found.units, *found.skipped}


@pytest.mark.parametrize("unit", range(6))
def test_a_single_unit_that_is_read_elsewhere_is_seen(unit: int) -> None:
    net = Uses(lambda net, h, x: (net.second(h.relu()), h[..., unit].detach())).eval()
    assert not find_units(net, X).units


def test_a_model_that_takes_gradients_of_its_input_is_looked_at() -> None:
    def forces(net: Any, h: Tensor, x: Tensor) -> Any:
        energy = net.second(net.first(x.requires_grad_()).tanh()).sum()
        options: Any = {"allow_unused": True, "materialize_grads": True}
        (force,) = torch.autograd.grad(energy, x, create_graph=True, **options)
        return energy + force.sum()

    find_units(Uses(forces), X.clone())


def by_chance(net: Any, h: Tensor, x: Tensor) -> Any:
    return net.second(h.relu()) * h.detach().norm(dim=-1, keepdim=True) + random.random()


def as_a_number(net: Any, h: Tensor, x: Tensor) -> Any:
    return net.second(h.relu()), float(h.detach().norm())


def as_an_array(net: Any, h: Tensor, x: Tensor) -> Any:
    return {"y": net.second(h.relu()), "seen": h.detach().numpy()}


def in_training(net: Any, h: Tensor, x: Tensor) -> Any:
    y = net.second(h.relu())
    return y + h.detach().norm(dim=-1, keepdim=True) if net.training else y


@pytest.mark.parametrize("forward", [by_chance, as_a_number, as_an_array, in_training])
def test_units_that_act_in_other_ways_are_left_alone(forward: Any) -> None:
    found = find_units(Uses(forward), X)
    assert not found.units
    assert "second" in found.skipped


class ZeroInit(nn.Module):
    """A residual branch that adds nothing until it has learned, and a mask from its units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        mask = torch.zeros_like(h).scatter(-1, h.topk(4, -1).indices, 1.0)
        out: Tensor = x + self.second(h * mask)
        return out


def test_weights_that_are_still_zero_hide_nothing() -> None:
    net = ZeroInit()
    assert not find_units(net, torch.randn(4, 8)).units
    assert not net.second.weight.any()


def test_outputs_that_differ_from_run_to_run_tell_nothing() -> None:
    noise = torch.Generator().manual_seed(0)

    def noisy(net: Any, h: Tensor, x: Tensor) -> Any:
        return net.second(h.relu()), torch.rand(3, generator=noise)

    assert set(find_units(Uses(noisy), X).units) == {"second"}


def test_inputs_that_are_all_equal_stay_as_they_are() -> None:
    def keep(net: Any, h: Tensor, x: Tensor) -> Any:
        return net.second(h.relu()) * torch.bernoulli(x[..., :1])  # a probability

    assert set(find_units(Uses(keep), torch.ones(3, 8)).units) == {"second"}


def test_attention_to_an_empty_memory_is_no_attention_without_heads() -> None:
    def attend(net: Any, h: Tensor, x: Tensor) -> Tensor:
        query, nothing = x[None, None], torch.zeros(1, 1, 0, 8)
        seen = nn.functional.scaled_dot_product_attention(query, nothing, nothing)
        out: Tensor = net.second(h.relu()) + seen.nan_to_num().sum()
        return out

    assert set(find_units(Uses(attend), X).units) == {"second"}


@pytest.mark.parametrize("example", [torch.randn(2, 7), torch.ones(2, 5, dtype=torch.long)])
def test_an_example_that_the_model_refuses_is_named(example: Tensor) -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="cannot run on `example`"):
        find_units(net, example)


def test_lazy_layers_must_have_run() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"2\.weight has no shape yet"):
        find_units(net, torch.randn(2, 5))
    net(torch.randn(2, 5))
    assert list(find_units(net, torch.randn(2, 5)).units) == ["2"]


class Counted(nn.Module):
    """A model whose first layer decides how many rows the others get."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.count, self.most = nn.Linear(5, 1), most
        self.fc1, self.fc2 = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        count = float(self.count(x).abs().sum())
        if count > self.most:
            raise RuntimeError(f"{count} rows are too many")
        out: Tensor = x + self.fc2(self.fc1(x[:0]).relu()).sum()
        return out


def test_a_model_that_fails_with_noise_is_refused() -> None:
    net = Counted(most=1e-6)
    nn.init.zeros_(net.count.weight)
    nn.init.zeros_(net.count.bias)
    with pytest.raises(ValueError, match="it fails when noise is added"):
        find_units(net, torch.randn(2, 5))


def test_layers_that_get_no_rows_are_left_alone() -> None:
    found = find_units(Counted(most=float("inf")), torch.randn(2, 5))
    assert not found.units
    assert "pass a longer one" in found.skipped["fc2"]
