"""Read checkpoints without running code that they name."""

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
from lightning_utilities.core.rank_zero import rank_zero_warn
from packaging.version import InvalidVersion, Version
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dg_lightning.training.spec import check_trusted

_UNREADABLE = (RuntimeError, ValueError, EOFError, KeyError, OSError, pickle.UnpicklingError)
# Keys under which current and early versions of Lightning save hyperparameters.
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_OUTDATED = ("hparams", "module_arguments", "hparams_type")
_NOT_OF_DATA = (*_HYPER_PARAMETERS, "callbacks", "loops", "state_dict")
_VERSION = "pytorch-lightning_version"
_MAX_EXPANDED = 2**20  # tensors up to this many bytes may be larger than their storage
_SPARE_ENTRIES = 2**28  # entries that a model may have beyond four times its saved weights
_MIN_ENTRIES = 10**5  # smaller tensors count as this many entries, because they take time too
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
    """Open a checkpoint, so that the file that is checked is also the one that is loaded.

    A URL is downloaded once, to a private temporary file.
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
            f"No checkpoint found at {str(source)!r}: pass an existing path with --ckpt_path."
        )
    return path


_RENAMED_HPARAMS = {"capture": "cuda_graphs"}  # since version 0.2


def read_checkpoint(
    source: str | Path | IO[bytes], also: Iterable[str] = (), name: str | Path | None = None
) -> dict[str, Any]:
    """Load a Lightning checkpoint that names only trusted classes.

    Tensors in a local file are memory-mapped. The position in an open file does not change.

    Args:
        source: A path, a URL or an open file.
        also: Further packages to trust in this call.
        name: Name to show for an open file in messages.

    Raises:
        ValueError: If the file is not a checkpoint, or names classes that are not trusted.
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
        with zipfile.ZipFile(source) as archive:  # torch never compresses its archives
            if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                raise ValueError(f"{named} is compressed, so it is not a checkpoint: use another.")
    if not isinstance(source, (str, Path)):
        source.seek(start)
    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=is_path)
    except _UNREADABLE as error:
        if "GLOBAL" in str(error) or _first_byte(source, start) == pickle.PROTO:
            raise ValueError(
                f"{named} contains Python objects, which may run code when loaded: use a "
                "checkpoint that contains only tensors and plain values."
            ) from error
        raise ValueError(
            f"{named} is not a checkpoint, or is truncated: pass another one with --ckpt_path."
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
        raise ValueError(f"{source} is not a Lightning checkpoint: use another one.")
    try:
        Version(content[_VERSION])
    except (InvalidVersion, TypeError) as error:
        raise ValueError(
            f"{source}: `{_VERSION}` must be a version, got {content[_VERSION]!r}: use another "
            "checkpoint."
        ) from error
    if not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{source} has no weights (`state_dict`): use another checkpoint.")
    if not all(isinstance(name, str) for name in content["state_dict"]):
        raise ValueError(f"{source}: weight names must be text: use another checkpoint.")
    for name, tensor in content["state_dict"].items():
        if isinstance(tensor, Tensor) and _is_expanded(tensor):
            raise ValueError(f"{source} has weights larger than the file ({name}): use another.")
    if any(map(_is_expanded, _tensors(content))):
        raise ValueError(f"{source} has tensors larger than the file: use another checkpoint.")
    for key in ("callbacks", "loops"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"{source}: `{key}` must be a dict: use another checkpoint.")
    for key in _OUTDATED:
        if key in content:
            raise ValueError(
                f"{source} has `{key}`, which Lightning no longer writes: use another checkpoint."
            )
    for key in _HYPER_PARAMETERS:
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"{source}: `{key}` must be a dict: use another checkpoint.")
        check_trusted(content.get(key, {}), source, also)
    return content


def check_weights(state_dict: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Check that saved parameters and buffers are finite real numbers.

    A buffer that is infinite in a new model, such as an attention mask, is not checked.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in own.keys() & state_dict.keys():
        may_be_infinite = name not in dict(model.named_parameters()) and not _is_usable(own[name])
        if not may_be_infinite and not _is_usable(state_dict[name]):
            raise ValueError(f"The checkpoint has weights that are not finite numbers ({name}).")


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
    """Return a context that limits new models to the size of a checkpoint's weights.

    Otherwise, hyperparameters could request any number of units or layers.

    Args:
        checkpoint: The checkpoint.
        source: Where the checkpoint comes from, for the error message.
    """
    weights = [w for w in checkpoint["state_dict"].values() if isinstance(w, Tensor)]
    storages = {w.data_ptr(): w.numel() for w in weights if w.layout == torch.strided}
    return _EntryLimit(4 * sum(max(n, _MIN_ENTRIES) for n in storages.values()), source)


class _EntryLimit(TorchFunctionMode):
    """Raises ValueError if new tensors exceed a total number of entries."""

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
            except (RuntimeError, TypeError, OverflowError):  # too large, or invalid
                self._add(max(_integers(args), default=0))
        return func(*args, **kwargs)

    def _add(self, entries: int) -> None:
        self.entries += max(entries, _MIN_ENTRIES)
        if self.entries > self.limit:
            raise ValueError(
                f"{self.source}: the hyperparameters ask for a model much larger than the saved "
                "weights: use another checkpoint."
            )


def _integers(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, int):
            yield value
        elif isinstance(value, list | tuple):
            yield from _integers(value)


def preparation_in(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the training data was prepared: features, scaling and classes."""
    for key, value in checkpoint.items():
        is_state = key not in _NOT_OF_DATA and isinstance(value, dict)
        if is_state and isinstance(value.get("preparation"), dict):
            found: dict[str, Any] = value["preparation"]
            return found
    return None


def ends_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint was saved at an epoch's last batch, before the epoch ended."""
    batch = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if batch is None or not batch["is_last_batch"]:
        return False
    return bool(batch["current"]["completed"] < batch["current"]["processed"])


def warn_unfinished_epoch(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """Warn if Lightning will skip the end of an epoch on resuming."""
    exact = any(type(callback).__name__ == "ExactResume" for callback in trainer.callbacks)
    if ends_epoch(checkpoint) and not exact:
        rank_zero_warn(
            "The checkpoint was saved at an epoch's last batch. Lightning skips the validation and "
            "hooks at the end of that epoch: add ExactResume to run them."
        )


class TrustedLoading(pl.LightningModule):
    """A LightningModule whose `load_from_checkpoint` builds only trusted classes."""

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
        """Load a trained module from a checkpoint, with Lightning's arguments.

        See `dg_lightning.trust` for trusted classes. `weights_only=False` disables all checks, so
        that the file may run any code.
        """
        if weights_only is False:
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, strict, False, **kwargs
            )
        shown = checkpoint_path if isinstance(checkpoint_path, (str, Path)) else "The checkpoint"
        with open_checked(cls, checkpoint_path, hparams_file, kwargs) as (file, limit, hparams):
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
def open_checked(
    cls: type,
    source: str | Path | IO[bytes],
    hparams_file: str | Path | None,
    given: Collection[str] = (),
) -> Iterator[tuple[IO[bytes], "_EntryLimit", dict[str, Any]]]:
    """Open and check a checkpoint, and yield the file, size limit and extra arguments.

    Args:
        cls: The class to load.
        source: The checkpoint.
        hparams_file: A YAML file with arguments of the class.
        given: Names of the arguments that the caller passes.
    """
    with opened(source) as file:
        saved = read_checkpoint(file, name=source if isinstance(source, (str, Path)) else None)
        # LightningCLI's parser would import the classes that the other hyperparameters name.
        if any("_instantiator" in saved.get(key, {}) for key in _HYPER_PARAMETERS):
            raise ValueError(f"The checkpoint was not saved from a {cls.__name__}: use another.")
        hparams = {} if hparams_file is None else _read_hparams(cls, Path(hparams_file))
        own = saved.get("hyper_parameters", {})
        needs_net = "_class_path" in own and "net" in signature(cls).parameters
        if needs_net and "net" not in {*own, *hparams, *given}:
            raise ValueError(
                f"The checkpoint has no `net`, because it was passed as a module: call "
                f"{cls.__name__}.load_from_checkpoint(path, net=...)."
            )
        names = _RENAMED_HPARAMS.values() & signature(cls).parameters.keys() & own.keys()
        renamed = {name: own[name] for name in names}
        hparams = renamed | hparams  # Lightning reads the old names from the file
        limit = limited_to_weights(
            saved, source if isinstance(source, (str, Path)) else "The checkpoint"
        )
        del saved  # takes as much memory as the loaded module
        yield file, limit, hparams


def _read_hparams(cls: type, path: Path) -> dict[str, Any]:
    """Read hyperparameters from a YAML file, if they are trusted plain values.

    Lightning would read the file again, and import the class that `_instantiator` names.
    """
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"`hparams_file` must be a .yaml file, got {str(path)!r}.")
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"`hparams_file` {str(path)!r} is not plain YAML: fix it.") from error
    if not isinstance(values, dict) or "_instantiator" in values:
        raise ValueError(f"`hparams_file` {str(path)!r} has no module hyperparameters.")
    check_trusted(values, path)
    # The file that Lightning writes also contains the hyperparameters of the DataModule.
    known = {key: value for key, value in values.items() if key in signature(cls).parameters}
    if not known:
        raise ValueError(f"`hparams_file` {str(path)!r} has no arguments for {cls.__name__}.")
    return known
