"""The kernel that masks gradients, against torch; on a CPU by Triton's interpreter."""

from typing import Any

import pytest
import torch
from interpreted import DEVICE, here, passes_interpreted, unless_it_runs_here

pytest.importorskip("triton")


@unless_it_runs_here
def test_without_a_gpu_it_is_interpreted() -> None:
    passes_interpreted(__file__)


@here
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("most", [1024, 3, 2])  # programs, which then have several blocks each
@pytest.mark.parametrize("shift", [0, 1])  # as in the buckets of DDP
def test_it_masks_as_torch_does(
    dtype: Any, most: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dg_lightning.rewiring import mask_kernel

    monkeypatch.setattr(mask_kernel, "_MOST", most)
    generator = torch.Generator().manual_seed(shift)
    gradients, masks, rooms = [], [], []
    for shape in ((3, 4, 2, 2), (1, 1), (64, 128), (150, 128), (7, 5)):
        size = torch.Size(shape).numel()
        mask = torch.rand(shape, generator=generator) < 0.3
        values = torch.randn(shape, generator=generator).to(dtype)
        values[~mask & (values > 1)] = torch.inf
        values[~mask & (values < -1)] = torch.nan
        room = torch.full((size + shift + 8,), 7.0, dtype=dtype, device=DEVICE)
        room[shift : shift + size] = values.flatten().to(DEVICE)
        gradients.append(room[shift : shift + size].view(shape))
        masks.append(mask.to(DEVICE))
        before, wanted = room.clone(), room.clone()
        wanted[shift : shift + size].view(shape).masked_fill_(~masks[-1], 0)
        rooms.append((room, before, wanted))
    again = mask_kernel.masked_at_once(gradients, masks)
    assert again is not None
    for _ in range(2):
        for room, before, wanted in rooms:
            assert torch.equal(room, wanted)  # also what lies around
            room.copy_(before)
        again()


@here
def test_the_mask_of_now_counts() -> None:
    from dg_lightning.rewiring.mask_kernel import masked_at_once

    mask, gradient = torch.eye(4, device=DEVICE).bool(), torch.ones(4, 4, device=DEVICE)
    again = masked_at_once([gradient], [mask])
    assert again is not None
    assert torch.equal(gradient, mask.float())
    mask.logical_not_()
    gradient.fill_(2.0)
    again()
    assert torch.equal(gradient, 2 * mask.float())


@here
def test_what_it_does_not_do_is_left_to_torch() -> None:
    from dg_lightning.rewiring.mask_kernel import masked_at_once

    mask, gradient = torch.eye(4, device=DEVICE).bool(), torch.ones(4, 4, device=DEVICE)
    assert masked_at_once([gradient.T], [mask]) is None
    assert masked_at_once([gradient], [mask.T]) is None
    apart = torch.ones(17, device=DEVICE).bool()[1:].view(4, 4)
    assert masked_at_once([gradient], [apart]) is None
    assert masked_at_once([gradient, gradient.double()], [mask, mask]) is None
    assert masked_at_once([gradient[:2]], [mask]) is None
    assert masked_at_once([gradient.to(torch.complex64)], [mask]) is None
    assert masked_at_once([gradient.to(torch.float8_e4m3fn)], [mask]) is None
