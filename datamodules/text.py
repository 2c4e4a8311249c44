"""Text as bytes: a folder of files, or the source code of the running Python."""

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from typing_extensions import override

from ._files import Save, Tables
from ._splits import Windows
from .base import BaseDataModule

_BYTES = 256
_NOT_STANDARD = {"site-packages", "dist-packages"}


class TextDataModule(BaseDataModule):
    """Windows of text for byte-level language models. By default, no download is needed.

    Duplicate files are skipped. Every file is assigned to a single split, at random according to
    `split_seed` and the shares of the bytes. Each training epoch samples random windows, while
    validation and test use evenly spaced windows. A batch is a pair of input bytes and the bytes
    that follow them.

    Args:
        batch_size: Windows per training batch.
        eval_batch_size: Windows per batch for validation and test; `batch_size` if None.
        folder: A folder of text files, searched recursively. If None, the source code of the
            running Python is used, whose standard library has up to 30 MB.
        packages: Whether to add the source code of installed packages, which is about 300 MB with
            torch. Cannot be combined with `folder`.
        pattern: Pattern for the names of files in the folder, such as `*.txt`.
        context: Length of a window in bytes.
        windows_per_epoch: Windows per training epoch. If None, as many as fit side by side.
        eval_windows: Windows for validation and also for testing. If None, as many as fit side by
            side.
        val_share: Share of the bytes for validation.
        test_share: Share of the bytes for testing.
        prompt: Text that `predict` continues.
        samples: Number of continuations to sample.
        sample_length: Length of a continuation in bytes.
        sample_temperature: Sampling temperature. With 0, the most probable byte is always chosen.
        **options: Further arguments of `BaseDataModule`, such as `cache_dir` and `split_seed`.

    >>> data = TextDataModule(batch_size=8, context=64)
    >>> data.setup("fit")
    >>> next(iter(data.train_dataloader()))[0].shape
    torch.Size([8, 64])
    """

    class_names = tuple(repr(bytes([byte]))[2:-1] for byte in range(_BYTES))

    def __init__(
        self,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        folder: str | None = None,
        packages: bool = False,
        pattern: str = "*",
        context: int = 256,
        windows_per_epoch: int | None = None,
        eval_windows: int | None = None,
        val_share: float = 0.05,
        test_share: float = 0.05,
        prompt: str = "def ",
        samples: int = 4,
        sample_length: int = 512,
        sample_temperature: float = 0.8,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, **options)
        counts = {"context": context, "samples": samples, "sample_length": sample_length}
        optional = {"windows_per_epoch": windows_per_epoch, "eval_windows": eval_windows}
        for name, value in (counts | {k: v for k, v in optional.items() if v is not None}).items():
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if min(val_share, test_share) <= 0 or val_share + test_share >= 1:
            raise ValueError(
                "`val_share` and `test_share` must be above 0, with a sum below 1, got "
                f"{val_share} and {test_share}."
            )
        if sample_temperature < 0:
            raise ValueError(f"`sample_temperature` must be at least 0, got {sample_temperature}.")
        if not prompt:
            raise ValueError("`prompt` must have at least one character.")
        if packages and folder is not None:
            raise ValueError("`packages` and `folder` are mutually exclusive: set one.")
        self.packages = packages
        self.folder = None if folder is None else Path(folder).absolute()
        self.pattern, self.context = pattern, context
        self.windows_per_epoch, self.eval_windows = windows_per_epoch, eval_windows
        self.shares = {"val": val_share, "test": test_share}
        self.prompt, self.samples = prompt, samples
        self.sample_length, self.sample_temperature = sample_length, sample_temperature

    @override
    def use_preparation(self, preparation: Mapping[str, Any]) -> None:
        context = (preparation.get("input_shape") or [self.context])[0]
        if context != self.context:
            rank_zero_info(f"Windows have {context} bytes, as in training.")
            self.context = context
            if self._parts:
                parts: dict[str, Any] = dict(self.split(self._tables()))
                self._parts = parts
        super().use_preparation(preparation)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Length of a window."""
        return (self.context,)

    @override
    def sources(self) -> Sequence[Path]:
        if self.folder is None:
            return _python_sources(self.packages)
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"`folder` must be a folder of text files, got {self.folder}: use another, or omit "
                "it to use the source code of Python."
            )
        found = [path for path in sorted(self.folder.rglob(self.pattern)) if path.is_file()]
        if len(found) < 3:
            raise ValueError(
                f"TextDataModule needs at least three files, one per split, got {len(found)} that "
                f"match {self.pattern!r} in {self.folder}: add files, or change `pattern`."
            )
        return found

    @override
    def settings(self) -> Mapping[str, Any]:
        return {"split_seed": self.split_seed, **self.shares}

    @override
    def decode(self, save: Save) -> None:
        files = list(_different_files(self.sources()))
        if len(files) < 3:
            raise ValueError(
                "TextDataModule needs at least three different text files, one per split, got "
                f"{len(files)}: add files, or change `pattern`."
            )
        total = sum(map(len, files))
        order = np.random.default_rng(self.split_seed).permutation(len(files)).tolist()
        for left, (name, share) in enumerate(self.shares.items()):
            held_out: list[int] = []
            room = share * total
            for index in list(order):
                # Leave at least one file for each later split and for training.
                if len(files[index]) <= room and len(order) > len(self.shares) - left:
                    room -= len(files[index])
                    held_out.append(index)
                    order.remove(index)
            if not held_out:
                held_out = [min(order, key=lambda index: len(files[index]))]
                order.remove(held_out[0])
            save(name, [files[index] for index in held_out])
        save("train", [files[index] for index in order])

    @override
    def split(self, tables: Tables) -> dict[str, Windows]:  # type: ignore[override]
        wanted = {"train": self.windows_per_epoch, "val": self.eval_windows}
        parts = {}
        for name in ("train", "val", "test"):
            text = tables[name]
            room = (len(text) - 1) // self.context
            count = wanted.get(name, self.eval_windows) or max(room, 1)
            parts[name] = Windows(text, self.context, count, random=name == "train")
        return parts

    @override
    def check_parts(self, parts: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            if len(part.text) <= self.context:
                raise ValueError(
                    f"The {name} split has {len(part.text)} bytes, but a window needs "
                    f"{self.context + 1}: add more or larger files, or reduce `context`."
                )

    @override
    def describe_parts(self) -> str:
        parts: dict[str, Any] = dict(self._parts)
        sizes = ", ".join(f"{name} {len(part.text):,}" for name, part in parts.items())
        return f"{sizes} bytes, in windows of {self.context}"

    @override
    def preparation(self) -> dict[str, Any]:
        return {"class_names": list(self.class_names), "input_shape": list(self.input_shape)}

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        prompt = torch.tensor(list(self.prompt.encode()))
        options = {"length": self.sample_length, "temperature": self.sample_temperature}
        items: Any = [{"prompt": prompt, **options}] * self.samples
        return DataLoader(items, batch_size=self.samples)

    @staticmethod
    def text_of(tokens: Sequence[int]) -> str:
        """Decode bytes, and turn invalid bytes into replacement characters."""
        return bytes(tokens).decode("utf-8", errors="replace")


@lru_cache
def _python_sources(packages: bool) -> list[Path]:
    """Return the source files of the running Python, in a fixed order."""
    places = sysconfig.get_paths()
    library, installed = Path(places["stdlib"]), Path(places["purelib"])
    found = [p for p in library.rglob("*.py") if not _NOT_STANDARD & set(p.parts)]
    return sorted(found) + (sorted(installed.rglob("*.py")) if packages else [])


def _different_files(paths: Sequence[Path | str]) -> Iterator[NDArray[np.uint8]]:
    """Yield the contents of text files, without duplicates."""
    seen, binary = set(), 0
    for path in paths:
        content = Path(path).read_bytes()
        digest = hashlib.sha256(content).digest()
        if not content or digest in seen:
            continue
        seen.add(digest)
        if b"\0" in content:
            binary += 1
            continue
        yield np.frombuffer(content, np.uint8)
    if binary:
        rank_zero_warn(f"TextDataModule ignores {binary} files that are not text.")
