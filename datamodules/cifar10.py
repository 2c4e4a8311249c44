"""CIFAR-10: small colour photographs in ten classes."""

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ._files import Download, Save, Tables, check_digest
from ._splits import CropFlip, Normalize, PaddingMode, Split, split_images
from .base import BaseDataModule, check_choice

# Files in the Python version of the dataset, with their published MD5 checksums.
_TRAIN = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
}
_TEST = {"test_batch": "40351d587109b95175f43aff81a1287e"}
_PUBLISHED_COUNT = 10_000  # images per file


class CIFAR10DataModule(BaseDataModule):
    """50,000 training and 10,000 test images of 3 x 32 x 32 pixels, ten classes.

    Validation samples are a stratified subset of the training images, and are not augmented.

        root/cifar-10-batches-py/{data_batch_1..5,test_batch}

    Licence: none stated, free for research with citation. Reference: A. Krizhevsky, "Learning
    Multiple Layers of Features from Tiny Images", University of Toronto, 2009. 170 MB packed.

    Args:
        batch_size: Training batch size.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        val_share: Share of the training images held out for validation.
        augment: `crop_flip` shifts training images by up to 4 pixels and flips half of them.
        padding_mode: What fills the border of a shifted image. `reflect` mirrors the image, and
            `constant` is black, as published. GateNets learn to recognise a black border.
        **options: Further arguments of `BaseDataModule`, such as `root` and `split_seed`.
    """

    input_shape = (3, 32, 32)
    class_names = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )
    downloads = (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            "cifar-10-batches-py",
            folder="cifar-10-batches-py",
        ),
    )

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        val_share: float = 0.1,
        augment: Literal["crop_flip", "none"] = "crop_flip",
        padding_mode: PaddingMode = "reflect",
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)
        self.val_share = val_share
        self.augment = check_choice("augment", augment, "crop_flip", "none")
        self.padding_mode = check_choice("padding_mode", padding_mode, *get_args(PaddingMode))

    @override
    def sources(self) -> Sequence[Path]:
        return [self.root / "cifar-10-batches-py" / name for name in {**_TRAIN, **_TEST}]

    @override
    def decode(self, save: Save) -> None:
        for part, digests in {"train": _TRAIN, "test": _TEST}.items():
            folder = self.root / "cifar-10-batches-py"
            batches = [read_batch(folder / name, f"md5:{d}") for name, d in digests.items()]
            save(f"{part}_images", (images for images, _ in batches))
            save(f"{part}_labels", (labels for _, labels in batches))

    @override
    def split(self, tables: Tables) -> dict[str, Split]:
        normalize = Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
        crop = CropFlip(4, padding_mode=self.padding_mode)
        augmentation = crop if self.augment == "crop_flip" else None
        return split_images(
            tables, self.class_names, self.val_share, self.split_seed, normalize, augmentation
        )


class _ArraysOnly(pickle.Unpickler):
    """Unpickles only arrays, so that no code can run."""

    allowed = ("_reconstruct", "ndarray", "dtype", "encode")

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name not in self.allowed or module.split(".")[0] not in ("numpy", "_codecs"):
            raise pickle.UnpicklingError(f"it contains {module}.{name}")
        return super().find_class(module, name)


def read_batch(path: Path, digest: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read images and labels, and verify the checksum unless the file is a subset."""
    content = path.read_bytes()
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        images = batch["data"].reshape(-1, 3, 32, 32)
        labels = np.asarray(batch["labels"], dtype=np.int64)
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(
            f"{path} is damaged ({error}; {len(content)} bytes, expected {digest}): replace it."
        ) from error
    if len(images) != len(labels) or images.dtype != np.uint8:
        raise ValueError(
            f"{path} is damaged: it has {len(images)} images of type {images.dtype} and "
            f"{len(labels)} labels; replace it."
        )
    if len(images) == _PUBLISHED_COUNT:  # a subset has no published checksum
        check_digest(io.BytesIO(content), digest, path)
    return images, labels
