"""Routing statistics against hand-computed cases, scikit-learn and numpy."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import mutual_info_score

from dg_lightning.monitoring.activity import (
    ActivityCorrelation,
    RoutingStatistics,
    coefficient_of_variation,
    mutual_information,
    usage_entropy,
)


def test_entropy_by_hand() -> None:
    assert usage_entropy(torch.tensor([5] * 8)).item() == pytest.approx(math.log(8))
    assert usage_entropy(torch.tensor([7, 0, 0])).item() == 0
    three_to_one = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert usage_entropy(torch.tensor([3, 1])).item() == pytest.approx(three_to_one)


def test_variation_by_hand() -> None:
    assert coefficient_of_variation(torch.tensor([4, 4, 4])).item() == 0
    # Mean 2, deviations 2 and -2.
    assert coefficient_of_variation(torch.tensor([4, 0])).item() == pytest.approx(1.0)
    # All samples to one of 8 experts: sqrt(7).
    assert coefficient_of_variation(torch.tensor([8] + [0] * 7)).item() == pytest.approx(7**0.5)


def test_mutual_information_by_hand_and_as_scikit_learn_has_it() -> None:
    assert mutual_information(torch.tensor([[2, 2], [2, 2]])).item() == pytest.approx(0)
    assert mutual_information(torch.tensor([[3, 0], [0, 3]])).item() == pytest.approx(math.log(2))
    expert = torch.randint(0, 4, (500,), generator=torch.Generator().manual_seed(0))
    label = (expert + torch.randint(0, 2, (500,))) % 5
    joint = torch.zeros(4, 5, dtype=torch.int64)
    for e, y in zip(expert, label, strict=True):
        joint[e, y] += 1
    expected = mutual_info_score(expert.numpy(), label.numpy())
    assert mutual_information(joint).item() == pytest.approx(expected)


def test_statistics_count_choices_and_first_experts_over_batches() -> None:
    statistics = RoutingStatistics(experts=3, num_classes=2)
    p = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.5, 0.4, 0.1]])
    chosen = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 0]]).bool()
    label = torch.tensor([0, 1, 0])
    for i in range(3):
        statistics.update(chosen[i : i + 1], p[i : i + 1], label[i : i + 1])
    found = statistics.compute()
    assert found["entropy"].item() == pytest.approx(usage_entropy(torch.tensor([2, 3, 1])).item())
    # First expert and class decide each other: both have the entropy of (2, 1).
    two_to_one = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert found["mutual_information"].item() == pytest.approx(two_to_one)


def test_correlation_is_numpys_over_uneven_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    hardness = torch.rand(1000, generator=generator) * 1e-3
    activity = 0.5 + 0.01 * hardness * 1e3 + 0.01 * torch.randn(1000, generator=generator)
    correlation = ActivityCorrelation()
    for part in torch.arange(1000).split([1, 600, 300, 99]):
        correlation.update(hardness[part], activity[part])
    found = correlation.compute()
    expected = np.corrcoef(hardness.double().numpy(), activity.double().numpy())[0, 1]
    assert found["hardness_correlation"].item() == pytest.approx(expected, abs=1e-4)
    assert found["active_ratio"].item() == pytest.approx(activity.mean().item(), abs=1e-6)


def test_constant_activity_has_no_correlation() -> None:
    correlation = ActivityCorrelation()
    for _ in range(3):
        correlation.update(torch.rand(50), torch.full((50,), 0.3))
    assert correlation.compute()["hardness_correlation"].isnan()
