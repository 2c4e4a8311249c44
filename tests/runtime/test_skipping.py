import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dg_lightning import GatedFeedForward, add_gates, gate_layers
from dg_lightning.compute.whole_net import CountWholeNet
from dg_lightning.layers import GPT
from dg_lightning.runtime import dispatch, skip_closed_blocks, skipping

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

        run.engine = inner.engine  # type: ignore[attr-defined]
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
    hooked.second.register_forward_hook(lambda *_: None)
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
        with CountWholeNet(net) as count:  # its hooks need the maps
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
    grads = [torch.autograd.grad(y.sum(), layer.first.weight)[0] for y in (plain, saved)]
    torch.testing.assert_close(*grads)
    clone = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    torch.testing.assert_close(clone(h), plain)
    compiled: Any = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(h), plain)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="`engine` must be one of auto, masked"):
        skip_closed_blocks(small(), "graph")
    with pytest.raises(ValueError, match="Linear has no GatedFeedForward"):
        skip_closed_blocks(nn.Linear(2, 2))
    assert skipping.__all__ == ["skip_closed_blocks"]


def test_auto_measures_within_checkpointing_and_never_between_a_pass_and_its_repetition(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(dispatch, "_REMEASURE_AFTER", 2)
    measured: list[int] = []
    fastest = dispatch.fastest_engine

    def counting(*args: Any) -> Any:
        measured.append(1)
        return fastest(*args)

    monkeypatch.setattr(dispatch, "fastest_engine", counting)
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
    monkeypatch.setattr(dispatch, "_REMEASURE_AFTER", 2)
    measured: list[Any] = []

    def first_is_dense(x: Any, gate: Any, net: Any, needs_grad: bool) -> Any:
        measured.append(gate)
        name = "dense" if len(measured) == 1 else "blocks"
        return dispatch.Fastest(name, name)

    monkeypatch.setattr(dispatch, "fastest_engine", first_is_dense)
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
