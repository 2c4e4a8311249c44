import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import DynamicGate, GatedClassifier, GatedLinear, GatedMLP, add_gates
from dg_lightning.callbacks import GateMonitor
from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.compute.whole_net import FlopRecorder, WholeNet
from dg_lightning.layers import GPT
from dg_lightning.training.spec import ClassConfig

POSITIONS, WIDTH, HIDDEN = 5, 8, 32


class Attention(nn.Module):
    """Two ways to attend, around a gated feed-forward of every position."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.torchs = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = GatedLinear(WIDTH, HIDDEN, gate={"kind": "static"})
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        h = nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]
        h = self.torchs(h, h, h, need_weights=False)[0]
        pooled: Tensor = self.out(self.down(self.up(h)).mean(1))
        return pooled


# Products of queries with keys and of weights with values, twice; and torch's own projections.
ATTENTION = 2 * 2 * POSITIONS**2 * WIDTH + POSITIONS * (3 * WIDTH**2 + WIDTH**2)
MAPS = POSITIONS * (3 * WIDTH**2 + 2 * WIDTH * HIDDEN) + 3 * WIDTH


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_attention_counts_by_hand(training: bool, context: type) -> None:
    net = Attention().train(training)
    with context(), FlopRecorder(net) as count:
        net(torch.randn(3, POSITIONS, WIDTH))
    whole = count.result(samples=3)
    assert whole is not None
    assert whole.other == ATTENTION
    assert whole.runs == {"qkv": 5, "torchs.out_proj": 0, "up.linear": 5, "down": 5, "out": 1}


def test_the_share_of_a_net_with_attention_is_of_all_of_it() -> None:
    net = Attention().eval()
    with torch.no_grad():
        net.up.gate.get_parameter("logit")[: HIDDEN * 3 // 4] = -1  # type: ignore[union-attr]
    ledger = ComputeLedger(net)
    with torch.no_grad(), FlopRecorder(net) as count:
        net(torch.randn(3, POSITIONS, WIDTH))
    ledger.update(net, 3)
    report = ledger.report(net, count.result(3))
    assert report.macs_dense == MAPS + ATTENTION
    saved = POSITIONS * WIDTH * HIDDEN * 3 // 4  # rows of `up`; nobody says that `down` reads them
    assert report.macs == MAPS + ATTENTION - saved
    assert report.metrics()["compute/macs_share"] == pytest.approx(report.macs / report.macs_dense)
    assert report.uncounted == ()
    # Alone, the ledger would claim a share of the maps only, and says what is left out.
    alone = ledger.report(net)
    assert alone.uncounted == ("torchs",)
    assert alone.metrics()["compute/macs_share"] < report.metrics()["compute/macs_share"]


class Convolutional(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.head = GatedMLP(4 * 64, [16], num_classes, gate={"kind": "static"})

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(x))
        return logits


def test_a_classifier_logs_the_share_of_the_whole_net() -> None:
    spec: ClassConfig = {"class_path": f"{__name__}.Convolutional"}
    sys.modules.setdefault(__name__, sys.modules[Convolutional.__module__])
    model = GatedClassifier(spec, [1, 8, 8], 10).eval()
    with torch.no_grad():
        model.net.head.hidden[0].gate.logit[:8] = -1  # type: ignore[union-attr,index]
    data = TensorDataset(torch.randn(6, 1, 8, 8), torch.arange(6))
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    (logged,) = trainer.test(model, DataLoader(data, batch_size=4), verbose=False)
    dense = 64 * 4 * 9 + 256 * 16 + 16 * 10
    assert logged["compute/macs_dense"] == dense
    assert logged["compute/macs"] == 64 * 4 * 9 + (256 * 16 + 16 * 10) / 2
    assert model.compute_report is not None
    assert model.compute_report.uncounted == ()


def test_a_plain_mlp_has_nothing_else() -> None:
    mlp = GatedMLP(8, [4, 4], 2, gate={"kind": "dynamic"}, norm="layer")
    with FlopRecorder(mlp) as count:
        mlp(torch.randn(7, 8))
    names = ["hidden.0.linear", "hidden.1.linear", "output", "hidden.0.gate", "hidden.1.gate"]
    assert count.result(7) == WholeNet(dict.fromkeys(names, 1.0), 0)


def test_a_compiled_net_counts_as_the_plain_one() -> None:
    net = Attention().eval()
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(3, POSITIONS, WIDTH)
    compiled(x)
    with torch.no_grad(), FlopRecorder(compiled) as count:  # type: ignore[arg-type]
        compiled(x)
    whole = count.result(3)
    assert whole is not None
    assert whole.other == ATTENTION


def test_a_gated_map_that_does_not_run_as_a_module_is_not_guessed() -> None:
    layer = GatedLinear(4, 3, gate={"kind": "static"})
    with FlopRecorder(layer) as count:
        nn.functional.linear(torch.randn(2, 4), layer.linear.weight)
    assert count.result(2) is None


class WithMetric(pl.LightningModule):
    """Somebody's module: a stem without gates, products in a metric, a loss outside of nets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 6)
        self.head = nn.Sequential(GatedLinear(6, 4, gate={"kind": "static"}), nn.Linear(4, 2))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self.head(self.stem(batch[0]))
        self.log("similarity", (out @ out.T @ out @ out.T).mean())


def test_attention_beside_experts_counts_as_beside_a_plain_feed_forward() -> None:
    shape: Any = {"width": 8, "depth": 2, "heads": 2, "hidden": 16}
    tokens = torch.zeros(3, 4, dtype=torch.long)
    counts = []
    for net in (GPT([4], 5, **shape), GPT([4], 5, experts={"experts": 4}, **shape)):
        with FlopRecorder(net) as count:
            net(tokens)
        counts.append(count.result(samples=tokens.numel()))
    plain, experts = counts
    assert plain is not None
    assert experts is not None
    assert experts.other == plain.other == 2 * 2 * 4 * 8  # layers, two products, context, width
    assert experts.runs["blocks.0.feed_forward.experts.fc1"] == 1  # for a token
    assert experts.runs["blocks.0.feed_forward.router"] == 1
    with FlopRecorder(net) as count:
        net(tokens)
    whole = count.result(samples=len(tokens))
    assert whole is not None
    assert whole.runs["blocks.1.feed_forward.experts.fc2"] == 4  # for a sample


def test_a_foreign_module_is_counted_without_its_metrics() -> None:
    monitor = GateMonitor(files=False)
    trainer = pl.Trainer(
        logger=False, callbacks=[monitor], enable_progress_bar=False, accelerator="cpu"
    )
    data = DataLoader(TensorDataset(torch.randn(6, 8)), batch_size=3)
    (logged,) = trainer.validate(WithMetric(), data, verbose=False)
    assert logged["compute/macs_dense"] == 8 * 6 + 6 * 4 + 4 * 2
    assert logged["compute/macs_share"] == 1


class Failing(WithMetric):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.stem(batch[0])
        raise RuntimeError("lost")


def test_a_failed_validation_leaves_no_count_behind() -> None:
    trainer = pl.Trainer(
        logger=False,
        callbacks=[GateMonitor(files=False)],
        enable_progress_bar=False,
        accelerator="cpu",
    )
    model = Failing()
    with pytest.raises(RuntimeError, match="lost"):
        trainer.validate(model, DataLoader(TensorDataset(torch.randn(6, 8))), verbose=False)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_modules_that_torch_cannot_count_are_named() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 5, batch_first=True)
            self.unused = nn.LSTM(6, 5)
            self.head = GatedLinear(5, 4, gate={"kind": "static"})

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x)[0])
            return out

    net = Recurrent()
    with torch.no_grad(), FlopRecorder(net) as count:
        net(torch.randn(2, 7, 6))
    whole = count.result(2)
    assert whole is not None
    assert whole.uncounted == ("rnn",) or whole.other > 0  # where torch has learned to
    ledger = ComputeLedger(net)
    ledger.update(net, 2)
    assert ledger.report(net, whole).uncounted == whole.uncounted


def test_a_gate_by_itself_decides_at_every_position() -> None:
    gate = DynamicGate(4, 4)
    net = nn.Sequential(gate)
    with FlopRecorder(net) as count:
        net(torch.randn(2, 5, 4))
    whole = count.result(2)
    assert whole is not None
    assert whole.runs == {"0": 5}
    assert whole.other == 0


@pytest.mark.slow
def test_a_compiled_classifier_still_validates() -> None:
    spec: ClassConfig = {"class_path": "GatedMLP", "init_args": {"hidden": [4]}}
    model = torch.compile(GatedClassifier(spec, [8], 3), backend="aot_eager")
    data = DataLoader(TensorDataset(torch.randn(8, 8), torch.randint(3, (8,))), batch_size=4)
    trainer = pl.Trainer(
        logger=False, max_epochs=1, enable_progress_bar=False, accelerator="cpu",
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, data, data)  # type: ignore[arg-type]


class Query(nn.Module):
    """Hands a parameter to a submodule, as pooling with learned queries does."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(2, WIDTH))
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up = GatedLinear(WIDTH, HIDDEN, gate={"kind": "static"})
        self.out = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = self.project(self.norm(self.query))
        mixed = nn.functional.scaled_dot_product_attention(query[None].expand(len(x), -1, -1), x, x)
        out: Tensor = self.out(self.up(mixed)).mean(1)
        return out


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_parameter_may_be_the_input_of_a_module(training: bool, context: type) -> None:
    net = Query().train(training)
    with context(), FlopRecorder(net) as count:
        net(torch.randn(2, POSITIONS, WIDTH))
    whole = count.result(samples=2)
    assert whole is not None
    assert whole.other == 2 * 2 * POSITIONS * WIDTH
    assert whole.runs == {"project": 1, "up.linear": 2, "out": 2}


class ByPosition(nn.Module):
    """Attention that multiplies with positions before all of its maps have run, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.p = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Parameter(torch.randn(POSITIONS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        def by_head(values: Tensor) -> Tensor:
            heads: Tensor = values.unflatten(-1, (2, WIDTH // 2)).transpose(-2, -3)
            return heads

        q, k = by_head(self.q(x)), by_head(self.k(x))
        scores = q @ k.transpose(-1, -2)
        scores = scores + q @ by_head(self.p(self.position)).transpose(-1, -2)
        mixed = scores.softmax(-1) @ by_head(self.v(x))
        out: Tensor = self.out(mixed.transpose(-2, -3).flatten(-2))
        return out


def test_products_between_the_maps_of_heads_are_those_of_heads() -> None:
    net, x = ByPosition().eval(), torch.randn(2, POSITIONS, WIDTH)
    add_gates(net, heads={"kind": "static"}, example=x)
    with FlopRecorder(net) as count:
        net.q(x), net.k(x)  # a pass that has broken off
        net(x)
    whole = count.result(samples=2)
    assert whole is not None
    assert whole.between == {"out.dg_gate": 3 * POSITIONS**2 * WIDTH}
    assert whole.other == 0
