"""Reading a checkpoint without running any code that it names."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Self

import fsspec
import lightning.pytorch as pl
import torch
import yaml

from dg_lightning.training.spec import check_trusted

__all__ = ["TrustedLoading", "preparation_in", "read_checkpoint"]

_UNREADABLE = (RuntimeError, ValueError, EOFError, KeyError, OSError, pickle.UnpicklingError)
# Where Lightning looks for hyper-parameters; the others are of its first versions.
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_OUTDATED = ("hparams", "module_arguments", "hparams_type")
_NOT_OF_DATA = (*_HYPER_PARAMETERS, "callbacks", "loops", "state_dict")


def read_checkpoint(source: str | Path | IO[bytes], also: Iterable[str] = ()) -> dict[str, Any]:
    """Return a Lightning checkpoint, if it names classes of trusted packages only.

    Tensors of a local file stay on the disk. An open file is left where it was.

    Args:
        source: A path, a URL or an open file.
        also: Further packages that are trusted this time.

    Raises:
        ValueError: If it is no checkpoint, or not to be trusted.
    """
    if isinstance(source, (str, Path)) and "://" in str(source):
        with fsspec.open(str(source), "rb") as stream:
            return read_checkpoint(stream, also)
    is_path = isinstance(source, (str, Path))
    name = repr(str(source)) if is_path else "The file"
    if isinstance(source, (str, Path)) and not Path(source).exists():
        raise ValueError(f"There is no checkpoint {name}: give the path of one with --ckpt_path.")
    start = 0 if isinstance(source, (str, Path)) else source.tell()
    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=is_path)
    except _UNREADABLE as error:
        if "GLOBAL" in str(error) or _first_byte(source) == pickle.PROTO:
            raise ValueError(
                f"{name} holds Python objects, which may run code when they are read: give a "
                "checkpoint of tensors and plain values."
            ) from error
        raise ValueError(
            f"{name} is not a checkpoint, or was cut short: give another with --ckpt_path."
        ) from error
    if not isinstance(source, (str, Path)):
        source.seek(start)
    return _checked(content, name, also)


def _first_byte(source: str | Path | IO[bytes]) -> bytes:
    if not isinstance(source, (str, Path)) or not Path(source).is_file():
        return b""
    with Path(source).open("rb") as file:
        return file.read(1)


def _checked(content: Any, source: str, also: Iterable[str]) -> dict[str, Any]:
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise ValueError(f"{source} holds no checkpoint of a Trainer: give another one.")
    if not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{source} holds no `state_dict`, the weights: give another checkpoint.")
    for name, tensor in content["state_dict"].items():
        if isinstance(tensor, torch.Tensor) and bool(tensor.isnan().any()):
            raise ValueError(f"{source} holds weights that are no numbers ({name}): give another.")
    for key in _OUTDATED:
        if key in content:
            raise ValueError(
                f"{source} holds `{key}`, which Lightning writes no longer: give another one."
            )
    for key in _HYPER_PARAMETERS:
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"{source}: `{key}` is not a dict: give another checkpoint.")
        check_trusted(content.get(key, {}), source, also)
    return content


def preparation_in(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the data of a training was prepared: its features, scaling and classes."""
    for key, value in checkpoint.items():
        is_state = key not in _NOT_OF_DATA and isinstance(value, dict)
        if is_state and isinstance(value.get("preparation"), dict):
            found: dict[str, Any] = value["preparation"]
            return found
    return None


class TrustedLoading(pl.LightningModule):
    """A LightningModule whose `load_from_checkpoint` builds classes of trusted packages only."""

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return the trained module of a checkpoint, with Lightning's arguments.

        See `dg_lightning.trust`. With `weights_only=False` nothing is checked: reading such a file
        may run any code.
        """
        if weights_only is not False:
            saved = read_checkpoint(checkpoint_path)
            # Lightning's command line would let its parser import what the other values name.
            if "_instantiator" in saved.get("hyper_parameters", {}):
                raise ValueError(f"The checkpoint is not of a {cls.__name__}: give another one.")
            if hparams_file is not None:
                check_trusted(yaml.safe_load(Path(hparams_file).read_text("utf-8")), hparams_file)
        return super().load_from_checkpoint(
            checkpoint_path, map_location, hparams_file, strict, weights_only is not False, **kwargs
        )
