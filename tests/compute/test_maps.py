"""Linear maps, however they are written."""

import pytest
import torch
from torch import nn

from dg_lightning.compute.macs import as_matrix, is_linear_map, unit_axis, weight_axes


class Conv1D(nn.Module):
    """Like that of Hugging Face: a weight of inputs by outputs."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OwnConvolution(nn.Conv2d):
    pass


@pytest.mark.parametrize(
    ("module", "is_map"),
    [
        (nn.Linear(3, 4), True),
        (nn.Conv2d(3, 4, 3), True),
        (Conv1D(4, 3), True),
        (OwnForward(3, 4), False),
        (OwnConvolution(3, 4, 3), False),
        (nn.Conv2d(4, 4, 3, groups=2), False),
        (nn.ConvTranspose2d(3, 4, 3), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), False),
    ],
)
def test_a_map_multiplies_by_its_own_weight(module: nn.Module, is_map: bool) -> None:
    assert is_linear_map(module) == is_map


@pytest.mark.parametrize(
    ("module", "shape", "axis"),
    [
        (nn.Linear(3, 4), (4, 3, 1), -1),
        (nn.Conv1d(3, 4, 5), (4, 3, 5), -2),
        (nn.Conv2d(3, 4, 2), (4, 3, 4), -3),
        (Conv1D(4, 3), (4, 3, 1), -1),
    ],
)
def test_weights_are_outputs_by_inputs(module: nn.Module, shape: tuple[int], axis: int) -> None:
    weight = dict(module.named_parameters())["weight"]
    assert as_matrix(module, weight).shape == shape
    assert [weight.shape[i] for i in weight_axes(module)] == [4, 3]
    assert unit_axis(module) == axis
