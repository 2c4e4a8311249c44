"""Routing statistics: expert usage, and the correlation of hardness and gate activity."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

__all__ = [
    "ActivityCorrelation",
    "RoutingStatistics",
    "coefficient_of_variation",
    "mutual_information",
    "usage_entropy",
]


def usage_entropy(counts: Tensor) -> Tensor:
    """Return the entropy of expert usage in nats; at most ``ln E``.

    >>> round(usage_entropy(torch.tensor([1, 1, 0, 0])).item(), 4)
    0.6931
    """
    share = counts.double() / counts.sum()
    return -torch.xlogy(share, share).sum()


def coefficient_of_variation(counts: Tensor) -> Tensor:
    """Return the standard deviation of expert usage over its mean; 0 if usage is uniform.

    >>> coefficient_of_variation(torch.tensor([3, 1])).item()
    0.5
    """
    counts = counts.double()
    return counts.std(correction=0) / counts.mean()


def mutual_information(joint: Tensor) -> Tensor:
    """Return the mutual information of two variables in nats, from their joint counts.

    >>> round(mutual_information(torch.tensor([[5, 0], [0, 5]])).item(), 4)
    0.6931
    """
    pairs = joint.double() / joint.sum()
    independent = pairs.sum(1, keepdim=True) * pairs.sum(0, keepdim=True)
    return (torch.xlogy(pairs, pairs) - torch.xlogy(pairs, independent)).sum()


class RoutingStatistics(Metric):
    """Accumulates expert usage by class over batches and processes.

    Args:
        experts: Number of experts.
        num_classes: Number of classes.
        **kwargs: Arguments of `torchmetrics.Metric`.

    >>> statistics = RoutingStatistics(experts=2, num_classes=2)
    >>> chosen = torch.tensor([[True, False], [False, True]])
    >>> statistics.update(chosen, chosen.float(), torch.tensor([0, 1]))
    >>> {name: round(value.item(), 3) for name, value in statistics.compute().items()}
    {'entropy': 0.693, 'cv': 0.0, 'mutual_information': 0.693}
    """

    full_state_update = False
    used: Tensor  # (experts,)
    joint: Tensor  # (experts, classes)

    def __init__(self, experts: int, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("used", torch.zeros(experts, dtype=torch.int64), dist_reduce_fx="sum")
        joint = torch.zeros(experts, num_classes, dtype=torch.int64)
        self.add_state("joint", joint, dist_reduce_fx="sum")

    @override
    def update(self, chosen: Tensor, probability: Tensor, target: Tensor) -> None:
        """Add a batch: chosen experts (bool), router probabilities, and labels."""
        self.used += chosen.sum(0)
        pairs = probability.argmax(-1) * self.joint.shape[1] + target
        self.joint += torch.bincount(pairs, minlength=self.joint.numel()).view_as(self.joint)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return entropy and variation of usage, and its mutual information with the class."""
        return {
            "entropy": usage_entropy(self.used.cpu()),
            "cv": coefficient_of_variation(self.used.cpu()),
            "mutual_information": mutual_information(self.joint.cpu()),
        }


class ActivityCorrelation(Metric):
    """Correlation of hardness and activity: whether harder samples open more units.

    Hardness is 1 minus the largest class probability, activity the share of open units.

    >>> correlation = ActivityCorrelation()
    >>> correlation.update(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.2, 0.4, 1.2]))
    >>> round(correlation.compute()["hardness_correlation"].item(), 4)
    1.0
    """

    full_state_update = False
    samples: Tensor
    means: Tensor  # (2,): hardness, activity
    moments: Tensor  # (2, 2): sums of products of deviations

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Stacked over processes and merged: sums of squares would lose small variances.
        self.add_state("samples", torch.zeros(()), dist_reduce_fx=None)
        self.add_state("means", torch.zeros(2), dist_reduce_fx=None)
        self.add_state("moments", torch.zeros(2, 2), dist_reduce_fx=None)

    @override
    def update(self, hardness: Tensor, activity: Tensor) -> None:
        """Add a batch."""
        values = torch.stack([hardness.float(), activity.float()], -1)
        means = values.mean(0)
        deviations = values - means
        batch = (self.samples.new_tensor(len(values)), means, deviations.T @ deviations)
        current = (self.samples, self.means, self.moments)
        stacked = [torch.stack(both) for both in zip(current, batch, strict=True)]
        self.samples, self.means, self.moments = _merge(*stacked)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the correlation (NaN if either is constant) and the mean activity."""
        samples, means, moments = _merge(
            self.samples.reshape(-1), self.means.reshape(-1, 2), self.moments.reshape(-1, 2, 2)
        )
        covariance, variances = moments[0, 1], moments.diagonal()
        # Variance from rounding alone counts as constant.
        constant = (variances <= 1e-10 * samples * means.square().clamp_min(1e-12)).any()
        correlation = covariance / variances.prod().sqrt()
        return {
            "hardness_correlation": torch.where(constant, torch.nan, correlation),
            "active_ratio": means[1],
        }


def _merge(samples: Tensor, means: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the counts, means and moments of several groups of samples."""
    total = samples.sum()
    share = (samples / total.clamp_min(1)).unsqueeze(-1)
    mean = (share * means).sum(0)
    offsets = means - mean
    between = (samples[:, None, None] * offsets.unsqueeze(-1) * offsets.unsqueeze(-2)).sum(0)
    return total, mean, moments.sum(0) + between
