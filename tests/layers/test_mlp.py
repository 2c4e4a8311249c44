import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dg_lightning import DynamicGate, GatedLinear, GatedMLP, StaticGate, gate_layers
from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.gates.protocol import detach_graph

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
)


def open_all(net: nn.Module, delta: float = 50.0) -> None:
    for gate in gate_layers(net).values():
        gate.shift_bias(delta)


def dense_twin(net: GatedMLP, **arguments: Any) -> GatedMLP:
    """The same net without gates."""
    twin = GatedMLP(**arguments)
    twin.load_state_dict({k: v for k, v in net.state_dict().items() if "gate" not in k})
    return twin


shapes = st.builds(
    lambda blocks, block_size: [b * block_size for b in blocks],
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.just(4),
)
settings_of_gates = st.fixed_dictionaries(
    {"kind": st.just("static"), "block_size": st.sampled_from([1, 2, 4])}
) | st.fixed_dictionaries(
    {
        "kind": st.just("dynamic"),
        "network": st.sampled_from(["linear", "low_rank", "mlp"]),
        "rank": st.just(2),
        "block_size": st.sampled_from([1, 2, 4]),
        "threshold": st.floats(0, 0.7),
    }
)


@given(
    hidden=shapes,
    gate=settings_of_gates,
    input_gate=st.booleans(),
    norm=st.sampled_from([None, "layer", "batch"]),
    activation=st.sampled_from(["relu", "gelu", "silu", "tanh"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_all_open_equals_the_dense_net_bit_for_bit(
    hidden: list[int],
    gate: Any,
    input_gate: bool,
    norm: Any,
    activation: Any,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    plain: dict[str, Any] = {
        "in_features": 8,
        "hidden": hidden,
        "num_classes": 3,
        "activation": activation,
        "norm": norm,
        "dtype": dtype,
    }
    net = GatedMLP(**plain, gate=gate, input_gate=gate if input_gate else None)
    open_all(net)
    twin = dense_twin(net, **plain)
    x = torch.randn(5, 2, 4, dtype=dtype)
    assert torch.equal(net(x), twin(x))
    assert torch.equal(net.eval()(x), twin.eval()(x))


@given(hidden=shapes, gate=settings_of_gates, seed=st.integers(0, 1000))
def test_all_closed_equals_the_bias_path(hidden: list[int], gate: Any, seed: int) -> None:
    torch.manual_seed(seed)
    net = GatedMLP(6, hidden, 3, gate=gate)
    open_all(net, -200.0)
    out = net(torch.randn(5, 6))
    assert torch.equal(out, net.output.bias.expand(5, 3))


def test_order_is_linear_norm_activation_gate_dropout() -> None:
    layer = GatedLinear(6, 4, gate=DynamicGate(6, 4), norm="layer", activation="gelu", dropout=0.5)
    assert isinstance(layer.gate, DynamicGate)
    nn.init.normal_(layer.gate.network[0].weight)  # type: ignore[arg-type]
    h = torch.randn(9, 6)
    layer.eval()
    by_hand = nn.functional.gelu(
        nn.functional.layer_norm(h @ layer.linear.weight.T + layer.linear.bias, (4,))
    )
    z = h @ layer.gate.network[0].weight.T + layer.gate.network[0].bias  # type: ignore[operator]
    torch.testing.assert_close(layer(h), by_hand * (torch.sigmoid(z) > 0.5))
    layer.train()
    torch.manual_seed(1)
    dropped = layer(h)
    torch.manual_seed(1)
    torch.testing.assert_close(dropped, nn.functional.dropout(layer.eval()(h), 0.5))


def test_input_gate_acts_before_the_input_norm() -> None:
    net = GatedMLP(6, [4], 3, input_gate={"kind": "static"}, input_norm="layer")
    assert isinstance(net.input_gate, StaticGate)
    net.input_gate.logit.data[:2] = -5
    x = torch.randn(7, 6)
    kept = x * torch.tensor([0.0, 0, 1, 1, 1, 1])
    hidden = torch.relu(net.hidden[0].linear(nn.functional.layer_norm(kept, (6,))))  # type: ignore[operator]
    torch.testing.assert_close(net(x), net.output(hidden))


def test_one_gate_a_layer_can_be_given_with_its_own_threshold() -> None:
    net = GatedMLP(
        6, [4, 4, 4], 3, gate=[{"threshold": 0.3}, None, {"kind": "dynamic", "threshold": 0.6}]
    )
    gates = gate_layers(net)
    assert list(gates) == ["hidden.0.gate", "hidden.2.gate"]
    assert [round(g.threshold.item(), 3) for g in gates.values()] == [0.3, 0.6]
    with pytest.raises(ValueError, match=r"`gate` .* 2 .* got 1"):
        GatedMLP(6, [4, 4], 3, gate=[None])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "rleu"}, "`activation` must be one of relu, gelu, silu, tanh, got 'rleu'"),
        ({"norm": "group"}, "`norm` must be one of layer, batch or None, got 'group'"),
        ({"gate": StaticGate(5)}, "The gate has 5 units, but the layer has 4"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedLinear(6, 4, **arguments)


def test_activation_checkpointing_gives_the_same_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    net = GatedMLP(6, [4, 4], 3, gate={"kind": "dynamic", "policy": "bernoulli"})
    x = torch.randn(5, 6)
    grads = []
    for checkpointed in (False, True):
        net.zero_grad()
        torch.manual_seed(3)
        out = checkpoint(net, x, use_reentrant=False) if checkpointed else net(x)
        means = [g.probability.mean() for g in gate_layers(net).values()]  # type: ignore[union-attr]
        usage = torch.stack(means).sum()
        (out.square().sum() + usage).backward()
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    for one, fc1_gate in itertools.zip_longest(*grads):
        assert torch.equal(one, fc1_gate)


@pytest.mark.slow
@on_every_device
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_compiled_net_does_not_recompile_when_temperature_or_threshold_change(
    kind: Any, device: str
) -> None:
    torch.compiler.reset()
    net = GatedMLP(16, [8, 8], 3, gate={"kind": kind, "min_open": 2}, input_gate={"kind": "static"})
    for gate in gate_layers(net).values():
        for parameter in gate.parameters():  # type: ignore[attr-defined]
            nn.init.normal_(parameter)
    net.to(device)
    # Whether the graph is traced again does not depend on the code that is made from it.
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = torch.randn(32, 16, device=device)
    compiled(x).sum().backward()
    detach_graph(gate_layers(net).values())
    opened = set()
    with torch.compiler.set_stance("fail_on_recompile"):
        for tau, theta in [(0.5, 0.5), (2.0, 0.3), (1.3, 0.7)]:
            for gate in gate_layers(net).values():
                gate.temperature.fill_(tau)
                gate.threshold.fill_(theta)
            net.zero_grad()
            out = compiled(x)
            out.sum().backward()
            grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            gates = [g.gate.clone() for g in gate_layers(net).values()]  # type: ignore[union-attr]
            opened.add(sum(g.mean().item() for g in gates))
            net.zero_grad()
            expected = net(x)
            expected.sum().backward()
            torch.testing.assert_close(out, expected)
            for one, fc1_gate in zip(grads, net.parameters(), strict=True):
                torch.testing.assert_close(one, fc1_gate.grad)
            detach_graph(gate_layers(net).values())
    assert len(opened) == 3


@on_every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_opens_the_same_gates_and_trains(dtype: torch.dtype, device: str) -> None:
    net = GatedMLP(16, [8], 3, gate={"kind": "dynamic"}, input_gate={"kind": "dynamic"})
    for gate in gate_layers(net).values():
        nn.init.normal_(gate.network[0].weight)  # type: ignore[attr-defined]
    net.to(device)
    x = torch.randn(64, 16, device=device)
    expected = net(x)
    masks = [g.gate for g in gate_layers(net).values()]
    with torch.autocast(device, dtype=dtype):
        out = net(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=5e-2, rtol=5e-2)
    for gate, mask in zip(gate_layers(net).values(), masks, strict=True):
        assert torch.equal(gate.gate, mask)  # type: ignore[arg-type]
    out.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("policy", ["threshold", "top_k"])
def test_cpu_and_cuda_agree(kind: Any, policy: Any) -> None:
    options: Any = {"kind": kind, "policy": policy, "k": "40%" if policy == "top_k" else None}
    net = GatedMLP(64, [128, 32], 10, gate=options, input_gate={"kind": "static"}).double()
    for gate in gate_layers(net).values():
        for parameter in gate.parameters():  # type: ignore[attr-defined]
            nn.init.normal_(parameter)
    x = torch.randn(256, 64, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        net.to(device).zero_grad()
        out = net(x.to(device))
        out.square().sum().backward()
        gates = [g.gate.cpu() for g in gate_layers(net).values()]  # type: ignore[union-attr]
        grads = [p.grad.cpu().clone() for p in net.parameters()]  # type: ignore[union-attr]
        ledger = ComputeLedger(net).to(device)
        ledger.update(net, 256)
        results.append((out.cpu(), gates, grads, ledger.report(net).metrics()))
    (out, gates, grads, figures), (out_cuda, gates_cuda, grads_cuda, figures_cuda) = results
    assert figures == pytest.approx(figures_cuda)
    torch.testing.assert_close(out, out_cuda)
    for one, fc1_gate in zip(gates, gates_cuda, strict=True):
        assert torch.equal(one, fc1_gate)
    for one, fc1_gate in zip(grads, grads_cuda, strict=True):
        torch.testing.assert_close(one, fc1_gate)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("gated", [("linear1",), ("linear2",), ("linear1", "linear2")])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_torchs_fused_transformer_goes_through_the_gates(
    kind: Any, gated: tuple[str, ...], padded: bool
) -> None:
    """In evaluation torch multiplies with the weights of plain layers itself."""
    layer: Any = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    for name, sizes in (("linear1", (16, 32)), ("linear2", (32, 16))):
        if name in gated:
            setattr(layer, name, GatedLinear(*sizes, gate={"kind": kind}))
    encoder = nn.TransformerEncoder(layer, 2)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, padding = torch.randn(3, 5, 16), None
    if padded:
        padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    expected = encoder.train()(x, src_key_padding_mask=padding)
    encoder.eval()
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            found = encoder(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found, expected)
    opened = [gate.gate.mean() for gate in gate_layers(encoder).values()]  # type: ignore[union-attr]
    assert any(0.1 < rate < 0.9 for rate in opened)  # the gates did matter
