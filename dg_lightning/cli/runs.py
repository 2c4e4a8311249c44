"""Where runs lie, and which checkpoint a command uses: the newest one of its config."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from jsonargparse import ArgumentParser
from lightning_utilities.core.rank_zero import rank_zero_info

from dg_lightning.cli.configs import config_name, config_path
from dg_lightning.cli.refusal import refusal
from dg_lightning.dashboards import run_folder

__all__ = [
    "RUN_FILE",
    "add_config_option",
    "claim_run_folder",
    "free_version",
    "newest_checkpoint",
    "newest_run",
    "with_run_folder",
]

RUN_FILE = "run.json"  # which configs a run was started with
_CSV = "lightning.pytorch.loggers.CSVLogger"


def with_run_folder(trainer: Mapping[str, Any]) -> list[Any] | None:
    """Return the loggers with a CSV logger first, whose folder is the run's; None if it is.

    Other loggers have rules of their own for where a run lies.
    """
    loggers = _loggers(trainer)
    if loggers is None or _is_csv(loggers[0]):
        return None
    csv = [logger for logger in loggers if _is_csv(logger)]
    others = [logger for logger in loggers if not _is_csv(logger)]
    root = trainer.get("default_root_dir") or "."
    own = {"class_path": _CSV, "init_args": {"save_dir": root, "name": ""}}
    return [*(csv or [own]), *others]


def free_version(trainer: Mapping[str, Any]) -> list[Any] | None:
    """Return the loggers with a version that no run has yet; None if theirs is free.

    The tables of a run would be lost where another one gets the same version.
    """
    loggers = _loggers(trainer)
    options = (loggers[0].get("init_args") or {}) if loggers and _is_csv(loggers[0]) else {}
    if loggers is None or (version := options.get("version")) is None:
        return None
    name = version if isinstance(version, str) else f"version_{version}"
    place = _places({**trainer, "callbacks": None})[0]
    if not (place / name / RUN_FILE).exists():
        return None
    free = next(f"{name}_{k}" for k in count(1) if not (place / f"{name}_{k}").exists())
    rank_zero_info(f"{place / name} holds a run already: this one is in {place / free}.")
    first = {**loggers[0], "init_args": {**options, "version": free}}
    return [first, *loggers[1:]]


def claim_run_folder(trainer: Any) -> None:
    """Make the folder of a run at once, so that a run that starts meanwhile takes the next number.

    A logger numbers its runs by the folders that are there, and makes its own only later.
    """
    if not trainer.loggers or trainer.fast_dev_run or not trainer.is_global_zero:
        return
    logger = trainer.loggers[0]
    place = Path(logger.save_dir or trainer.default_root_dir, str(logger.name)).resolve()
    digest = hashlib.sha256(f"{os.getuid()} {place}".encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir(), f"dg-lightning-{digest}.lock")):
        run_folder(trainer).mkdir(parents=True, exist_ok=True)


def newest_checkpoint(trainer: Mapping[str, Any], configs: Sequence[str]) -> str:
    """Return the last checkpoint that a `fit` of this config has written.

    Args:
        trainer: The settings of the Trainer, as plain values.
        configs: The config files; runs that began with another one are passed by.
    """
    places = _places(trainer)
    wanted = _without_loggers([config_name(config) for config in configs])
    every = {path: _configs_of(path) for place in places for path in place.rglob("*.ckpt")}
    # Of the same configs; else of the same first one, or of who knows which.
    found = [path for path, of in every.items() if of == wanted]
    found = found or [path for path, of in every.items() if of is None or of[:1] == wanted[:1]]
    if not found:
        raise refusal(
            f"There is no checkpoint under {' or '.join(map(str, places))}: "
            "run `dg-lightning fit` first, or name one with --ckpt_path."
        )
    newest = max(found, key=lambda path: path.stat().st_mtime)
    # The last epoch, by the rule of the shipped configs, beside any other file.
    last = max(
        newest.parent.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime, default=None
    )
    return str(last or newest)


def add_config_option(parser: ArgumentParser) -> None:
    """Let a command be told a config, whose newest run it takes."""
    parser.add_argument(
        "--config",
        type=str,
        action="append",
        help="A config, by name or path, whose newest run is taken.",
    )


def newest_run(configs: Sequence[str]) -> str:
    """Return the newest checkpoint of configs that are given by name or path, and print it."""
    trainer: dict[str, Any] = {}
    for config in configs:
        path = config_path(config)
        content = yaml.safe_load(Path(path).read_text("utf-8"))
        if isinstance(content, dict):
            trainer |= content.get("trainer") or {}
    found = newest_checkpoint(trainer, [config_path(config) for config in configs])
    print(f"Using the newest checkpoint, {found}")
    return found


def _without_loggers(configs: Sequence[str]) -> list[str]:
    return [name for name in configs if not name.startswith(("logger/", "trainer/"))]


def _configs_of(checkpoint: Path) -> list[str] | None:
    """Return the configs that a checkpoint's run began with; None where they are not known."""
    record = checkpoint.parent.parent / RUN_FILE
    try:
        content = json.loads(record.read_text("utf-8"))
        return _without_loggers(content["configs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _loggers(trainer: Mapping[str, Any]) -> list[Any] | None:
    """Return the loggers that are named; None where Lightning's own rule holds."""
    loggers = trainer.get("logger")
    found = loggers if isinstance(loggers, list) else [loggers]
    return found if found and all(isinstance(logger, dict) for logger in found) else None


def _is_csv(logger: Any) -> bool:
    return str(logger.get("class_path", "")).rpartition(".")[2] == "CSVLogger"


def _places(trainer: Mapping[str, Any]) -> list[Path]:
    """List the folders that a run of these settings saves checkpoints under."""
    root = trainer.get("default_root_dir") or "."
    callbacks = trainer.get("callbacks") or []
    of_callbacks = [(c.get("init_args") or {}).get("dirpath") for c in callbacks]
    if chosen := [Path(folder) for folder in of_callbacks if folder]:
        return chosen
    if trainer.get("logger") is False:
        return [Path(root, "checkpoints")]
    loggers = with_run_folder(trainer) or _loggers(trainer)
    if loggers is None:
        return [Path(root, "lightning_logs")]
    options = loggers[0].get("init_args") or {}
    name = options.get("name")
    return [Path(options.get("save_dir") or root, "lightning_logs" if name is None else name)]
