"""Open rates against a reference."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning import GatedFeedForward, GatedMLP
from dg_lightning.continual import DriftDetector
from dg_lightning.continual.drift import OpenCounts

GATE: Any = {"kind": "dynamic", "initial_open_rate": 0.6, "initial_spread": 1.0}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        gate: Any = {**GATE, "block_size": 4}
        self.layer = GatedFeedForward(8, 32, gate=gate)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def detector(classes: int = 3) -> DriftDetector:
    torch.manual_seed(0)
    found = DriftDetector(GatedMLP(10, [32, 16], classes, gate=GATE))
    found.learn([torch.randn(1000, 10) for _ in range(4)])
    return found


def test_counts_are_those_of_the_classes() -> None:
    counts = OpenCounts(2, 2)
    opened = torch.tensor([[1, 0], [1, 1], [0, 0.5]]).double()
    counts.update(opened[:2], torch.tensor([1, 1]))
    counts.update(opened[2:], torch.tensor([0]))
    found = counts.opened()
    assert found.samples.tolist() == [1, 2]
    assert found.sums.tolist() == [[0, 0.5], [2, 1]]
    assert found.squares.tolist() == [[0, 0.25], [2, 1]]
    assert torch.equal(counts.products, opened.T @ opened)


@pytest.mark.parametrize(("copies", "expected"), [(1, 8), (4, 2), (8, 1)])
def test_blocks_that_vary_together_count_once(copies: int, expected: int) -> None:
    torch.manual_seed(0)
    classes = torch.randint(3, (20000,))
    rates = torch.rand(3, 8 // copies)  # other rates in each class are no correlation
    opened = (torch.rand(20000, 8 // copies) < rates[classes]).double().repeat(1, copies)
    counts = OpenCounts(3, 8)
    counts.update(opened, classes)
    assert float(counts.opened().independent) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("classes", "known", "samples"), [(3, 4000, 50), (1, 100, 2000)])
def test_without_drift_scores_are_about_1_and_alarms_rare(
    classes: int, known: int, samples: int
) -> None:
    found, reports = detector(classes), []
    for _ in range(200):
        found.learn([torch.randn(known, 10)])
        reports.append(found.compare([torch.randn(samples, 10)]))
    scores = torch.tensor([list(report.by_layer.values()) for report in reports])
    assert scores.mean(0).tolist() == pytest.approx([1, 1], abs=0.15)
    assert sum(report.p < 0.05 for report in reports) < 20
    assert sum(report.has_drifted for report in reports) <= 4


def test_drift_is_found_in_the_layer_and_class_where_it_is() -> None:
    found = detector()
    net: nn.Module = found.model
    x = torch.randn(3000, 10)
    shifted = torch.where(net(x).argmax(1, keepdim=True) == 1, x * 3, x)
    kept = net(shifted).argmax(1) == net(x).argmax(1)
    report = found.compare([shifted[kept]])
    assert report.has_drifted
    assert report.by_class[1] > 5 * max(report.by_class[0], report.by_class[2])
    assert report.samples == int(kept.sum())


def test_another_mixture_of_classes_is_no_drift() -> None:
    found = detector()
    x = torch.randn(5000, 10)
    chosen = x[found.model(x).argmax(1) == 0][:300]
    assert not found.compare([chosen]).has_drifted


def test_too_few_samples_tell_nothing() -> None:
    report = detector().compare(torch.full((1, 10), 99.0))
    assert not report.has_drifted
    assert str(report) == (
        "Open rates of 1 sample: too few to tell, of the classes that the reference has"
    )


def test_positions_may_come_before_samples() -> None:
    class Mean(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(0, 1)).mean(0)

    def samples(count: int) -> Tensor:
        return torch.randn(count, 6, 8) + 2 * torch.randn(count, 1, 8)

    torch.manual_seed(0)
    found = DriftDetector(Mean())
    found.learn([samples(500)])
    assert sum(found.compare(samples(60)).p < 0.05 for _ in range(50)) < 10


def test_a_gate_may_be_left_out_and_another_net_is_refused() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (GatedMLP(10, [16], 3, gate=GATE) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            out = self.first(x)
            both: Tensor = out + self.second(x) if len(x) > 50 else out
            return both

    torch.manual_seed(0)
    found = DriftDetector(Sometimes())
    found.learn([torch.randn(1000, 10), torch.randn(40, 10)])
    sizes = [int(opened.samples.sum()) for opened in found.reference.values()]
    assert sizes == [1040, 1000]
    assert len(found.compare([torch.randn(40, 10)]).by_layer) == 1
    other = detector(classes=2)
    other.reference = detector().reference
    with pytest.raises(ValueError, match="has 3 classes and 32 blocks, got 2 and 32"):
        other.compare(torch.randn(20, 10))


def test_tokens_and_models_without_classes() -> None:
    torch.manual_seed(0)
    found = DriftDetector(Tokens())
    found.learn([(torch.randn(500, 6, 8), None)])
    assert not found.compare([torch.randn(60, 6, 8)]).has_drifted
    assert found.compare([torch.randn(60, 6, 8) + 0.5]).has_drifted


def test_bad_input_gets_one_line() -> None:
    with pytest.raises(ValueError, match="use `kind: dynamic`"):
        DriftDetector(GatedMLP(4, [8], 2, gate={"kind": "static"}))
    fresh = DriftDetector(GatedMLP(4, [8], 2, gate=GATE))
    with pytest.raises(ValueError, match="no batches"):
        fresh.learn([])
    with pytest.raises(ValueError, match="no reference"):
        fresh.compare([torch.randn(2, 4)])
