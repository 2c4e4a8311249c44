"""Closed units leave the model, and nothing else changes."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo_models import GroupedAttention, run

from dg_lightning import (
    GatedClassifier,
    GatedLinear,
    GatedMLP,
    StaticGate,
    add_gates,
    gate_layers,
)
from dg_lightning.layers import GPT, VisionTransformer
from dg_lightning.surgery import compact, load_compact, save_compact

STATIC: Any = {"kind": "static"}
SCALED: Any = {"kind": "static", "scale": "probability"}
X = torch.randn(4, 8)


def mlp() -> Any:
    return nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2)
    ).eval()


def gated(net: Any, x: Tensor = X, **settings: Any) -> Any:
    add_gates(net, **(settings or {"feed_forward": STATIC}), example=x)
    for gate in gate_layers(net).values():
        gate.logit.data[1::2] = -1.0  # type: ignore[attr-defined]
    return net


@pytest.mark.parametrize("settings", [STATIC, SCALED])
def test_the_small_model_computes_the_same(settings: Any) -> None:
    net = gated(mlp(), feed_forward=settings)
    result: Any = compact(net, X)
    torch.testing.assert_close(result.model(X), net(X))
    assert result.units == {"3": (6, 3), "5": (4, 2)}
    assert (result.model[0].out_features, result.model[1].num_features) == (3, 3)
    assert not result.notes
    assert not gate_layers(result.model, required=False)
    assert net[0].out_features == 6  # the original is as it was
    other = torch.randn(7, 8)
    torch.testing.assert_close(result.model(other), net(other))


def test_a_number_of_heads_is_followed_where_the_class_has_one() -> None:
    x = torch.randn(2, 5, 8)
    net = gated(GroupedAttention(), x, heads=STATIC)
    result: Any = compact(net, x)
    torch.testing.assert_close(result.model(x), net(x))
    assert result.units == {"out": (2, 1)}
    assert (result.model.q.out_features, result.model.kv.out_features) == (4, 4)
    assert (result.model.heads, result.model.groups) == (2, 1)
    longer = torch.randn(3, 9, 8)
    torch.testing.assert_close(result.model(longer), net(longer))


class Stubborn(GroupedAttention):
    """Attention with a number that is written into its code."""

    def forward(self, x: Tensor) -> Tensor:
        if self.q.out_features != 8:
            raise RuntimeError("8 it is.")
        return super().forward(x)


class Numbered(GroupedAttention):
    """Attention with many numbers that equal its number of heads, one of which it computes with."""

    level_3: int

    def __init__(self) -> None:
        super().__init__()
        for index in range(9):
            setattr(self, f"level_{index}", self.heads)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.level_3


def test_attributes_that_count_heads_can_be_named() -> None:
    x = torch.randn(2, 5, 8)
    net = gated(Numbered(), x, heads=STATIC)
    assert not compact(net, x).units  # too many combinations to try
    result: Any = compact(net, x, attributes=["heads", "groups"])
    assert result.units == {"out": (2, 1)}
    assert (result.model.heads, result.model.groups, result.model.level_3) == (2, 1, 4)
    torch.testing.assert_close(result.model(x), net(x))
    with pytest.raises(ValueError, match=r"`attributes` .* 'head_count'"):
        compact(net, x, attributes=["head_count"])
    with pytest.raises(ValueError, match="`attributes` must be a list"):
        compact(net, x, attributes="heads")


def test_what_cannot_be_taken_out_stays_and_is_noted() -> None:
    x = torch.randn(2, 5, 8)
    net = gated(Stubborn(), x, heads=STATIC)
    result: Any = compact(net, x)
    torch.testing.assert_close(result.model(x), net(x))
    assert result.model.q.out_features == 8
    assert result.model.heads == 4
    assert "1 closed heads stay" in result.notes[0]
    assert not result.units
    assert not result.attributes


def test_a_layer_keeps_one_unit_and_widths_are_rounded_up() -> None:
    net = mlp()
    add_gates(net, feed_forward=STATIC, example=X)
    net[3].dg_gate.logit.data[:] = -1.0
    net[5].dg_gate.logit.data[3:] = -1.0
    result = compact(net, X)
    assert result.units == {"3": (6, 1), "5": (4, 3)}
    torch.testing.assert_close(result.model(X), net(X))
    rounded = compact(net, X, multiple=4)
    assert rounded.units == {"3": (6, 4)}
    torch.testing.assert_close(rounded.model(X), net(X))


def test_training_goes_on_with_the_state_of_the_optimizer() -> None:
    net = gated(mlp())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(3):
        net(X).square().mean().backward()
        for gate in gate_layers(net).values():
            gate.logit.grad = None  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    result: Any = compact(net, X)
    after = torch.optim.Adam(result.model.parameters(), lr=0.01)
    result.carry_state(net, optimizer, after)
    for model, stepped in ((net, optimizer), (result.model, after)):
        model(X).square().mean().backward()
        stepped.step()
    torch.testing.assert_close(result.model[0].weight, net[0].weight[::2])
    torch.testing.assert_close(result.model[3].weight, net[3].weight[::2, ::2])
    torch.testing.assert_close(result.model(X), net(X))


def test_files_rebuild_it_from_the_users_constructor(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return VisionTransformer([3, 8, 8], 4, width=12, depth=2, heads=3).eval()

    x = torch.randn(2, 3, 8, 8)
    net = gated(build(), x, feed_forward=STATIC, heads=STATIC)
    result = compact(net, x)
    save_compact(result, tmp_path / "small.safetensors")
    loaded = load_compact(build, tmp_path / "small.safetensors")
    assert type(loaded) is VisionTransformer
    assert torch.equal(loaded(x), result.model(x))
    torch.testing.assert_close(loaded(x), net(x))
    program = torch.export.export(loaded, (x,))
    torch.testing.assert_close(program.module()(x), loaded(x))


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    save_compact(compact(gated(mlp()), X), tmp_path / "small.safetensors")
    with pytest.raises(ValueError, match="contains 3, which Sequential lacks"):
        load_compact(lambda: nn.Sequential(nn.Linear(8, 6)), tmp_path / "small.safetensors")
    with pytest.raises(ValueError, match=r"`result` must be the CompactModel .* got Sequential"):
        save_compact(compact(gated(mlp()), X).model, tmp_path / "model.safetensors")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"There is no .*missing.safetensors"):
        load_compact(mlp, tmp_path / "missing.safetensors")
    (tmp_path / "small.safetensors.json").write_text("{}")
    with pytest.raises(ValueError, match="is not the recipe for a compact model"):
        load_compact(mlp, tmp_path / "small.safetensors")


def test_only_static_gates_tell_what_is_never_needed() -> None:
    with pytest.raises(ValueError, match="Sequential"):
        compact(mlp(), X)
    net = mlp()
    dynamic: Any = {"kind": "dynamic"}
    add_gates(net, feed_forward=dynamic, example=X)
    with pytest.raises(ValueError, match="The gate of 3 "):
        compact(net, X)


def test_a_part_of_a_gated_model_can_be_made_compact() -> None:
    whole = nn.ModuleDict({"net": mlp()})
    net: Any = whole["net"]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out

    outer = gated(Outer())
    result = compact(outer.net, X)
    assert result.units == {"3": (6, 3), "5": (4, 2)}
    torch.testing.assert_close(run(result.model, X)[0], run(outer, X)[0])


class Masked(nn.Module):
    """A branch that hardly counts, and outputs of which one is masked by a very large number."""

    def __init__(self, value: float, scale: float) -> None:
        super().__init__()
        self.attention = GroupedAttention()
        self.value, self.scale = value, scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.attention(x)
        return out.masked_fill(torch.arange(8) == 3, self.value)


@pytest.mark.parametrize("value", [-1e9, float("-inf")])
@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_numbers_of_heads_are_found_whatever_the_scale(value: float, scale: float) -> None:
    x = torch.randn(2, 5, 8)
    result: Any = compact(gated(Masked(value, scale), x, heads=STATIC), x)
    assert (result.model.attention.heads, result.model.attention.groups) == (2, 1)


def test_numbers_that_an_example_does_not_need_follow_too() -> None:
    x = torch.randn(2, 5, 8)

    class Mentions(GroupedAttention):
        def __init__(self) -> None:
            super().__init__()
            self.num_key_groups, self.layer_idx = 2, 2  # neither is read here

    result: Any = compact(gated(Mentions(), x, heads=STATIC), x)
    assert (result.model.num_key_groups, result.model.layer_idx) == (1, 2)


def test_shared_weights_are_refused() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.c.weight = self.b.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).relu()
            out: Tensor = self.b(h) + self.c(h)
            return out

    net = Shares().eval()
    add_gates(net, feed_forward=STATIC, pairs=[("a", "b")])
    net.b.dg_gate.logit.data[::2] = -1.0  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="Shares"):
        compact(net, X)


def test_norms_that_hold_an_activation_shrink_too() -> None:
    class NormAct(nn.BatchNorm2d):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.act(super().forward(x))
            return out

    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), NormAct(6), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 2, 1)
    )
    images = torch.randn(2, 3, 8, 8)
    result: Any = compact(gated(net.eval(), images, channels=STATIC), images)
    assert result.units == {"3": (6, 3)}
    assert (result.model[1].num_features, result.model[2].groups) == (3, 3)


def test_an_optimizer_whose_state_has_other_shapes_is_refused() -> None:
    net = gated(mlp())
    optimizer = torch.optim.Adafactor(net.parameters())
    net(X).square().mean().backward()
    optimizer.step()
    result = compact(net, X)
    after = torch.optim.Adafactor(result.model.parameters())
    with pytest.raises(ValueError, match="carried over"):
        result.carry_state(net, optimizer, after)


class Chooses(nn.Module):
    """Takes another branch when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        h = self.up(x).relu()
        out: Tensor = self.other(h) if other else self.down(h)
        return out


def test_a_shape_error_in_a_branch_that_was_not_seen_names_the_cause(tmp_path: Path) -> None:
    net = gated(Chooses().eval())
    result = compact(net, X)
    assert result.unused == ["other.weight", "other.bias"]
    save_compact(result, tmp_path / "small.safetensors")
    for small in (result.model, load_compact(Chooses, tmp_path / "small.safetensors")):
        with pytest.raises(RuntimeError) as caught:
            small(X, True)
        (note,) = caught.value.__notes__
        assert "more_examples" in note
        assert "Chooses" in note
        compiled: Any = torch.compile(small, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(X), net(X))


def test_more_examples_are_compared_too() -> None:
    net = gated(Chooses().eval())
    result = compact(net, X, more_examples=[(X, True)])
    assert "3 closed units stay" in result.notes[0]
    for other in (False, True):
        torch.testing.assert_close(result.model(X, other), net(X, other))
    assert not compact(gated(mlp()), X, more_examples=[torch.randn(2, 8)]).unused


class FusedAttention(GroupedAttention):
    """Fused projections whose sizes a config holds, as in Phi-3."""

    def __init__(self) -> None:
        super().__init__()
        del self.q, self.kv
        self.config = {"heads": self.heads}
        self.kernel: Any = None
        self.qkv = nn.Linear(8, 2 * (self.heads + 2 * self.groups))

    def forward(self, x: Tensor) -> Tensor:
        made, at = self.qkv(x), 2 * self.config["heads"]
        parts = made[..., :at], *made[..., at:].tensor_split([2 * self.groups], -1)
        q, k, v = (part.unflatten(-1, (part.shape[-1] // 2, 2)).transpose(1, 2) for part in parts)
        out: Tensor = self.out(self.kernel(q, k, v).transpose(1, 2).flatten(-2))
        return out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixed: Tensor = torch.jit.script(attend)(q, k, v)
    return mixed


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed: Tensor = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, enable_gqa=True)[0]
    return mixed


@pytest.mark.parametrize("kernel", [attend, scripted, by_products])
def test_no_trial_runs_attention_without_heads(kernel: Any) -> None:
    """Where key heads are none, torch divides by zero, which ends the process."""
    x = torch.randn(2, 5, 8)
    net = FusedAttention().eval()
    net.kernel = kernel
    net = gated(net, x, heads=STATIC)
    result: Any = compact(net, x)
    assert "1 closed heads stay" in result.notes[0]
    torch.testing.assert_close(result.model(x), net(x))


class TwoNorms(nn.Module):
    """Units made by two maps of different widths, each with a norm, as in attention of LeViT."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.wide_norm = nn.Linear(8, 12), nn.BatchNorm1d(12)
        self.narrow, self.narrow_norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        wide, narrow = self.wide_norm(self.wide(x)), self.narrow_norm(self.narrow(x))
        out: Tensor = self.out(wide.unflatten(-1, (-1, 2)).sum(-1).sigmoid() * narrow)
        return out


def test_each_norm_shrinks_with_the_map_before_it() -> None:
    net = gated(TwoNorms().eval())
    result: Any = compact(net, X)
    assert not result.notes
    assert (result.model.wide_norm.num_features, result.model.narrow_norm.num_features) == (6, 3)
    torch.testing.assert_close(result.model(X), net(X))


@pytest.mark.parametrize("inplace", [False, True])
def test_rounding_errors_beside_many_zeros_are_no_difference(inplace: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 64), nn.ReLU(inplace=inplace)]
    net = nn.Sequential(*layers)
    nn.init.constant_(net[2].bias, -0.3)  # type: ignore[arg-type]
    x = torch.randn(2048, 8)
    assert (net(x) == 0).float().mean() > 0.5
    assert not compact(gated(net, x), x).notes


class OfVersionTwo(nn.Sequential):
    """Refuses weights of another version, as MNASNet of torchvision does."""

    _version = 2

    def _load_from_state_dict(self, *args: Any) -> None:
        version = args[2].get("version")
        if version != self._version:
            raise ValueError(f"version must be 2, got {version}")
        super()._load_from_state_dict(*args)


def test_a_class_that_asks_for_the_version_of_its_weights_is_loaded(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return OfVersionTwo(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))

    result = compact(gated(build()), X)
    save_compact(result, tmp_path / "small.safetensors")
    loaded = load_compact(build, tmp_path / "small.safetensors")
    assert torch.equal(loaded(X), result.model(X))


class Reach(nn.Module):
    """Weighs positions up to a distance that happens to be as large as the number of units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 2)
        self.reach = 6

    def forward(self, x: Tensor) -> Tensor:
        distance = torch.arange(x.shape[1]).clamp(max=self.reach)
        out: Tensor = self.second(self.first(x).relu()) * distance[:, None]
        return out


def test_a_number_that_only_longer_inputs_need_stays() -> None:
    short, long = torch.randn(2, 3, 8), torch.randn(2, 9, 8)
    net = gated(Reach(), short)
    result: Any = compact(net, short)
    assert result.units == {"second": (6, 3)}
    assert result.model.reach == 6
    torch.testing.assert_close(result.model(long), net(long))


def own_net(**options: Any) -> GatedMLP:
    torch.manual_seed(0)
    net = GatedMLP(6, [8, 5], 3, **{"gate": STATIC, **options}).eval()
    for layer in net.layers():
        if isinstance(layer.gate, StaticGate):
            layer.gate.logit.data[::2] = -1.0
    return net


@pytest.mark.parametrize(
    ("options", "widths"),
    [
        ({}, [4, 2]),
        ({"gate": [STATIC, None]}, [4, 5]),
        ({"norm": "batch"}, [4, 2]),
        ({"activation": "gelu", "dropout": 0.5}, [4, 2]),
        ({"gate": [{**STATIC, "block_size": 4}, {**STATIC, "scale": "probability"}]}, [4, 2]),
        ({"input_gate": STATIC}, [4, 2]),
    ],
    ids=str,
)
def test_static_gates_of_our_own_layers_are_taken_out(options: Any, widths: list[int]) -> None:
    net = own_net(**options)
    result: Any = compact(net)
    assert not result.notes
    assert [layer.linear.out_features for layer in result.model.layers()] == widths
    assert all(layer.gate is None for layer in result.model.layers())
    x = torch.randn(7, 6)
    torch.testing.assert_close(result.model(x), net(x))


@pytest.mark.parametrize(
    "options",
    [{"norm": "layer"}, {"gate": [STATIC, {"kind": "dynamic"}]}],
    ids=["a norm reads all units", "a gate reads the units too"],
)
def test_units_that_others_read_stay_with_their_gate(options: Any) -> None:
    net = own_net(**options)
    result: Any = compact(net)
    assert any(note.startswith("hidden.0.gate:") for note in result.notes)
    assert isinstance(result.model.hidden[0].gate, StaticGate)
    x = torch.randn(7, 6)
    torch.testing.assert_close(result.model(x), net(x))


def test_a_classifier_and_a_transformer_of_ours_become_smaller() -> None:
    torch.manual_seed(0)
    gpt = GPT([10], 30, width=16, depth=2, heads=2, hidden=32, gate=STATIC)
    spec: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [8], "gate": STATIC}}
    classifier = GatedClassifier(spec, input_shape=[6], num_classes=3)
    for model, x in ((gpt, torch.randint(30, (2, 10))), (classifier, torch.randn(2, 6))):
        for gate in gate_layers(model.eval()).values():
            gate.logit.data[::2] = -1.0  # type: ignore[attr-defined]
        result: Any = compact(model, x)
        assert not result.notes
        count = [sum(p.numel() for p in m.parameters()) for m in (model, result.model)]
        assert count[1] < count[0]
        torch.testing.assert_close(result.model(x), model(x))


def test_a_net_without_static_gates_has_nothing_to_take_out() -> None:
    with pytest.raises(ValueError, match="GatedMLP"):
        compact(GatedMLP(6, [8], 3, gate={"kind": "dynamic"}))


def test_widths_of_inputs_stay_as_they_are() -> None:
    net = GatedMLP(8, [8], 3, gate=STATIC).eval()
    net.layers()[0].gate.logit.data[::2] = -1.0  # type: ignore[union-attr, operator]
    assert compact(net).model.in_features == 8


def test_gates_are_found_without_declared_consumers() -> None:
    alone = nn.Sequential(GatedLinear(6, 8, gate=STATIC), nn.Linear(8, 3)).eval()
    alone[0].gate.logit.data[::2] = -1.0  # type: ignore[union-attr, operator]
    replaced = own_net()
    replaced.output = nn.Linear(5, 2)
    x = torch.randn(7, 6)
    for net in (alone, replaced):
        result: Any = compact(net, x)
        assert not result.notes
        assert not gate_layers(result.model, required=False)
        torch.testing.assert_close(result.model(x), net(x))


def test_an_input_gate_is_folded_or_noted() -> None:
    for options, notes in (({}, 0), ({"input_norm": "layer"}, 1)):
        net = own_net(input_gate=STATIC, **options)
        net.input_gate.logit.data[:3] = -1.0  # type: ignore[union-attr, operator]
        result: Any = compact(net)
        assert len(result.notes) == notes
        assert (result.model.input_gate is None) == (not notes)
        x = torch.randn(7, 6)
        torch.testing.assert_close(result.model(x), net(x))


def test_a_model_that_reads_its_gates_keeps_them() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = own_net()

        def forward(self, x: Tensor) -> Any:
            y = self.net(x)
            return y, self.net.layers()[0].gate.probability  # type: ignore[union-attr]

    result = compact(Reads(), torch.randn(7, 6))
    assert len(result.notes) == 2


@pytest.mark.parametrize("multiple", [0, -8])
def test_a_multiple_below_one_is_refused(multiple: int) -> None:
    with pytest.raises(ValueError, match=f"`multiple`.*{multiple}"):
        compact(own_net(), multiple=multiple)
