import copy
import pickle
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from gated_nets import randomised
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedClassifier, GatedLinear, GatedMLP
from dg_lightning.callbacks import GateMonitor, GatePenalty
from dg_lightning.runtime import engines, lay_out_by_unit, skip_closed_blocks, skipping


def fast_copy(net: GatedMLP, engine: Any = "blocks") -> GatedMLP:
    fast = copy.deepcopy(net)
    skip_closed_blocks(fast, engine)
    return fast


DYNAMIC: Any = {"kind": "dynamic", "block_size": 4}
STATIC: Any = {"kind": "static"}
ENGINES = ["auto", "masked", "blocks", "rows"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("hidden", "options"),
    [
        ([32], {"gate": DYNAMIC}),
        ([32, 16], {"gate": DYNAMIC}),
        ([32, 16], {"gate": [DYNAMIC, STATIC]}),
        ([32, 16, 24], {"gate": [DYNAMIC, None, DYNAMIC], "activation": "gelu"}),
        ([32, 16], {"gate": [STATIC, DYNAMIC], "input_gate": STATIC, "input_norm": "layer"}),
        ([32, 16], {"gate": [DYNAMIC, STATIC], "norm": "batch"}),
        ([32], {"gate": {**DYNAMIC, "policy": "top_k", "k": 2}, "dropout": 0.5}),
        ([32], {"gate": {**DYNAMIC, "policy": "hard_concrete", "min_open": 3}}),
        ([32, 16], {"gate": [{**DYNAMIC, "scale": "probability", "min_open": 2}, STATIC]}),
        ([], {}),
    ],
)
def test_it_is_the_same_net(engine: Any, hidden: Any, options: Any) -> None:
    net = randomised(GatedMLP(12, hidden, 5, dtype=torch.float64, **options))
    fast = fast_copy(net, engine)
    x = torch.randn(9, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = net(x)
        left = [(layer.gate.probability, layer.gate.gate) for layer in net.layers() if layer.gate]
        torch.testing.assert_close(fast(x), expected)
    gated: Any = [layer for layer in fast.layers() if layer.gate is not None]
    for layer, (p, g) in zip(gated, left, strict=True):
        torch.testing.assert_close(layer.gate.probability, p)
        torch.testing.assert_close(layer.gate.gate, g)
    skip_closed_blocks(fast, "masked")
    with torch.no_grad():
        assert torch.equal(fast(x), expected)


def test_closed_blocks_are_not_computed(monkeypatch: Any) -> None:
    net = randomised(GatedMLP(12, [32], 5, gate=DYNAMIC))
    seen: list[str] = []
    real = engines.run_blocks

    def watched(*arguments: Any) -> torch.Tensor:
        seen.append("blocks")
        return real(*arguments)

    monkeypatch.setitem(skipping._ENGINES, "blocks", watched)
    with torch.no_grad():
        fast_copy(net)(torch.randn(9, 12))
        assert seen == ["blocks"]
        gate = net.layers()[0].gate
        gate.network[0].weight.zero_()
        gate.network[0].bias.fill_(-1.0)  # all closed
        net.layers()[0].linear.weight.fill_(torch.nan)
        out = fast_copy(net)(torch.randn(9, 12))
    torch.testing.assert_close(out, net.output.bias.expand(9, 5))


def test_soft_gates_and_dropout_in_training_are_masked(monkeypatch: Any) -> None:
    monkeypatch.setitem(skipping._ENGINES, "blocks", lambda *_: pytest.fail("it must not skip"))
    for options in ({"gate": {**DYNAMIC, "policy": "soft"}}, {"gate": DYNAMIC, "dropout": 0.1}):
        fast_copy(GatedMLP(12, [32], 5, **options)).train()(torch.randn(3, 12))


def test_weights_learn_as_when_masked_and_open_gates_too() -> None:
    net = randomised(GatedMLP(12, [32], 5, gate=DYNAMIC, dtype=torch.float64)).train()
    x = torch.randn(20, 12, dtype=torch.float64)
    weights = [p for name, p in net.named_parameters() if "gate" not in name]
    expected = torch.autograd.grad(net(x).square().sum(), weights)
    skip_closed_blocks(net, "blocks")
    found = torch.autograd.grad(net(x).square().sum(), weights)
    torch.testing.assert_close(found, expected)
    gate = net.layers()[0].gate
    net(x).square().sum().backward()
    assert gate.network[0].weight.grad.ne(0).any()


def test_autocast_gives_half_precision() -> None:
    net = randomised(GatedMLP(12, [32], 5, gate=DYNAMIC))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = fast_copy(net)(torch.randn(3, 12))
    assert out.dtype == torch.bfloat16


def test_under_autocast_gates_decide_on_what_is_not_rounded() -> None:
    net = randomised(GatedMLP(12, [64], 5, gate={"kind": "dynamic"}))
    x = torch.randn(400, 12)
    fast = fast_copy(net)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        net(x)
        expected = net.layers()[0].gate.gate
        fast(x)
    gate: Any = fast.layers()[0].gate
    assert torch.equal(gate.gate, expected)


def test_the_fastest_engine_is_measured_and_looked_for_again(monkeypatch: Any) -> None:
    asked: list[int] = []

    def measured(x: torch.Tensor, *_: object) -> skipping.Fastest:
        asked.append(len(x))
        return skipping.Fastest("blocks", "blocks")

    monkeypatch.setattr(skipping, "fastest_engine", measured)
    monkeypatch.setattr(skipping, "_REMEASURE_AFTER", 3)
    net = fast_copy(randomised(GatedMLP(12, [32], 5, gate=DYNAMIC)), "auto")
    with torch.no_grad():
        for size in (8, 9, 8, 8, 64):  # 8 and 9 are alike
            net(torch.randn(size, 12))
    assert asked == [8, 8, 64]
    assert skipping.candidates(torch.randn(1, 2), needs_grad=False) == ["dense", "blocks", "rows"]
    assert skipping.candidates(torch.randn(1, 2), needs_grad=True) == ["dense", "blocks"]
    assert skipping.candidates(torch.randn(9, 2), needs_grad=False) == ["dense", "blocks"]


@pytest.mark.parametrize("engine", ["blocks", "rows"])
def test_the_layout_by_unit_changes_no_value(engine: Any) -> None:
    net = randomised(GatedMLP(12, [32, 16], 5, gate=DYNAMIC))
    fast = fast_copy(net, engine)
    lay_out_by_unit(fast)
    assert fast.output.weight.stride(0) == 1
    x = torch.randn(3, 12)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x))


def test_copies_and_pickles_skip_too() -> None:
    net = randomised(GatedMLP(12, [32, 16], 5, gate=DYNAMIC))
    x = torch.randn(3, 12)
    clone = pickle.loads(pickle.dumps(copy.deepcopy(fast_copy(net))))
    assert clone.skip is not None
    torch.testing.assert_close(clone(x), net(x))


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="`engine` must be one of"):
        skip_closed_blocks(GatedMLP(4, [4], 2), "fast")  # type: ignore[arg-type]


def test_a_training_with_callbacks_skips_blocks_and_its_checkpoint_loads_masked(
    tmp_path: Any,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32)
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [32], "gate": DYNAMIC}}
    optimizer: Any = {"class_path": "AdamW", "init_args": {"lr": 0.01}}
    model = GatedClassifier(net, [16], 2, optimizer=optimizer, gate_lr_factor=8.0)
    skip_closed_blocks(model.net, "blocks")
    trainer = pl.Trainer(
        max_epochs=6,
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        callbacks=[GatePenalty(0.2, usage="expected_macs"), GateMonitor()],
    )
    trainer.fit(model, data, data)
    assert float(trainer.callback_metrics["val/accuracy"]) > 0.9
    assert float(trainer.callback_metrics["compute/macs_share"]) < 0.9
    path = tmp_path / "end.ckpt"
    trainer.save_checkpoint(path)
    loaded = GatedClassifier.load_from_checkpoint(path).eval()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), loaded(x))


def test_compiled_and_exported_it_is_masked() -> None:
    net = randomised(GatedMLP(12, [32], 5, gate=DYNAMIC))
    fast = fast_copy(net)
    x = torch.randn(6, 12)
    program = torch.export.export(fast, (x,))
    torch.testing.assert_close(program.module()(x), net(x))
    assert isinstance(fast, nn.Module)


@pytest.mark.parametrize("scale", [None, "probability"])
def test_all_engines_that_learn_have_the_same_gradients(monkeypatch: Any, scale: Any) -> None:
    gate: Any = {**DYNAMIC, "scale": scale}
    net = randomised(GatedMLP(12, [32], 5, gate=gate, dtype=torch.float64))
    x = torch.randn(20, 12, dtype=torch.float64)
    masked = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    found = []
    for name in ("dense", "blocks"):
        fastest = skipping.Fastest(name, name)
        monkeypatch.setattr(skipping, "fastest_engine", lambda *_, f=fastest: f)
        skip_closed_blocks(net, "auto")
        found.append(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))
    torch.testing.assert_close(found[0], found[1])
    if scale is not None:  # closed gates learn nothing anyway, so nothing is lost by skipping them
        torch.testing.assert_close(found[0], masked)


@pytest.mark.parametrize("engine", ["blocks", "auto"])
def test_gates_learn_beside_frozen_weights(engine: Any) -> None:
    net = randomised(GatedMLP(12, [32], 5, gate=DYNAMIC)).train()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("gate" in name)
    skip_closed_blocks(net, engine)
    net(torch.randn(2, 12)).square().sum().backward()
    assert net.layers()[0].gate.network[0].weight.grad.ne(0).any()


def test_gates_and_dropout_that_train_alone_are_masked(monkeypatch: Any) -> None:
    monkeypatch.setitem(skipping._ENGINES, "blocks", lambda *_: pytest.fail("it must not skip"))
    soft: Any = {**DYNAMIC, "policy": "soft"}
    net = GatedMLP(12, [32], 5, gate=soft, dropout=0.1).eval()
    skip_closed_blocks(net, "blocks")
    net.layers()[0].dropout.train()
    net(torch.randn(3, 12))
    net.layers()[0].dropout.eval()
    net.layers()[0].gate.train()  # type: ignore[union-attr]
    net(torch.randn(3, 12))


def test_a_module_with_hooks_is_called() -> None:
    net = randomised(GatedMLP(12, [32], 5, gate=DYNAMIC))
    calls: list[str] = []
    net.layers()[0].linear.register_forward_hook(lambda *_: calls.append("linear"))
    x = torch.randn(3, 12)
    expected = net(x)
    skip_closed_blocks(net, "blocks")
    torch.testing.assert_close(net(x), expected)
    assert calls == ["linear", "linear"]


def test_measuring_draws_nothing() -> None:
    gate: Any = {**DYNAMIC, "policy": "bernoulli", "scale": "probability"}
    net = fast_copy(GatedMLP(12, [32], 5, gate=gate), "auto").train()
    torch.manual_seed(3)
    fc1 = net(torch.ones(8, 12))
    torch.manual_seed(3)
    torch.testing.assert_close(net(torch.ones(8, 12)), fc1)  # now without measuring


def test_the_engine_of_cuda_says_so_on_a_cpu() -> None:
    net = fast_copy(GatedMLP(12, [32], 5, gate=DYNAMIC), "triton").eval()
    with pytest.raises(ValueError, match=r"triton\b.*\bcpu\b"), torch.no_grad():
        net(torch.randn(3, 12))


def test_a_second_derivative_is_refused() -> None:
    net = fast_copy(GatedMLP(12, [32], 5, gate=DYNAMIC))
    x = torch.randn(3, 12, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivatives: use engine='masked'"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(0, 12), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("scale", [None, "probability"])
def test_an_empty_batch_makes_an_empty_output(scale: Any, shape: Any, engine: Any) -> None:
    gate: Any = {**DYNAMIC, "scale": scale}
    net = randomised(GatedMLP(12, [32, 16], 5, gate=[gate, STATIC]))
    fast = fast_copy(net, engine)
    x = torch.randn(shape, requires_grad=True)
    out = fast(x)
    assert out.shape == (0, 5)
    out.sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert fast(x).shape == (0, 5)


@pytest.mark.parametrize("engine", ["auto", "blocks", "rows"])
@pytest.mark.parametrize("activation", [nn.PReLU(), nn.Softmax(-1), nn.Dropout()], ids=str)
def test_an_activation_that_is_not_elementwise_is_refused(activation: Any, engine: Any) -> None:
    net = randomised(GatedMLP(12, [32], 5, gate=DYNAMIC))
    net.layers()[0].activation = activation
    assert fast_copy(net, "masked")(torch.randn(3, 12)).shape == (3, 5)
    skip_closed_blocks(net, engine)
    with pytest.raises(ValueError, match=rf"\b{type(activation).__name__}\b"):
        net.eval()(torch.randn(3, 12))


SCALED: Any = {**DYNAMIC, "scale": "probability", "initial_spread": 2.0}


class Residual(GatedLinear):
    """Somebody's layer, which adds its input."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + super().forward(h)


class Doubled(nn.Dropout):
    """Somebody's dropout, which does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def foreign(kind: str) -> GatedMLP:
    torch.manual_seed(0)
    net: Any = randomised(GatedMLP(16, [16, 16], 5, gate=[SCALED, None])).eval()
    if kind == "layer":
        net.hidden[1] = nn.Tanh()
    elif kind == "skipped subclass":
        net.hidden[0].__class__ = Residual
    elif kind == "following subclass":
        net.hidden[1].__class__ = Residual
    elif kind == "dropout":
        net.hidden[0].dropout = Doubled(0.0)
    elif kind == "no dropout":
        net.hidden[0].dropout = nn.Identity()
    elif kind == "gate":
        gate, own = net.hidden[0].gate, type(net.hidden[0].gate).forward
        gate.forward = lambda h: 0.5 * own(gate, h)
    elif kind == "compiled":
        net.hidden[1].linear = torch.compile(net.hidden[1].linear, backend="eager")
    return cast(GatedMLP, net)


@pytest.mark.parametrize(
    "kind",
    [
        "layer",
        "skipped subclass",
        "following subclass",
        "dropout",
        "no dropout",
        "gate",
        "compiled",
    ],
)
def test_parts_that_compute_in_other_ways_are_called(kind: str) -> None:
    net, x = foreign(kind), torch.randn(9, 16)
    expected = net(x)
    skip_closed_blocks(net, "blocks")
    torch.testing.assert_close(net(x), expected)


def test_a_module_with_a_backward_hook_is_called() -> None:
    net = randomised(GatedMLP(16, [16], 5, gate=SCALED)).train()
    calls: list[int] = []
    net.layers()[0].linear.register_full_backward_pre_hook(lambda *_: calls.append(1))
    skip_closed_blocks(net, "blocks")
    net(torch.randn(9, 16)).sum().backward()
    assert calls == [1]
