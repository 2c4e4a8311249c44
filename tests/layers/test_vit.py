"""The small Vision Transformer."""

import pytest
import torch

from dg_lightning.layers import VisionTransformer


def test_patches_are_told_apart_by_position() -> None:
    torch.manual_seed(0)
    net = VisionTransformer([1, 8, 8], 3, patch=4, width=12, depth=1, heads=3).eval()
    image = torch.randn(1, 1, 8, 8)
    halves_swapped = image.roll(4, dims=-1)
    assert not torch.allclose(net(image), net(halves_swapped))
    net.position.data.zero_()  # without positions it is a set of patches
    torch.testing.assert_close(net(image), net(halves_swapped))


def test_sizes_must_fit() -> None:
    with pytest.raises(ValueError, match="`patch`=3 must divide the image size 8 x 8"):
        VisionTransformer([1, 8, 8], 3, patch=3)
    with pytest.raises(ValueError, match="`heads`=5 must divide `width`=12"):
        VisionTransformer([1, 8, 8], 3, width=12, heads=5)
