"""Handwritten digits bundled with scikit-learn, which need no download."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from ._files import Save, Tables
from ._splits import Split, stratified_split
from .base import BaseDataModule


class DigitsDataModule(BaseDataModule):
    """1,797 greyscale images of 8 x 8 pixels, ten classes, scaled to [0, 1].

    A fifth of the images is used for testing, and a tenth of the rest for validation.

    Licence: CC BY 4.0. Reference: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten
    Digits", UCI Machine Learning Repository, 1998 (its test split, as bundled with scikit-learn).

    Args:
        batch_size: Training batch size.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        **options: Further arguments of `BaseDataModule`, such as `root` and `split_seed`.

    >>> data = DigitsDataModule(batch_size=32)
    >>> data.setup("fit")
    >>> next(iter(data.train_dataloader()))[0].shape
    torch.Size([32, 1, 8, 8])
    """

    input_shape = (1, 8, 8)
    class_names = tuple("0123456789")

    def __init__(
        self,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)

    @override
    def sources(self) -> Sequence[Path]:
        return ()

    @override
    def decode(self, save: Save) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        save("images", [digits.images[:, None].astype(np.float32) / 16])
        save("labels", [digits.target])

    @override
    def split(self, tables: Tables) -> dict[str, Split]:
        labels = tables.labels()
        every = np.arange(len(labels))
        rest, test = stratified_split(every, labels, 0.2, self.split_seed, self.class_names)
        train, val = stratified_split(rest, labels, 0.1, self.split_seed, self.class_names)
        rows = {"train": train, "val": val, "test": test}
        return {name: Split(tables["images"], of, labels[of]) for name, of in rows.items()}
