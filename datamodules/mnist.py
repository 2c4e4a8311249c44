"""MNIST: handwritten digits."""

import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ._files import Download, Save, Tables, check_digest
from ._splits import Normalize, Split, split_images
from .base import BaseDataModule

_FILES = {
    ("train", "images"): "train-images-idx3-ubyte",
    ("train", "labels"): "train-labels-idx1-ubyte",
    ("test", "images"): "t10k-images-idx3-ubyte",
    ("test", "labels"): "t10k-labels-idx1-ubyte",
}


def idx_downloads(folder: str, url: str, digests: Sequence[str]) -> tuple[Download, ...]:
    """Return the downloads for the four files, given their checksums in order."""
    return tuple(
        Download(f"{url}/{name}.gz", digest, f"{folder}/{name}.gz")
        for name, digest in zip(_FILES.values(), digests, strict=True)
    )


class MNISTDataModule(BaseDataModule):
    """60,000 training and 10,000 test images of 28 x 28 pixels, ten classes.

    Validation samples are a stratified subset of the training images. Pixels are scaled to [0, 1]
    and normalised with the mean and standard deviation of the training images, 0.1307 and 0.3081.

        root/MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte, packed (.gz) or not

    Licence: CC BY-SA 3.0. Reference: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-Based
    Learning Applied to Document Recognition", Proceedings of the IEEE 86 (11), 1998. 12 MB packed.

    Args:
        batch_size: Training batch size.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        val_share: Share of the training images held out for validation.
        **options: Further arguments of `BaseDataModule`, such as `root` and `split_seed`.
    """

    input_shape = (1, 28, 28)
    class_names = tuple("0123456789")
    folder = "MNIST/raw"
    mean, std = 0.1307, 0.3081
    downloads = idx_downloads(
        folder,
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        (
            "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    )
    # MD5 checksums of the unpacked files, in the order of the downloads.
    contents: tuple[str, ...] = (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    )

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int | None = 512,
        val_share: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)
        self.val_share = val_share

    @override
    def sources(self) -> Sequence[Path]:
        folder = self.root / self.folder
        plain = [folder / name for name in _FILES.values()]
        return [p if p.exists() else p.with_name(f"{p.name}.gz") for p in plain]

    @override
    def decode(self, save: Save) -> None:
        for (part, what), path, digest in zip(_FILES, self.sources(), self.contents, strict=True):
            published = 60_000 if part == "train" else 10_000
            array = read_idx(path, 3 if what == "images" else 1, published, f"md5:{digest}")
            if what == "images" and array.shape[1:] != self.input_shape[1:]:
                raise ValueError(f"{path} must have images of 28 x 28, got {array.shape[1:]}.")
            save(f"{part}_{what}", [array[:, None] if what == "images" else array])

    @override
    def split(self, tables: Tables) -> dict[str, Split]:
        normalize = Normalize([self.mean], [self.std])
        return split_images(tables, self.class_names, self.val_share, self.split_seed, normalize)


def read_idx(path: Path, dimensions: int, published: int, digest: str) -> NDArray[np.uint8]:
    """Read an IDX file, and verify its checksum if it has as many entries as published."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it and download it again."
        ) from error
    header = 4 * (1 + dimensions)
    numbers = np.frombuffer(content[:header].ljust(header, b"\0"), ">u4").tolist()
    if numbers[0] != 0x0800 + dimensions:
        raise ValueError(f"{path} is not an IDX file with {dimensions} dimensions: replace it.")
    size = header + int(np.prod(numbers[1:]))
    if len(content) != size:
        raise ValueError(
            f"{path} is damaged: its header promises {size} bytes, got {len(content)}; delete it "
            "and download it again."
        )
    if numbers[1] == published:  # a subset has no published checksum
        check_digest(io.BytesIO(content), digest, path)
    return np.frombuffer(content, np.uint8, offset=header).reshape(numbers[1:])
