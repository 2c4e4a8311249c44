"""What a mask leaves out, against torch's own masked_fill."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning.rewiring import zero_outside

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def values_and_mask(size: Any, dtype: Any = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(size, generator=generator) < 0.1
    values = torch.randn(size, generator=generator)
    values[~mask & (values > 1)] = torch.inf
    values[~mask & (values < -1)] = torch.nan
    return values.to(dtype), mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_large_tensors_are_zeroed_as_small_ones(dtype: Any) -> None:
    pairs = [values_and_mask(size, dtype) for size in ((7, 11), (600, 1001), (3,), (0, 4))]
    expected = [values.masked_fill(~mask, 0) for values, mask in pairs]
    zero_outside(pairs)
    for (values, _), wanted in zip(pairs, expected, strict=True):
        assert torch.equal(values, wanted)


def test_a_parameter_knows_that_it_was_changed_and_any_layout_will_do() -> None:
    values, mask = values_and_mask((6, 8, 3, 3))
    weight = nn.Parameter(values.clone().contiguous(memory_format=torch.channels_last))
    flat = nn.Parameter(values.clone())
    versions = weight._version, flat._version
    zero_outside([(weight, mask), (flat, mask)])
    for parameter, version in zip((weight, flat), versions, strict=True):
        assert torch.equal(parameter.detach(), values.masked_fill(~mask, 0))
        assert parameter._version > version
        assert parameter.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_whatever_was_outside_is_gone(dtype: Any, device: str) -> None:
    torch.manual_seed(0)
    mask = torch.rand(6, 8).to(device) < 0.3
    gradient = torch.randn(6, 8).to(device, dtype)
    broken = gradient.masked_fill(~mask, torch.inf)
    broken[~mask & (gradient > 0)] = torch.nan
    zero_outside([(broken, mask)])
    assert torch.equal(broken, gradient.masked_fill(~mask, 0))
