"""The program `dg-lightning`: LightningCLI with shipped configs and one-line errors."""

import csv
import json
import re
import sys
import warnings
import zipfile
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from dg_lightning import GatedClassifier, __version__, callbacks, datamodules
from dg_lightning.spec import import_class

__all__ = ["main", "shipped_configs"]

# Imported so that their classes can be named without a path: `--trainer.callbacks+=GatePenalty`.
_NAMED_BY_CLASS_ALONE = (callbacks, datamodules)
# What Lightning and we raise for a wrong argument, file or package; anything else is a bug, and
# shows its traceback.
_USER_ERRORS = (ValueError, TypeError, OSError, ModuleNotFoundError, MisconfigurationException)
# Warnings of Lightning that tell a user of this program nothing.
_NOISE = (
    ".*does not have many workers.*",  # the data is in memory
    ".*LeafSpec.*is deprecated.*",
    "The dirpath has changed",  # a test run writes no checkpoint
)
_NAMED_CHECKPOINTS = ("best", "last", "hpc", "registry")


def main(args: Sequence[str] | None = None) -> None:
    """Run the program with the given arguments, or with those of the command line."""
    for noise in _NOISE:
        warnings.filterwarnings("ignore", noise)
    try:
        GateCLI(
            pl.LightningModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=SaveWholeConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            parser_class=OneLineErrorParser,
            parser_kwargs={"prog": "dg-lightning", "version": __version__},
            auto_configure_optimizers=False,
            args=None if args is None else list(args),
        )
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise _refusal(str(error)) from error


def shipped_configs() -> list[str]:
    """List the short names of the configs that ship with the package.

    >>> "digits/dynamicgate" in shipped_configs()
    True
    """
    root = files("dg_lightning.configs")
    found = []
    for folder in root.iterdir():
        if folder.is_dir():
            names = (entry.name for entry in folder.iterdir())
            found += [
                f"{folder.name}/{n.removesuffix('.yaml')}" for n in names if n.endswith(".yaml")
            ]
    return sorted(found)


class OneLineErrorParser(LightningArgumentParser):
    """Says what is wrong in one line, without the usage of a hundred options before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviated option is more often a misspelt one.
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise _refusal(_one_line(message)) from ex


class SaveWholeConfig(SaveConfigCallback):
    """Saves the resolved config into the run's folder, and hands all of it to every logger."""

    @override
    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams({"config": _plain(self.parser, self.config)})


class WritePredictions(BasePredictionWriter):
    """Writes what `predict` returns into the run's folder, one file a process."""

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    @override
    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        suffix = f"_{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = Path(trainer.log_dir or trainer.default_root_dir) / f"predictions{suffix}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["prediction", "probability"])
            for batch in predictions:
                for label, probability in zip(
                    batch["prediction"].tolist(),
                    batch["probability"].amax(-1).tolist(),
                    strict=True,
                ):
                    writer.writerow([label, f"{probability:.6f}"])
        rank_zero_info(f"Predictions are in {path}")


class GateCLI(LightningCLI):
    """LightningCLI that finds shipped configs and checkpoints, and lets the data size the net."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        given = sys.argv[1:] if args is None else args
        self.config = parser.parse_args(_with_config_paths(given))
        settings = self.config[self.config.subcommand]
        self._choose_checkpoint(settings)

    def _choose_checkpoint(self, settings: Namespace) -> None:
        path = settings.get("ckpt_path")
        evaluates = self.config.subcommand != "fit"
        if path is None and evaluates and _is_gated_classifier(settings):
            # Without one, Lightning would quietly evaluate an untrained net.
            settings.ckpt_path = path = str(_newest_checkpoint(settings))
            rank_zero_info(f"Using the newest checkpoint, {path}")
        if path is None or path.startswith(_NAMED_CHECKPOINTS) or "://" in path:
            return
        if not Path(path).exists():
            raise _refusal(
                f"There is no checkpoint {path!r}: give the path of one with --ckpt_path."
            )
        if Path(path).is_file() and not zipfile.is_zipfile(path):
            raise _refusal(
                f"{path!r} is not a checkpoint, or was cut short: give another with --ckpt_path."
            )

    @override
    def before_instantiate_classes(self) -> None:
        settings = self.config[self.config.subcommand]
        self._size_by_data(settings)
        if _is_gated_classifier(settings):
            self.parser.add_instantiator(
                self._instantiate_plainly, GatedClassifier, subclasses=True, prepend=True
            )

    def _size_by_data(self, settings: Namespace) -> None:
        """Fill in what the model leaves open and the data knows, so that it is saved too."""
        wanted = settings.get("model.init_args") or Namespace()
        sizes = [k for k in ("num_classes", "input_shape") if k in wanted and wanted[k] is None]
        if not sizes or settings.get("data") is None:
            return
        parser = self._parser(self.config.subcommand)
        try:
            data = parser.instantiate(Namespace(data=settings.data)).data
        except _USER_ERRORS as error:
            raise _refusal(_one_line(str(error))) from error
        for key in sizes:
            value = getattr(data, key, None)
            wanted[key] = list(value) if isinstance(value, (tuple, torch.Size)) else value

    def _instantiate_plainly(
        self, class_type: type[GatedClassifier], *args: Any, **kwargs: Any
    ) -> GatedClassifier:
        # The parser has checked the arguments and made factories of net and optimizer. The model is
        # given the plain values instead: they are its hyper-parameters in the checkpoint.
        subcommand = self.config.subcommand
        model = _plain(self._parser(subcommand), self.config[subcommand])["model"]
        given = {**model.get("init_args", {}), **model.get("dict_kwargs", {})}
        return class_type(**{key: value for key, value in given.items() if key in kwargs})

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except _USER_ERRORS as error:
            raise _refusal(_one_line(str(error))) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        if self.subcommand == "predict" and isinstance(self.model, GatedClassifier):
            trainer.callbacks.append(WritePredictions())  # type: ignore[attr-defined]
        return trainer


def _with_config_paths(args: Any) -> Any:
    """Replace the short name of a shipped config by its path."""
    if not isinstance(args, list):
        return args
    resolved = list(args)
    for index, argument in enumerate(resolved):
        option, equals, value = argument.partition("=")
        if option not in ("--config", "-c"):
            continue
        if equals:
            resolved[index] = f"{option}={_config_path(value)}"
        elif index + 1 < len(resolved):
            resolved[index + 1] = _config_path(resolved[index + 1])
    return resolved


def _config_path(name: str) -> str:
    if Path(name).is_file():
        return name
    shipped = shipped_configs()
    short = name.removeprefix("configs/").removesuffix(".yaml")
    if short in shipped:
        return str(files("dg_lightning.configs").joinpath(f"{short}.yaml"))
    near = get_close_matches(short, shipped, n=1)
    hint = f"did you mean {near[0]}?" if near else f"these ship: {', '.join(shipped)}."
    raise _refusal(f"There is no config {name!r}, neither as a file nor shipped; {hint}")


def _plain(parser: LightningArgumentParser, settings: Namespace) -> dict[str, Any]:
    """Return settings as numbers, strings, lists and dicts: what YAML and JSON both hold."""
    plain: dict[str, Any] = json.loads(parser.dump(settings, format="json"))
    return plain


def _is_gated_classifier(settings: Namespace) -> bool:
    class_path = settings.get("model.class_path")
    return class_path is not None and issubclass(import_class(class_path), GatedClassifier)


def _newest_checkpoint(settings: Namespace) -> Path:
    logger = settings.get("trainer.logger.init_args")
    folder = Path(settings.get("trainer.default_root_dir") or ".")
    if isinstance(logger, Namespace) and "save_dir" in logger:
        folder = Path(logger.save_dir) / (logger.get("name") or "")
    found = sorted(folder.glob("version_*/checkpoints/*.ckpt"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise _refusal(
            f"There is no checkpoint under {str(folder)!r}: run `dg-lightning fit` first, "
            "or name one with --ckpt_path."
        )
    return found[-1]


_REPORT_FRAME = re.compile(
    r"Parser key|Does not validate against|Subtypes:|Errors:|Given value|Problem with given"
    r"|Expected a <class 'NoneType'>|Expected a path but"
)
_REWORDINGS = (
    (r"Type <class '[^']*'> expects a function or a callable class: ", ""),
    (r"\.? Got value: (?:Namespace|\{).*", "."),
    (
        r"Expected a dot import path string: (\S+?)(?:\. Got value.*)?$",
        r"There is no class \1; give its full path, as package.module.Class.",
    ),
)


def _one_line(message: str) -> str:
    """Press the parser's report on nested types into the key and what is wrong with it."""
    keys = dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message))
    lines = [line.strip(" -") for line in message.splitlines()]
    reasons = [line for line in lines if line and not _REPORT_FRAME.match(line)]
    if not reasons:  # the report is a single line
        return message.strip()
    reason = reasons[0]
    for pattern, replacement in _REWORDINGS:
        reason = re.sub(pattern, replacement, reason)
    return ": ".join([".".join(keys), reason] if keys else [reason])


def _refusal(message: str) -> SystemExit:
    """Say what is wrong, and return what ends the program."""
    sys.stderr.write(f"dg-lightning: error: {message}\n")
    return SystemExit(2)
