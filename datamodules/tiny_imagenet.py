"""Tiny ImageNet: small photographs in 200 classes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ._files import Download, Save, Tables, list_files, read_chunks
from ._splits import CropFlip, Normalize, PaddingMode, Split, split_images
from .base import BaseDataModule, check_choice

_SIZE = 64
_STATISTICS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "tiny_imagenet": ((0.480, 0.448, 0.398), (0.277, 0.269, 0.282)),
}
_SHIFTS = {"crop_flip": 4, "flip": 0, "none": None}  # pixels


class TinyImageNetDataModule(BaseDataModule):
    """100,000 training and 10,000 test images of 3 x 64 x 64 pixels, 200 classes.

    The official validation images are the test set, because the test labels are not public.
    Validation samples are a stratified subset of the training images. Greyscale images become RGB.

        root/tiny-imagenet-200/wnids.txt, words.txt
        root/tiny-imagenet-200/train/<wnid>/images/*.JPEG
        root/tiny-imagenet-200/val/images/*.JPEG, val_annotations.txt

    Licence: ImageNet terms of access, non-commercial research and education. Reference: Y. Le,
    X. Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS231N, 2015. 248 MB packed.

    Args:
        batch_size: Training batch size.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        val_share: Share of the training images held out for validation.
        augment: `crop_flip` shifts training images by up to 4 pixels and flips half of them. `flip`
            only flips images.
        padding_mode: What fills the border of a shifted image. `reflect` mirrors the image, and
            `constant` is black, as published. GateNets learn to recognise a black border.
        statistics: Dataset whose mean and standard deviation normalise the images: `imagenet` or
            `tiny_imagenet`.
        **options: Further arguments of `BaseDataModule`, such as `root` and `split_seed`.
    """

    input_shape = (3, _SIZE, _SIZE)
    needs: ClassVar = {"PIL": "pillow"}
    downloads = (
        Download(
            "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "md5:90528d7ca1a48142e341f4ef8d21d0de",
            "tiny-imagenet-200",
            folder="tiny-imagenet-200",
        ),
    )

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int | None = 256,
        val_share: float = 0.1,
        augment: Literal["crop_flip", "flip", "none"] = "crop_flip",
        padding_mode: PaddingMode = "reflect",
        statistics: Literal["imagenet", "tiny_imagenet"] = "imagenet",
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)
        self.val_share = val_share
        self.augment = check_choice("augment", augment, *_SHIFTS)
        self.padding_mode = check_choice("padding_mode", padding_mode, *get_args(PaddingMode))
        self.statistics = check_choice("statistics", statistics, *_STATISTICS)
        self.folder = self.root / "tiny-imagenet-200"

    @property
    @override
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.metadata["class_names"])

    @override
    def sources(self) -> Sequence[Path | str]:
        lists = [self.folder / "wnids.txt", self.folder / "val" / "val_annotations.txt"]
        if not all(path.exists() for path in lists):
            return lists
        words = [self.folder / "words.txt"] if (self.folder / "words.txt").exists() else []
        train, test = self._images()
        return [*lists, *words, *train, *test]

    def _images(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the training and test images with their WordNet IDs, in a fixed order."""
        train = {
            path: wnid
            for wnid in self._wnids()
            for path in list_files(self.folder / "train" / wnid / "images", ".JPEG")
        }
        annotations = self.folder / "val" / "val_annotations.txt"
        lines = sorted(line for line in annotations.read_text().splitlines() if line)
        if bad := [line for line in lines if "\t" not in line]:
            raise ValueError(f"{annotations} is damaged: it has the line {bad[0]!r}; replace it.")
        named = (line.split("\t")[:2] for line in lines)
        return train, {f"{self.folder}/val/images/{name}": wnid for name, wnid in named}

    def _wnids(self) -> list[str]:
        return sorted((self.folder / "wnids.txt").read_text().split())

    @override
    def decode(self, save: Save) -> None:
        wnids = self._wnids()
        for part, images in zip(("train", "test"), self._images(), strict=True):
            if unknown := set(images.values()) - set(wnids):
                raise ValueError(
                    f"{self.folder}/wnids.txt lacks {min(unknown)}, the class of some images: "
                    "add it."
                )
            save(f"{part}_images", read_chunks(list(images), read_rgb))
            save(f"{part}_labels", [np.array([wnids.index(wnid) for wnid in images.values()])])
        words = self.folder / "words.txt"
        lines = words.read_text(errors="replace").splitlines() if words.exists() else []
        meaning = dict(line.split("\t", 1) for line in lines if "\t" in line)
        save.metadata(class_names=[meaning.get(wnid, wnid) for wnid in wnids])

    @override
    def split(self, tables: Tables) -> dict[str, Split]:
        normalize = Normalize(*_STATISTICS[self.statistics])
        shift = _SHIFTS[self.augment]
        augmentation = None if shift is None else CropFlip(shift, padding_mode=self.padding_mode)
        return split_images(
            tables, self.class_names, self.val_share, self.split_seed, normalize, augmentation
        )


def read_rgb(path: str) -> NDArray[np.uint8]:
    """Decode an image to uint8 (3, 64, 64)."""
    from PIL import Image

    try:
        with Image.open(path, formats=["JPEG"]) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{path} is damaged ({os.path.getsize(path)} bytes: {error}): replace it."
        ) from error
    if pixels.shape[:2] != (_SIZE, _SIZE):
        raise ValueError(f"{path} must have {_SIZE} x {_SIZE} pixels, got {pixels.shape[:2]}.")
    return pixels.transpose(2, 0, 1)
