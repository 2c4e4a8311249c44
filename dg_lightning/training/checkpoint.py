"""Reading a checkpoint without running any code that it names."""

import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import IO, Any, Self

import fsspec
import lightning.pytorch as pl
import torch
import yaml
from packaging.version import InvalidVersion, Version
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dg_lightning.training.spec import check_trusted

_UNREADABLE = (RuntimeError, ValueError, EOFError, KeyError, OSError, pickle.UnpicklingError)
# Where Lightning looks for hyper-parameters; the others are of its first versions.
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_OUTDATED = ("hparams", "module_arguments", "hparams_type")
_NOT_OF_DATA = (*_HYPER_PARAMETERS, "callbacks", "loops", "state_dict")
_VERSION = "pytorch-lightning_version"
_MAX_EXPANDED = 2**20  # entries of a tensor that is larger than what the file holds of it
_SPARE_ENTRIES = 2**28  # that a model may have beyond four times its saved weights
_MIN_ENTRIES = 10**5  # that a tensor counts as: very many small ones take time, too
_FACTORIES: set[Callable[..., Any]] = {
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.normal,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
    torch.zeros,
}


@contextmanager
def opened(source: str | Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield a checkpoint as an open file, so that what is checked is what is loaded.

    A URL is downloaded once, into a file that nobody else can change.
    """
    if not isinstance(source, (str, Path)):
        yield source
    elif "://" in str(source):
        with fsspec.open(str(source), "rb") as stream, tempfile.TemporaryFile() as file:
            shutil.copyfileobj(stream, file)
            file.seek(0)
            yield file
    else:
        with _local_path(source).open("rb") as file:
            yield file


def _local_path(source: str | Path) -> Path:
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"There is no checkpoint {str(source)!r}: give the path of one with --ckpt_path."
        )
    return path


_RENAMED_HPARAMS = {"capture": "cuda_graphs"}  # since version 0.2


def read_checkpoint(
    source: str | Path | IO[bytes], also: Iterable[str] = (), name: str | Path | None = None
) -> dict[str, Any]:
    """Return a Lightning checkpoint, if it names classes of trusted packages only.

    Tensors of a local file stay on the disk. An open file is left where it was.

    Args:
        source: A path, a URL or an open file.
        also: Further packages that are trusted this time.
        name: How messages call an open file.

    Raises:
        ValueError: If it is no checkpoint, or not to be trusted.
    """
    if isinstance(source, (str, Path)) and "://" in str(source):
        with opened(source) as file:
            return read_checkpoint(file, also, source)
    is_path = isinstance(source, (str, Path))
    shown = source if isinstance(source, (str, Path)) else name
    named = "The file" if shown is None else repr(str(shown))
    start = 0
    if isinstance(source, (str, Path)):
        _local_path(source)
    else:
        start = source.tell()
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:  # torch stores its tensors as they are
            if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                raise ValueError(f"{named} is compressed, which no checkpoint is: give another.")
    if not isinstance(source, (str, Path)):
        source.seek(start)
    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=is_path)
    except _UNREADABLE as error:
        if "GLOBAL" in str(error) or _first_byte(source, start) == pickle.PROTO:
            raise ValueError(
                f"{named} holds Python objects, which may run code when they are read: give a "
                "checkpoint of tensors and plain values."
            ) from error
        raise ValueError(
            f"{named} is not a checkpoint, or was cut short: give another with --ckpt_path."
        ) from error
    if not isinstance(source, (str, Path)):
        source.seek(start)
    checkpoint = _checked(content, named, also)
    saved = checkpoint.get("hyper_parameters", {})
    for old, new in _RENAMED_HPARAMS.items():
        if old in saved:
            saved[new] = saved.pop(old)
    return checkpoint


def _first_byte(source: str | Path | IO[bytes], start: int) -> bytes:
    if not isinstance(source, (str, Path)):
        source.seek(start)
        return source.read(1)
    if not Path(source).is_file():
        return b""
    with Path(source).open("rb") as file:
        return file.read(1)


def _checked(content: Any, source: str, also: Iterable[str]) -> dict[str, Any]:
    if not isinstance(content, dict) or _VERSION not in content:
        raise ValueError(f"{source} holds no checkpoint of a Trainer: give another one.")
    try:
        Version(content[_VERSION])
    except (InvalidVersion, TypeError) as error:
        raise ValueError(
            f"{source}: `{_VERSION}` is no version, got {content[_VERSION]!r}: give another "
            "checkpoint."
        ) from error
    if not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{source} holds no `state_dict`, the weights: give another checkpoint.")
    if not all(isinstance(name, str) for name in content["state_dict"]):
        raise ValueError(f"{source}: the names of weights must be text: give another checkpoint.")
    for name, tensor in content["state_dict"].items():
        if isinstance(tensor, Tensor) and _is_expanded(tensor):
            raise ValueError(f"{source} holds weights larger than the file ({name}): give another.")
    if any(map(_is_expanded, _tensors(content))):
        raise ValueError(f"{source} holds tensors larger than itself: give another checkpoint.")
    for key in ("callbacks", "loops"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"{source}: `{key}` is not a dict: give another checkpoint.")
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


def check_weights(state_dict: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise ValueError for parameters or buffers that are no finite real numbers.

    A buffer may hold what it holds in a new model: masks of attention are infinite.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in own.keys() & state_dict.keys():
        may_be_infinite = name not in dict(model.named_parameters()) and not _is_usable(own[name])
        if not may_be_infinite and not _is_usable(state_dict[name]):
            raise ValueError(f"The checkpoint holds weights that are no finite numbers ({name}).")


def _is_usable(weight: Any) -> bool:
    if not isinstance(weight, Tensor) or weight.layout != torch.strided:
        return False
    if weight.is_meta or weight.is_quantized or weight.is_nested or weight.is_complex():
        return False
    return bool(weight.to(torch.float32).isfinite().all())


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        return False
    size = tensor.numel() * tensor.element_size()
    return size > max(tensor.untyped_storage().nbytes(), _MAX_EXPANDED)


def _tensors(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested values."""
    pending, seen = [content], set()
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            pending.extend(value.values() if isinstance(value, Mapping) else value)


def limited_to_weights(checkpoint: Mapping[str, Any], source: object) -> "_EntryLimit":
    """Refuse to make models much larger than the weights of a checkpoint.

    Hyper-parameters could ask for any number of units or layers.

    Args:
        checkpoint: The checkpoint.
        source: Where it comes from, to be named in the message.
    """
    weights = [w for w in checkpoint["state_dict"].values() if isinstance(w, Tensor)]
    storages = {w.data_ptr(): w.numel() for w in weights if w.layout == torch.strided}
    return _EntryLimit(4 * sum(max(n, _MIN_ENTRIES) for n in storages.values()), source)


class _EntryLimit(TorchFunctionMode):
    """Refuses to create tensors with many more entries in all than a limit."""

    def __init__(self, limit: int, source: object) -> None:
        super().__init__()
        self.limit, self.entries, self.source = limit + _SPARE_ENTRIES, 0, source

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.clone:
            self._add(args[0].numel())
        elif func in _FACTORIES:
            options = {k: v for k, v in kwargs.items() if k not in ("generator", "out")}
            try:
                self._add(func(*args, **{**options, "device": "meta", "pin_memory": False}).numel())
            except (RuntimeError, TypeError, OverflowError):  # too large, or torch will say so
                self._add(max(_integers(args), default=0))
        return func(*args, **kwargs)

    def _add(self, entries: int) -> None:
        self.entries += max(entries, _MIN_ENTRIES)
        if self.entries > self.limit:
            raise ValueError(
                f"{self.source}: the hyper-parameters ask for a model much larger than its "
                "weights, give another checkpoint."
            )


def _integers(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, int):
            yield value
        elif isinstance(value, list | tuple):
            yield from _integers(value)


def preparation_in(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the data of a training was prepared: its features, scaling and classes."""
    for key, value in checkpoint.items():
        is_state = key not in _NOT_OF_DATA and isinstance(value, dict)
        if is_state and isinstance(value.get("preparation"), dict):
            found: dict[str, Any] = value["preparation"]
            return found
    return None


def ends_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint was saved at an epoch's last batch, before the epoch ended."""
    batch = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if batch is None or not batch["is_last_batch"]:
        return False
    return bool(batch["current"]["completed"] < batch["current"]["processed"])


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
        if weights_only is False:
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, strict, False, **kwargs
            )
        shown = checkpoint_path if isinstance(checkpoint_path, (str, Path)) else "The checkpoint"
        with checked(cls, checkpoint_path, hparams_file, kwargs) as (file, limit, hparams):
            try:
                with limit:
                    return super().load_from_checkpoint(
                        file, map_location, strict=strict, weights_only=True, **(hparams | kwargs)
                    )
            except ValueError as error:
                if str(shown) in str(error):
                    raise
                raise ValueError(f"{shown}: {error}") from error


@contextmanager
def checked(
    cls: type,
    source: str | Path | IO[bytes],
    hparams_file: str | Path | None,
    given: Collection[str] = (),
) -> Iterator[tuple[IO[bytes], "_EntryLimit", dict[str, Any]]]:
    """Yield a checkpoint that has been checked, as an open file; a limit of sizes; and arguments.

    Args:
        cls: What is loaded.
        source: The checkpoint.
        hparams_file: A YAML file with arguments of the class.
        given: Names of the arguments that the caller gives.
    """
    with opened(source) as file:
        saved = read_checkpoint(file, name=source if isinstance(source, (str, Path)) else None)
        # Lightning's command line would let its parser import what the other values name.
        if any("_instantiator" in saved.get(key, {}) for key in _HYPER_PARAMETERS):
            raise ValueError(f"The checkpoint is not of a {cls.__name__}: give another one.")
        hparams = {} if hparams_file is None else _read_hparams(cls, Path(hparams_file))
        own = saved.get("hyper_parameters", {})
        needs_net = "_class_path" in own and "net" in signature(cls).parameters
        if needs_net and "net" not in {*own, *hparams, *given}:
            raise ValueError(
                f"The checkpoint does not hold its net, which was given as a module: write "
                f"{cls.__name__}.load_from_checkpoint(path, net=...)."
            )
        names = _RENAMED_HPARAMS.values() & signature(cls).parameters.keys() & own.keys()
        renamed = {name: own[name] for name in names}
        hparams = renamed | hparams  # Lightning reads the file again, with its own names
        limit = limited_to_weights(
            saved, source if isinstance(source, (str, Path)) else "The checkpoint"
        )
        del saved  # which takes as much memory as what is loaded
        yield file, limit, hparams


def _read_hparams(cls: type, path: Path) -> dict[str, Any]:
    """Return the hyper-parameters of a YAML file, if they are plain values that may be trusted.

    Lightning would read the file again, and import what `_instantiator` names.
    """
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"`hparams_file` must be a .yaml file, got {str(path)!r}.")
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"`hparams_file` {str(path)!r} is not plain YAML: fix it.") from error
    if not isinstance(values, dict) or "_instantiator" in values:
        raise ValueError(f"`hparams_file` {str(path)!r} holds no hyper-parameters of a module.")
    check_trusted(values, path)
    # Lightning's own file has those of the data too.
    known = {key: value for key, value in values.items() if key in signature(cls).parameters}
    if not known:
        raise ValueError(f"`hparams_file` {str(path)!r} has no argument of {cls.__name__}.")
    return known
