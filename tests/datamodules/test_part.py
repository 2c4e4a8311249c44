from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional as tv

from dg_lightning.datamodules._files import ArrayTable
from dg_lightning.datamodules._splits import CropFlip, Normalize, Split, stratified_split

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def pictures(samples: int, size: int = 32) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (samples, 3, size, size), dtype=np.uint8)


def as_pil(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image.transpose(1, 2, 0))


def test_normalised_values_are_torchvisions_to_the_last_bit() -> None:
    every_byte = np.arange(256, dtype=np.uint8).repeat(3 * 4).reshape(1, -1, 3, 32)
    images = np.ascontiguousarray(every_byte.transpose(0, 2, 1, 3))
    route = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    expected = torch.stack([route(as_pil(image)) for image in images])
    assert torch.equal(Normalize(MEAN, STD)(torch.from_numpy(images)), expected)


@pytest.mark.parametrize("mode", ["reflect", "constant"])
@pytest.mark.parametrize(("padding", "flip"), [(4, True), (4, False), (0, True)])
def test_a_batch_is_cropped_and_mirrored_as_torchvision_does_it_one_by_one(
    padding: int, flip: bool, mode: Any
) -> None:
    images, change = pictures(64), CropFlip(padding, flip, mode)
    draws = change.draw(np.random.default_rng(1), 64)
    expected = []
    for i, image in enumerate(images):
        padded = tv.pad(as_pil(image), [padding], padding_mode=mode)
        cropped = tv.crop(padded, int(draws["top"][i]), int(draws["left"][i]), 32, 32)
        mirrored = tv.hflip(cropped) if draws["flip"][i] else cropped
        expected.append(tv.normalize(tv.to_tensor(mirrored), MEAN, STD))
    changed = Normalize(MEAN, STD)(change.apply(torch.from_numpy(images), draws))
    assert torch.equal(changed, torch.stack(expected))


def test_every_image_has_draws_of_its_own_that_cover_all_crops() -> None:
    draws = CropFlip(4).draw(np.random.default_rng(0), 20_000)
    corners = np.stack([draws["top"], draws["left"], draws["flip"]], 1)
    kinds, counts = np.unique(corners, axis=0, return_counts=True)
    assert len(kinds) == 9 * 9 * 2
    expected = 20_000 / len(kinds)
    # Chi-squared of 161 degrees of freedom: below 221 in 99.9 % of all draws.
    assert ((counts - expected) ** 2 / expected).sum() < 221


def test_augmentation_does_not_depend_on_the_batch_a_sample_is_in() -> None:
    part = Split(ArrayTable(pictures(20)), np.arange(20), torch.arange(20), None, CropFlip(4))
    together = part.get_batch(np.arange(20), seed=3, epoch=5)[0]
    for index in (0, 7, 19):
        alone = part.get_batch(np.array([index]), seed=3, epoch=5)[0]
        assert torch.equal(alone[0], together[index])
    assert not torch.equal(part.get_batch(np.arange(20), seed=3, epoch=6)[0], together)
    assert not torch.equal(part.get_batch(np.arange(20), seed=4, epoch=5)[0], together)


def test_the_table_is_left_as_it_is() -> None:
    images = pictures(8)
    part = Split(
        ArrayTable(images), np.arange(8), torch.arange(8), Normalize(MEAN, STD), CropFlip(4)
    )
    part.get_batch(np.arange(8))
    assert np.array_equal(images, pictures(8))


@given(
    counts=st.lists(st.integers(10, 40), min_size=2, max_size=5),
    share=st.sampled_from([0.1, 0.2, 0.5]),
    seed=st.integers(0, 5),
)
def test_a_split_is_disjoint_exhaustive_and_stratified(
    counts: list[int], share: float, seed: int
) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    names = [str(i) for i in range(len(counts))]
    indices = np.random.default_rng(seed).permutation(len(labels))
    first, second = stratified_split(indices, labels, share, seed, names)
    assert sorted(np.concatenate([first, second])) == list(range(len(labels)))
    for label, count in enumerate(counts):
        assert abs(int((labels[second] == label).sum()) - share * count) <= 1
    again = stratified_split(indices, labels, share, seed, names)[1]
    assert np.array_equal(again, second)


@pytest.mark.parametrize(
    ("labels", "share", "message"),
    [
        ([0] * 20 + [1], 0.5, "class 'b' has 1 of 21"),
        ([0] * 20, 0.5, "class 'b' has 0 of 20"),
        ([0] * 5 + [1] * 5, 0.1, "share of 0.1 of 10 samples .* 2 classes"),
        ([0] * 97 + [1] * 3, 0.1, "Class 'b' has 3 of the 100 samples to split"),
        ([0, 1] * 10, 0.0, "`val_share` must be above 0 and below 1, got 0.0"),
        ([0, 1] * 10, 1.5, "`val_share` must be above 0 and below 1, got 1.5"),
    ],
)
def test_a_class_that_cannot_be_split_is_named(
    labels: list[int], share: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stratified_split(np.arange(len(labels)), torch.tensor(labels), share, 0, ["a", "b"])
