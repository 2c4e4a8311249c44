from typing import Any

import pytest
import torch

from dg_lightning import gate_layers
from dg_lightning.layers import GPT
from dg_lightning.layers.transformer import KeyValueCache
from dg_lightning.runtime import skip_closed_blocks

GATE: Any = {"kind": "dynamic", "block_size": 8, "initial_spread": 2.0, "initial_open_rate": 0.6}
KINDS: Any = [{}, {"gate": GATE}, {"gate": {**GATE, "scale": "probability"}, "glu": True}]


def small(**options: Any) -> GPT:
    torch.manual_seed(0)
    net = GPT([12], 40, width=16, depth=2, heads=2, hidden=32, **options).double().eval()
    for block in net.blocks:  # large enough for later tokens to matter
        block.attention.qkv.weight.data.mul_(4)  # type: ignore[union-attr, operator]
    return net


@pytest.mark.parametrize("options", [*KINDS, {"experts": {"experts": 4}}], ids=str)
def test_neither_logits_nor_gates_see_later_tokens(options: Any) -> None:
    net = small(**options)
    x = torch.randint(40, (3, 12))
    logits = net(x)
    gates: Any = gate_layers(net, required=False).values()
    decided = [gate.gate.view(3, 12, -1).clone() for gate in gates]
    for place in (1, 6, 11):
        changed = x.clone()
        changed[:, place:] = torch.randint(40, (3, 12 - place))
        torch.testing.assert_close(net(changed)[:, :place], logits[:, :place])
        for gate, before in zip(gates, decided, strict=True):
            assert torch.equal(gate.gate.view(3, 12, -1)[:, :place], before[:, :place])
            if place == 1:
                assert not torch.equal(gate.gate.view(3, 12, -1), before)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_with_a_cache_tokens_one_by_one_give_the_same(options: Any) -> None:
    net = small(**options)
    x = torch.randint(40, (3, 12))
    expected = net(x)
    cache = KeyValueCache(net.context)
    found = [net(x[:, :5], cache), net(x[:, 5:8], cache)]
    found += [net(x[:, i : i + 1], cache) for i in range(8, 12)]
    torch.testing.assert_close(torch.cat(found, 1), expected)


def test_a_cache_keeps_gradients_and_refuses_what_does_not_fit() -> None:
    net = small()
    x = torch.randint(40, (3, 12))
    cache = KeyValueCache(net.context)
    parts = [net(x[:, :5], cache), net(x[:, 5:], cache)]
    weight: Any = net.tokens.weight
    (found,) = torch.autograd.grad(torch.cat(parts, 1).square().sum(), weight)
    torch.testing.assert_close(found, torch.autograd.grad(net(x).square().sum(), weight)[0])
    with pytest.raises(ValueError, match="6 tokens for a context of 4"):
        net(x[:, :6], KeyValueCache(4))
    cache.tokens = 0
    with pytest.raises(ValueError, match="holds 3 sequences, got 2"):
        net(x[:2, :6], cache)


@pytest.mark.parametrize("options", KINDS, ids=str)
@torch.no_grad()
def test_a_token_at_a_position_on_the_device_gives_the_same(options: Any) -> None:
    """As in a CUDA graph, which reads the whole cache."""
    net = small(**options)
    x = torch.randint(40, (3, 12))
    cache = KeyValueCache(net.context)
    net(x[:, :5], cache)
    cache.position = torch.tensor([5])
    torch.testing.assert_close(net(x[:, 5:6], cache), net(x)[:, 5:6])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("engine", ["masked", "triton"])
def test_a_graph_generates_the_same(options: Any, engine: Any) -> None:
    net = small(**options).float().cuda()
    if "gate" in options:
        skip_closed_blocks(net, engine)
    x = torch.randint(40, (2, 3)).cuda()
    expected = net.generate(x, 20, temperature=0)
    assert torch.equal(net.generate(x, 20, temperature=0, cuda_graph=True), expected)
    drawn = [
        net.generate(x, 9, 1.0, torch.Generator("cuda").manual_seed(3), cuda_graph=graph)
        for graph in (True, False)
    ]
    assert torch.equal(*drawn)


def test_it_generates_the_most_probable_tokens_also_beyond_its_context() -> None:
    net = small(gate=GATE)
    x = torch.randint(40, (2, 3))
    out = net.generate(x, 20, temperature=0)
    assert out.shape == (2, 23)
    assert torch.equal(out[:, :3], x)
    within = net(out[:, :11])[:, 2:].argmax(-1)  # where the context is not full
    assert torch.equal(out[:, 3:12], within)
    drawn = [
        net.generate(x, 9, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_experts_have_a_loss_of_their_own() -> None:
    net = small(experts={"experts": 4})
    net(torch.randint(40, (2, 12)))
    loss = net.auxiliary_loss()
    assert loss is not None
    assert float(loss.detach()) > 0.01  # 0.01 if all are used equally
    assert small().auxiliary_loss() is None
    with pytest.raises(ValueError, match=r"`experts` .*`gate`"):
        small(experts={"experts": 4}, gate=GATE)


def test_bad_input_gets_one_line() -> None:
    net = small()
    with pytest.raises(ValueError, match="13 tokens for a context of 12"):
        net(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="`x` must have at least one token"):
        net.generate(torch.zeros(1, 0, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="`temperature` must be at least 0"):
        net.generate(torch.zeros(1, 2, dtype=torch.long), 3, temperature=-1.0)
    with pytest.raises(ValueError, match=r"`input_shape` .*context"):
        GPT([3, 4], 40)


def test_a_block_takes_a_cache_by_itself() -> None:
    torch.manual_seed(0)
    block = GPT([12], 9, width=16, depth=1, heads=2).blocks[0].eval()
    h = torch.randn(2, 5, 16)
    cache = KeyValueCache(12)
    torch.testing.assert_close(block(h, cache), block(h))
