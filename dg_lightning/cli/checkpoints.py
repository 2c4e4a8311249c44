"""Which checkpoint a command uses, and what is in it."""

import pickle
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from dg_lightning.cli.errors import refusal

__all__ = ["newest_checkpoint", "read_checkpoint"]

_UNREADABLE = (RuntimeError, ValueError, EOFError, KeyError, OSError, pickle.UnpicklingError)


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return a Lightning checkpoint; its tensors stay on the disk."""
    if not Path(path).exists():
        raise refusal(f"There is no checkpoint {path!r}: give the path of one with --ckpt_path.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _UNREADABLE as error:
        raise refusal(
            f"{path!r} is not a checkpoint, or was cut short: give another with --ckpt_path.", error
        ) from error
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise refusal(f"{path!r} holds no checkpoint of a Trainer: give another with --ckpt_path.")
    return content


def newest_checkpoint(settings: Namespace) -> str:
    """Return the last checkpoint that a `fit` with these settings has written."""
    places = _places(settings)
    found = [path for place in places for path in place.rglob("*.ckpt")]
    if not found:
        raise refusal(
            f"There is no checkpoint under {' or '.join(map(str, places))}: "
            "run `dg-lightning fit` first, or name one with --ckpt_path."
        )
    newest = max(found, key=lambda path: path.stat().st_mtime)
    last = newest.with_name("last.ckpt")  # the rule of the shipped configs, beside any other file
    return str(last if last.is_file() else newest)


def _places(settings: Namespace) -> list[Path]:
    """List the folders that Lightning saves checkpoints under."""
    root = Path(settings.get("trainer.default_root_dir") or ".")
    callbacks = settings.get("trainer.callbacks") or []
    arguments = [callback.get("init_args") or Namespace() for callback in callbacks]
    chosen = [Path(a.dirpath) for a in arguments if a.get("dirpath")]
    if chosen:
        return chosen
    loggers = settings.get("trainer.logger")
    if loggers is False:
        return [root / "checkpoints"]
    if not isinstance(loggers, (list, Namespace)):
        return [root / "lightning_logs"]
    first = loggers[0] if isinstance(loggers, list) else loggers
    options = first.get("init_args") or Namespace()
    return [Path(options.get("save_dir") or root) / (options.get("name") or "lightning_logs")]
