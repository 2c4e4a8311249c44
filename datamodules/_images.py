"""Splits of image datasets; validation images are held out from the training images."""

from collections.abc import Sequence

import numpy as np

from ._part import Augmentation, Normalize, Part, stratified_split
from ._tables import Tables

__all__ = ["split_images"]


def split_images(
    tables: Tables,
    class_names: Sequence[str],
    val_share: float,
    seed: int,
    normalize: Normalize,
    augmentation: Augmentation | None = None,
) -> dict[str, Part]:
    """Split the tables `train_images`, `train_labels`, `test_images` and `test_labels`."""
    for name in ("train", "test"):
        images, labels = tables[f"{name}_images"], tables.labels(f"{name}_labels")
        if len(images) != len(labels):
            raise ValueError(
                f"The {name} files do not belong together: {len(images)} images, {len(labels)} "
                "labels; get them again."
            )
        wrong = labels[(labels < 0) | (labels >= len(class_names))]
        if len(wrong):
            raise ValueError(
                f"A label of the {name} files must be in 0 to {len(class_names) - 1}, got "
                f"{int(wrong[0])}; get them again."
            )
    images, labels = tables["train_images"], tables.labels("train_labels")
    test_images, test_labels = tables["test_images"], tables.labels("test_labels")
    train, val = stratified_split(np.arange(len(labels)), labels, val_share, seed, class_names)
    return {
        "train": Part(images, train, labels[train], normalize, augmentation),
        "val": Part(images, val, labels[val], normalize),
        "test": Part(test_images, np.arange(len(test_labels)), test_labels, normalize),
    }
