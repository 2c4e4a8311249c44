"""Reading a checkpoint without running any code that it names."""

import pickle
from pathlib import Path
from typing import IO, Any, Self

import fsspec
import lightning.pytorch as pl
import torch

from dg_lightning.spec import check_trusted

__all__ = ["TrustedLoading", "preparation_in", "read_checkpoint"]

_UNREADABLE = (RuntimeError, ValueError, EOFError, KeyError, OSError, pickle.UnpicklingError)


def read_checkpoint(source: str | Path | IO[bytes]) -> dict[str, Any]:
    """Return a Lightning checkpoint, if it names classes of trusted packages only.

    Tensors of a local file stay on the disk. An open file is left where it was.

    Raises:
        ValueError: If it is no checkpoint, or not to be trusted.
    """
    if not isinstance(source, (str, Path)):
        start = source.tell()
        content = torch.load(source, map_location="cpu", weights_only=True)
        source.seek(start)
        return _checked(content, "The checkpoint")
    if "://" in str(source):
        with fsspec.open(str(source), "rb") as stream:
            return read_checkpoint(stream)
    path = Path(source)
    if not path.exists():
        raise ValueError(
            f"There is no checkpoint {str(path)!r}: give the path of one with --ckpt_path."
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _UNREADABLE as error:
        if "global" in str(error).lower() or _is_pickle(path):
            raise ValueError(
                f"{str(path)!r} holds Python objects, which may run code when they are read: give "
                "a checkpoint of tensors and plain values."
            ) from error
        raise ValueError(
            f"{str(path)!r} is not a checkpoint, or was cut short: give another with --ckpt_path."
        ) from error
    return _checked(content, repr(str(path)))


def _is_pickle(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:1] == pickle.PROTO


def _checked(content: Any, source: str) -> dict[str, Any]:
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise ValueError(f"{source} holds no checkpoint of a Trainer: give another one.")
    if not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{source} holds no `state_dict`, the weights: give another checkpoint.")
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"{source}: `{key}` is not a dict: give another checkpoint.")
        check_trusted(content.get(key, {}), source)
    return content


def preparation_in(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the data of a training was prepared: its features, scaling and classes."""
    for value in checkpoint.values():
        if isinstance(value, dict) and isinstance(value.get("preparation"), dict):
            found: dict[str, Any] = value["preparation"]
            return found
    return None


class TrustedLoading(pl.LightningModule):
    """A LightningModule whose `load_from_checkpoint` builds classes of trusted packages only."""

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path | IO[bytes], *args: Any, **kwargs: Any
    ) -> Self:
        """Return the trained module of a checkpoint, with Lightning's arguments.

        See `dg_lightning.trust`. With `weights_only=False` nothing is checked: reading such a file
        may run any code.
        """
        if kwargs.get("weights_only") is not False:
            saved = read_checkpoint(checkpoint_path)
            # Lightning's command line would let its parser import what the other values name.
            if "_instantiator" in saved.get("hyper_parameters", {}):
                raise ValueError(f"The checkpoint is not of a {cls.__name__}: give another one.")
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
