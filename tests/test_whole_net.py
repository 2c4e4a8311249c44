import sys

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedClassifier, GatedLinear, GatedMLP
from dg_lightning.metrics import ComputeLedger
from dg_lightning.spec import ClassSpec
from dg_lightning.whole_net import CountWholeNet, WholeNet

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
    with context(), CountWholeNet(net) as count:
        net(torch.randn(3, POSITIONS, WIDTH))
    whole = count.whole(samples=3)
    assert whole is not None
    assert whole.other == ATTENTION
    assert whole.runs == {"qkv": 5, "torchs.out_proj": 0, "up.linear": 5, "down": 5, "out": 1}


def test_the_share_of_a_net_with_attention_is_of_all_of_it() -> None:
    net = Attention().eval()
    with torch.no_grad():
        net.up.gate.get_parameter("logit")[: HIDDEN * 3 // 4] = -1  # type: ignore[union-attr]
    ledger = ComputeLedger(net)
    with torch.no_grad(), CountWholeNet(net) as count:
        net(torch.randn(3, POSITIONS, WIDTH))
    ledger.update(net, 3)
    report = ledger.report(net, count.whole(3))
    assert report.macs_dense == MAPS + ATTENTION
    saved = POSITIONS * WIDTH * HIDDEN * 3 // 4  # rows of `up`; nobody says that `down` reads them
    assert report.macs == MAPS + ATTENTION - saved
    assert report.logged()["compute/macs_share"] == pytest.approx(report.macs / report.macs_dense)
    assert report.uncounted == ()
    # Alone, the ledger would claim a share of the maps only, and says what is left out.
    alone = ledger.report(net)
    assert alone.uncounted == ("torchs",)
    assert alone.logged()["compute/macs_share"] < report.logged()["compute/macs_share"]


class Convolutional(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.head = GatedMLP(4 * 64, [16], num_classes, gate={"kind": "static"})

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(x))
        return logits


def test_a_classifier_logs_the_share_of_the_whole_net() -> None:
    spec: ClassSpec = {"class_path": f"{__name__}.Convolutional"}
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
    with CountWholeNet(mlp) as count:
        mlp(torch.randn(7, 8))
    runs = {"hidden.0.linear": 1.0, "hidden.1.linear": 1.0, "output": 1.0}
    assert count.whole(7) == WholeNet(runs, 0)


def test_a_compiled_net_counts_as_the_plain_one() -> None:
    net = Attention().eval()
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(3, POSITIONS, WIDTH)
    compiled(x)
    with torch.no_grad(), CountWholeNet(compiled) as count:  # type: ignore[arg-type]
        compiled(x)
    whole = count.whole(3)
    assert whole is not None
    assert whole.other == ATTENTION


def test_a_gated_map_that_does_not_run_as_a_module_is_not_guessed() -> None:
    layer = GatedLinear(4, 3, gate={"kind": "static"})
    with CountWholeNet(layer) as count:
        nn.functional.linear(torch.randn(2, 4), layer.linear.weight)
    assert count.whole(2) is None
