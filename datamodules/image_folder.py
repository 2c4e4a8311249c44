"""Your own images, from a folder with a subfolder for each class."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from typing_extensions import override

from ._files import Save, Tables, read_chunks
from ._fitted import (
    PARTS,
    FittedDataModule,
    find_parts,
    hash_rows,
    named_parts,
    seen_samples,
)
from ._splits import CropFlip, Normalize, Split, stratified_split
from .base import check_choice

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # other formats, such as EPS, may run code
_DAMAGED = (OSError, SyntaxError, ValueError)  # what Pillow raises for a damaged file
_KINDS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet statistics


@dataclass(frozen=True)
class _ImagePreparation:
    """Image preprocessing settings, as plain values for checkpoints and exports."""

    class_names: Sequence[str]
    input_shape: Sequence[int]
    mean: Sequence[float] = _MEAN
    std: Sequence[float] = _STD
    divide_by: int = 255
    seen: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {"kind": "images", **asdict(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "_ImagePreparation":
        names = {entry.name for entry in fields(cls)}
        if values.get("kind") != "images" or values.keys() - {"kind"} != names:
            raise ValueError(
                "The checkpoint was not trained on a folder of images: use one that was."
            )
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True)
class _Image:
    path: str
    label: str | None
    part: str | None


class ImageFolderDataModule(FittedDataModule):
    """Images from a folder with a subfolder for each class. Greyscale images become RGB.

        path/<class>/**/*.jpg                    split at random, stratified by class
        path/{train,val,test}/<class>/**/*.jpg   split by folder; missing splits are held out

    Images are scaled and centre-cropped to a square. They are decoded once and cached.
    With a checkpoint, `test` uses the labelled images that the model has not seen. `predict` covers
    all images, and the folder may contain images without a class.

    Args:
        batch_size: Training batch size.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        path: The folder, relative to the working folder or to the root.
        size: Height and width of the images, in pixels.
        augment: `crop_flip` shifts training images by up to an eighth of their size and flips half
            of them. `flip` only flips images.
        val_share: Share of the images for validation if there is no folder `val`.
        test_share: Share of the images for testing if there is no folder `test`.
        **options: Further arguments of `BaseDataModule`, such as `root` and `split_seed`.
    """

    sample = "image"
    preparation_type = _ImagePreparation
    needs: ClassVar = {"PIL": "pillow"}

    def __init__(
        self,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        path: str = "images",
        size: int = 64,
        augment: Literal["crop_flip", "flip", "none"] = "crop_flip",
        val_share: float = 0.1,
        test_share: float = 0.2,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)
        self.path = Path(path) if Path(path).exists() else self.root / path
        if size < 1:
            raise ValueError(f"`size` must be at least 1, got {size}.")
        self.size = size
        self.augment = check_choice("augment", augment, "crop_flip", "flip", "none")
        self.val_share, self.test_share = val_share, test_share
        if min(val_share, test_share) <= 0 or val_share + test_share >= 1:
            raise ValueError(
                "`val_share` and `test_share` must be above 0, with a sum below 1, got "
                f"{val_share} and {test_share}."
            )

    @property
    @override
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.metadata["preparation"]["class_names"])

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        return (3, self._side, self._side)

    @property
    def _side(self) -> int:
        return self.size if self._preparation is None else int(self._preparation.input_shape[-1])

    @override
    def fitted_preparation(self) -> _ImagePreparation:
        return _ImagePreparation.from_plain(self.metadata["preparation"])

    @override
    def sources(self) -> Sequence[Path | str]:
        if not self.path.is_dir():
            return [self.path]
        found = [image.path for image in self._images()]
        if not found:
            raise ValueError(
                f"{self.path} has no images in class folders ({', '.join(_KINDS)}): use another "
                "`path`."
            )
        return found

    @override
    def settings(self) -> Mapping[str, Any]:
        names = ("size", "val_share", "test_share", "split_seed")
        return {name: getattr(self, name) for name in names} | self.preparation_settings()

    def _images(self) -> list[_Image]:
        """Return the images in a fixed order, with their class and split if they have one."""
        folders = _folders(self.path)
        given = named_parts((folder.name for folder in folders), f"{self.path}")
        found = [
            _Image(path, label.name, None if given is None else given[folder.name])
            for folder in folders
            for label in ([folder] if given is None else _folders(folder))
            for path in _walk(label)
        ]
        if self._preparation is not None:
            found += [_Image(path, None, None) for path in _files(self.path)]
        return found

    @override
    def decode(self, save: Save) -> None:
        images = self._images()
        hashes: list[NDArray[np.int64]] = []
        save("pixels", self._pixels(images, hashes))
        prints = np.concatenate(hashes)
        fitted = self._preparation
        names = fitted.class_names if fitted else sorted({str(image.label) for image in images})
        place = {name: index for index, name in enumerate(names)}
        labels = np.array([place.get(image.label or "", -1) for image in images])
        if fitted is None:
            parts = self._split(images, labels, names)
            seen = seen_samples(prints, parts)
            fitted = _ImagePreparation(list(names), [3, self.size, self.size], seen=seen)
        else:
            parts = find_parts(prints, fitted.seen)
            parts[parts == ""] = "test"
            parts[labels < 0] = ""
        reason = "the net was trained on all of them."
        if (labels < 0).all():
            reason = f"no image is in a folder named after a class ({', '.join(names[:10])})."
        save("labels", [labels])
        save("fingerprints", [prints])
        for part in PARTS:
            if len(of := np.flatnonzero(parts == part)):
                save(part, [of])
        save.metadata(
            preparation=fitted.plain(),
            unlabelled=reason,
            files=[os.path.relpath(image.path, self.path) for image in images],
        )

    def _pixels(
        self, images: Sequence[_Image], hashes: list[NDArray[np.int64]]
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield images in chunks, and append their fingerprints to `hashes`."""
        for chunk in read_chunks([image.path for image in images], self._read):
            hashes.append(hash_rows(image.tobytes() for image in chunk))
            yield chunk

    def _read(self, path: str) -> NDArray[np.uint8]:
        """Decode an image to uint8 (3, size, size)."""
        from PIL import Image, ImageOps

        side = self._side
        try:
            with Image.open(path, formats=_FORMATS) as image:
                pixels = ImageOps.fit(_as_rgb(image), (side, side), Image.Resampling.BILINEAR)
        except (*_DAMAGED, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} cannot be read ({error}): replace or remove it.") from error
        return np.asarray(pixels).transpose(2, 0, 1)

    def _split(
        self, images: Sequence[_Image], labels: NDArray[np.int64], names: Sequence[str]
    ) -> NDArray[Any]:
        """Return the split of each image, and hold out training images for missing splits."""
        parts = np.array([image.part or "train" for image in images], dtype=object)
        shares = {"test": self.test_share, "val": self.val_share}
        left = 1.0
        for part, share in shares.items():
            if not (parts == part).any():
                of = np.flatnonzero(parts == "train")
                classes = torch.from_numpy(labels)
                seed = self.split_seed
                _, held_out = stratified_split(of, classes, share / left, seed, names)
                parts[held_out] = part
                left -= share
        return parts

    @override
    def split(self, tables: Tables) -> dict[str, Split]:
        normalize = Normalize(
            self.metadata["preparation"]["mean"], self.metadata["preparation"]["std"]
        )
        parts = self.make_parts(tables, tables["pixels"], tables.labels(), normalize)
        if self.augment != "none":
            shift = self._side // 8 if self.augment == "crop_flip" else 0
            parts["train"].augmentation = CropFlip(shift)
        return parts

    @override
    def describe_samples(self) -> dict[str, Sequence[Any]]:
        names = self.class_names
        labels = [names[label] if label >= 0 else "" for label in self._everything.labels.tolist()]
        parts = find_parts(self._tables()["fingerprints"].array, self.current_preparation().seen)
        return {"file": self.metadata["files"], "true_label": labels, "part": parts.tolist()}


def _folders(folder: Path) -> list[Path]:
    """Return the subfolders, but skip links, because they may lead anywhere or form a cycle."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and path.exists() and path.is_dir():
            rank_zero_warn(
                f"{path} is a link to a folder and is ignored: replace it with the folder."
            )
        elif path.is_dir() and not path.name.startswith("."):
            found.append(path)
    return found


def _files(folder: Path) -> list[str]:
    """Return the images directly in a folder, sorted."""
    return [
        str(path)
        for path in sorted(folder.iterdir())
        if path.name.lower().endswith(_KINDS) and not path.name.startswith(".") and path.is_file()
    ]


def _walk(folder: Path) -> list[str]:
    """Return the images in a folder and its subfolders."""
    return _files(folder) + [path for inner in _folders(folder) for path in _walk(inner)]


def _as_rgb(image: Any) -> Any:
    """Convert an image to upright 8-bit RGB on a white background, as a viewer shows it."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(np.uint16) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise OSError(f"pixels of mode {image.mode} have no known range, expected 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
