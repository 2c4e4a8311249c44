import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dg_lightning import GatedFeedForward, GatedMLP, add_gates, gate_layers
from dg_lightning.compute.whole_net import FlopRecorder
from dg_lightning.layers import GPT
from dg_lightning.runtime import skip_closed_blocks, skipping

SCALED: Any = {
    "kind": "dynamic",
    "block_size": 8,
    "scale": "probability",
    "initial_spread": 2.0,
    "initial_open_rate": 0.5,
    "threshold": 0.4,
}
UNSCALED: Any = {**SCALED, "scale": None}


def small(gate: Any = SCALED, **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT([10], 30, width=16, depth=2, heads=2, hidden=32, gate=gate, **options).double()


def gradients(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    net(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("engine", ["auto", "blocks", "rows"])
@pytest.mark.parametrize("glu", [False, True])
def test_values_and_gradients_are_those_of_the_masked_net(engine: Any, glu: bool) -> None:
    net = small(glu=glu)
    x = torch.randint(30, (3, 10))
    expected, wanted = net(x), gradients(net, x)
    skip_closed_blocks(net, engine)
    torch.testing.assert_close(net(x), expected)
    found = gradients(net, x)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x[:1, :1]), expected[:1, :1])
    skip_closed_blocks(net, "masked")
    assert torch.equal(net(x), expected)


def test_closed_blocks_are_not_computed(monkeypatch: Any) -> None:
    net = small()
    skip_closed_blocks(net, "blocks")
    seen: list[int] = []

    def counting(_: Any, x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.relu()

    monkeypatch.setattr(nn.GELU, "forward", counting)
    with torch.no_grad():
        net(torch.randint(30, (3, 10)))
    gates: Any = gate_layers(net).values()
    assert sum(seen) == sum(int(gate.gate.sum()) for gate in gates)
    assert sum(seen) < 2 * 30 * 4


def test_where_it_cannot_skip_everything_is_computed() -> None:
    runs: list[Tensor] = []

    def counting(layer: GatedFeedForward) -> None:
        assert layer.skip is not None
        skip: Any = layer.skip
        inner = skip.runner

        def run(*args: Any) -> Any:
            runs.append(args[0])
            return inner(*args)

        vars(run).update(engine=inner.engine, may_skip=inner.may_skip)
        skip.runner = run

    x = torch.randn(2, 3, 16)
    unscaled = GatedFeedForward(16, 32, gate=UNSCALED)
    skip_closed_blocks(unscaled)
    counting(unscaled)
    unscaled(x)  # closed gates learn from what is computed
    assert not runs
    unscaled.eval()(x)
    assert len(runs) == 1
    static = GatedFeedForward(16, 32, gate={"kind": "static"})
    hooked = GatedFeedForward(16, 32, gate=SCALED)
    hooked.fc2.register_forward_hook(lambda *_: None)
    for layer in (static, hooked):
        skip_closed_blocks(layer)
        counting(layer)
        layer(x)
    assert len(runs) == 1


def test_gates_that_were_put_in_are_skipped_too() -> None:
    net = small(gate=None)
    x = torch.randint(30, (3, 10))
    add_gates(net, feed_forward=UNSCALED, example=x)
    net.eval()
    expected = net(x)
    skip_closed_blocks(net, "blocks")
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
        with FlopRecorder(net) as count:  # its hooks need the maps
            net(x)
    whole = count.result(samples=30)
    assert whole is not None
    assert all(whole.runs.values())


def test_autocast_checkpointing_copies_and_compiled_code() -> None:
    net = small().float()
    layer: Any = net.blocks[0].feed_forward
    h = torch.randn(4, 6, 16)
    skip_closed_blocks(net, "blocks")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(h).dtype == torch.bfloat16
    plain = layer(h)
    saved = checkpoint(layer, h.requires_grad_(), use_reentrant=False)
    torch.testing.assert_close(saved, plain)
    grads = [torch.autograd.grad(y.sum(), layer.fc1.weight)[0] for y in (plain, saved)]
    torch.testing.assert_close(*grads)
    clone = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    torch.testing.assert_close(clone(h), plain)
    compiled: Any = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(h), plain)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="`engine` must be one of auto, masked"):
        skip_closed_blocks(small(), "graph")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\bLinear\b"):
        skip_closed_blocks(nn.Linear(2, 2))


def test_auto_measures_within_checkpointing_and_never_between_a_pass_and_its_repetition(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(skipping, "_REMEASURE_AFTER", 2)
    measured: list[int] = []
    fastest = skipping.fastest_engine

    def counting(*args: Any) -> Any:
        measured.append(1)
        return fastest(*args)

    monkeypatch.setattr(skipping, "fastest_engine", counting)
    layer = GatedFeedForward(16, 32, gate=SCALED)
    skip_closed_blocks(layer)
    x = torch.randn(4, 6, 16, requires_grad=True)
    for _ in range(4):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(measured) == 1
    with torch.no_grad():
        layer(x)  # an evaluation
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(measured) == 3
    assert layer(x[0, 0]).shape == (16,)


def test_auto_measures_each_layer_and_each_again_after_an_evaluation(monkeypatch: Any) -> None:
    monkeypatch.setattr(skipping, "_REMEASURE_AFTER", 2)
    measured: list[Any] = []

    def first_is_dense(x: Any, gate: Any, net: Any, needs_grad: bool) -> Any:
        measured.append(gate)
        name = "dense" if len(measured) == 1 else "blocks"
        return skipping.Fastest(name, name)

    monkeypatch.setattr(skipping, "fastest_engine", first_is_dense)
    net = nn.Sequential(*(GatedFeedForward(16, 32, gate=SCALED) for _ in range(2)))
    gates = [layer.gate for layer in net]
    skip_closed_blocks(net)
    x = torch.randn(6, 16)
    for _ in range(3):
        net(x).sum().backward()
    assert measured == gates  # one may be open where the other is closed
    with torch.no_grad():
        net(x)
    net(x).sum().backward()
    assert measured == 3 * gates


@pytest.mark.parametrize("engine", ["auto", "masked", "blocks", "rows"])
@pytest.mark.parametrize("gate", [SCALED, UNSCALED], ids=["scaled", "plain"])
@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (0, 3, 16)], ids=str)
def test_no_tokens_make_an_output_of_the_right_shape(
    shape: Any, glu: bool, gate: Any, engine: Any
) -> None:
    layer = GatedFeedForward(16, 32, gate=gate, glu=glu)
    skip_closed_blocks(layer, engine)
    for training in (True, False):
        h = torch.randn(shape, requires_grad=True)
        out = layer.train(training)(h)
        assert out.shape == shape
        out.sum().backward()
        assert h.grad is not None
        assert h.grad.shape == shape
        with torch.no_grad():
            assert layer(h).shape == shape
    assert not any(p.grad.any() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("engine", ["auto", "masked", "blocks", "rows"])
def test_no_tokens_pass_through_whole_models(engine: Any) -> None:
    ours, put_in = small().float(), small(gate=None).float()
    add_gates(put_in, feed_forward=UNSCALED, example=torch.randint(30, (3, 10)))
    for net in (ours, put_in):
        skip_closed_blocks(net, engine)
        assert net(torch.randint(30, (0, 10))).shape == (0, 10, 30)
        with torch.no_grad():
            assert net.eval()(torch.randint(30, (0, 10))).shape == (0, 10, 30)
            assert net(torch.randint(30, (0, 1))).shape == (0, 1, 30)


class Squares(nn.Module):
    """Somebody's activation, of which nobody knows that it is elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


STRANGE: dict[str, Any] = {
    "PReLU": nn.PReLU,
    "Softmax": lambda: nn.Softmax(-1),
    "Dropout": nn.Dropout,
    "LayerNorm": lambda: nn.LayerNorm(32),
    "RReLU": nn.RReLU,
    "GLU": nn.GLU,
    "Sequential": lambda: nn.Sequential(nn.PReLU(), nn.Dropout()),
    "Squares": Squares,
}


def with_activation(layer: Any, activation: Any) -> Any:
    """Replace the activation of a layer, also by something that is no module."""
    del layer.activation
    layer.activation = activation
    return layer


def skipped(layer: Any, engine: Any) -> Tensor:
    skip_closed_blocks(layer, engine)
    out: Tensor = layer(torch.randn(3, 16))
    return out


@pytest.mark.parametrize("engine", ["auto", "blocks", "rows"])
@pytest.mark.parametrize("name", STRANGE)
def test_an_activation_that_is_not_known_to_be_elementwise_is_refused(
    name: str, engine: Any
) -> None:
    layer = with_activation(GatedFeedForward(16, 32, gate=SCALED), STRANGE[name]())
    if name != "GLU":  # which halves the units
        assert skipped(layer, "masked").shape == (3, 16)  # all is computed
    for training in (True, False):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            skipped(layer.train(training), engine)


@pytest.mark.parametrize("engine", ["auto", "blocks", "rows"])
def test_a_function_as_activation_is_refused_unless_it_is_known(engine: Any) -> None:
    layer = with_activation(GatedFeedForward(16, 32, gate=SCALED), lambda x: x.softmax(-1))
    with pytest.raises(ValueError, match="activation"):
        skipped(layer, engine)


@pytest.mark.parametrize("engine", ["auto", "blocks", "rows"])
def test_an_activation_that_is_replaced_later_is_refused_too(engine: Any) -> None:
    layer: Any = GatedFeedForward(16, 32, gate=SCALED)
    skip_closed_blocks(layer, engine)
    layer(torch.randn(3, 16))
    layer.activation = nn.PReLU()
    with pytest.raises(ValueError, match=r"\bPReLU\b"):
        layer(torch.randn(3, 16))


@pytest.mark.parametrize("engine", ["blocks", "rows"])
@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.LeakyReLU(0.2, inplace=True), nn.ELU()],
    ids=str,
)
def test_other_elementwise_activations_have_the_values_and_gradients_of_the_masked_net(
    activation: Any, engine: Any
) -> None:
    layer: Any = GatedFeedForward(16, 32, gate=SCALED).double()
    layer.activation = activation
    x = torch.randn(7, 16, dtype=torch.float64)
    expected, wanted = layer(x), gradients(layer, x)
    skip_closed_blocks(layer, engine)
    found = gradients(layer, x)
    torch.testing.assert_close(layer(x), expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["feed-forward", "mlp"])
def test_past_the_recompile_limit_closed_gates_learn_or_a_warning_says_so(kind: str) -> None:
    """Code that torch gives up compiling runs as it is, where closed blocks are skipped."""
    import torch._dynamo.config as settings

    torch._dynamo.reset()
    net: Any = GatedFeedForward(16, 32, gate=UNSCALED)
    if kind == "mlp":
        net = GatedMLP(16, [32], 5, gate=UNSCALED)
    skip_closed_blocks(net, "blocks")
    gate = net.layers()[0].gate if kind == "mlp" else net.gate
    net.train()
    compiled: Any = torch.compile(net, backend="eager", dynamic=False)
    silent = []
    new: Any = hasattr(settings, "recompile_limit")  # since torch 2.7
    limit: Any = settings.patch({"recompile_limit" if new else "cache_size_limit": 2})
    with limit, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(3, 9):
            out = compiled(torch.randn(rows, 16))
            gate.gate.retain_grad()
            (out * torch.randn_like(out)).sum().backward()
            closed = gate.gate.detach() == 0
            assert closed.any()
            if not gate.gate.grad[closed].any():
                silent.append(rows)
    said = [warning for warning in caught if "gate" in str(warning.message).lower()]
    assert not silent or len(said) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("engine", ["auto", "blocks", "rows"])
@pytest.mark.parametrize("kind", ["feed-forward", "mlp"])
def test_copies_are_trained(kind: str, engine: Any) -> None:
    net: Any = GatedMLP(16, [32], 5, gate=UNSCALED)
    if kind == "feed-forward":
        net = GatedFeedForward(16, 32, gate=UNSCALED)
    skip_closed_blocks(net, engine)
    for fc1_gate in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        fc1_gate(torch.randn(3, 16)).sum().backward()
        assert all(p.grad is not None for p in fc1_gate.parameters())


class Tripled(nn.Linear):
    """Somebody's linear map, which computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_maps_with_a_forward_of_their_own_are_called(name: str) -> None:
    layer: Any = GatedFeedForward(16, 32, gate=SCALED).eval()
    own = getattr(layer, name)
    tripled = Tripled(own.in_features, own.out_features)
    tripled.load_state_dict(own.state_dict())
    setattr(layer, name, tripled)
    x = torch.randn(7, 16)
    expected = layer(x)
    skip_closed_blocks(layer, "blocks")
    torch.testing.assert_close(layer(x), expected)


def test_a_patched_activation_is_refused() -> None:
    layer: Any = GatedFeedForward(16, 32, gate=SCALED).eval()
    layer.activation.forward = lambda x: x.softmax(-1)
    skip_closed_blocks(layer, "blocks")
    with pytest.raises(ValueError, match="engine='masked'"):
        layer(torch.randn(7, 16))
