"""Commands that work on one training run, based on LightningCLI."""

import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from dg_lightning import GatedLM, __version__, callbacks, datamodules
from dg_lightning.cli.dry_runs import CheckingTrainer
from dg_lightning.cli.errors import RENAMED, OneLineErrorParser
from dg_lightning.cli.outputs import (
    SaveWholeConfig,
    WritePredictions,
    WriteSamples,
    WriteTestTables,
    find_non_finite,
    print_evaluation,
    print_summary,
    to_plain,
)
from dg_lightning.cli.runs import (
    claim_run_folder,
    data_of_run,
    newest_checkpoint,
    with_config,
    with_csv_logger_first,
    with_free_version,
)
from dg_lightning.cli_error import cli_error
from dg_lightning.configs import resolve_config_paths
from dg_lightning.files import AtomicCheckpointIO
from dg_lightning.training.checkpoint import limited_to_weights, preparation_in, read_checkpoint
from dg_lightning.training.module import GatedModule
from dg_lightning.training.spec import check_classes, check_trusted, import_class, modules_named

_NAMED = re.compile(r"--trainer\.callbacks\.([A-Z]\w*)\.(?:init_args\.)?([\w.]+)(?:=(.*))?", re.S)
_PRINT_OPTIONS = re.compile(r"--print_config|-h$|--help")


def expand_callback_options(args: list[str], parser: ArgumentParser) -> list[str]:
    """Replace options that name a callback class with the full list of callbacks.

    Args:
        args: The command line.
        parser: Parses the other options to find the configured callbacks.
    """
    options, others = [], []
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        if (match := _NAMED.fullmatch(argument)) is None:
            others.append(argument)
            continue
        name, key, value = match.groups()
        if value is None and not remaining:
            raise cli_error(f"{argument} needs a value.")
        options.append((name, key, remaining.pop(0) if value is None else value))
    if not options:
        return args
    found = parser.parse_args([word for word in others if not _PRINT_OPTIONS.match(word)])
    settings = json.loads(parser.dump(found, format="json"))[found.subcommand]
    callbacks = settings["trainer"].get("callbacks") or []
    for name, key, value in options:
        _set_argument(_find_callback(name, callbacks), key, value)
    return [*others, f"--trainer.callbacks={json.dumps(callbacks, default=str)}"]


def _find_callback(name: str, callbacks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the only configured callback of a class."""
    names = [callback["class_path"].rpartition(".")[2] for callback in callbacks]
    if names.count(name) == 1:
        return callbacks[names.index(name)]
    present = ", ".join(names) or "none"
    if name in names:
        raise cli_error(
            f"The config has {names.count(name)} callbacks named {name} ({present}): set the "
            "option in the config."
        )
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"add it with --trainer.callbacks+={name}."
    raise cli_error(f"The config has no callback {name} (configured: {present}): {hint}")


def _set_argument(callback: dict[str, Any], key: str, text: str) -> None:
    """Set an argument, or an entry of a dict argument."""
    cls = import_class(callback["class_path"], object)
    known = inspect.signature(cls).parameters
    target = callback.setdefault("init_args", {})
    *path, last = key.split(".")
    if (name := (*path, last)[0]) not in known:
        new = RENAMED.get(name)
        hint = f"it is now {new}." if new in known else f"it has {', '.join(known)}."
        raise cli_error(f"{cls.__name__} has no argument {name!r}; {hint}")
    try:
        is_text = not path and known[last].annotation in (str, str | None)
        value = text if is_text and text != "null" else yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise cli_error(f"{key} of {cls.__name__} must be a YAML value, got {text!r}.") from error
    for part in path:
        if not isinstance(target.get(part), dict):
            target[part] = {}
        target = target[part]
    target[last] = value


# Imported so that class names work without a path: `--trainer.callbacks+=GatePenalty`.
_SHORT_NAMED = (callbacks, datamodules)
# Lightning warnings that do not apply here.
_NOISE = (
    ".*does not have many workers.*",  # the data is in memory
    ".*LeafSpec.*is deprecated.*",
    "The dirpath has changed",  # a test run writes no checkpoint
)
_ADVERTISING = "Tip: For seamless cloud"


# Returns loggers for the settings of a Trainer, or None to keep those that are configured.
LoggerRule: TypeAlias = Callable[[Mapping[str, Any]], list[Any] | None]


def run_command(
    args: Sequence[str],
    callbacks: Sequence[pl.Callback] = (),
    choose_loggers: LoggerRule | None = None,
) -> "GateCLI":
    """Run a command and return its CLI.

    Args:
        args: The command line.
        callbacks: Callbacks in addition to those that are configured.
        choose_loggers: Chooses the loggers in place of our own rules.
    """
    for noise in _NOISE:
        warnings.filterwarnings("ignore", noise)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_not_advertising)
    return GateCLI(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        trainer_class=CheckingTrainer,
        trainer_defaults={"callbacks": list(callbacks)},
        save_config_callback=SaveWholeConfig,
        save_config_kwargs={"save_to_log_dir": False},  # the callback writes to the run folder
        seed_everything_default=0,
        parser_class=OneLineErrorParser,
        parser_kwargs={
            "prog": "dg-lightning",
            "version": __version__,
            "description": "Train and use networks that decide which of their units to run.",
        },
        auto_configure_optimizers=False,
        choose_loggers=choose_loggers,
        args=["--json=true" if argument == "--json" else argument for argument in args],
    )


def without_repeats(callbacks: Sequence[Any]) -> list[Any]:
    """Return the configured callbacks without exact copies, which stacked fragments may bring.

    >>> without_repeats([{"class_path": "RigL"}, {"class_path": "SET"}, {"class_path": "RigL"}])
    [{'class_path': 'RigL'}, {'class_path': 'SET'}]
    """
    return [one for index, one in enumerate(callbacks) if one not in callbacks[:index]]


def _is_not_advertising(record: logging.LogRecord) -> bool:
    return _ADVERTISING not in record.getMessage()


class GateCLI(LightningCLI):
    """LightningCLI that finds configs and checkpoints and takes net sizes from the data.

    Args:
        *classes: Base classes of the model and the data.
        args: The command line.
        choose_loggers: Chooses the loggers in place of our own rules.
        **options: Other arguments of `LightningCLI`.
    """

    def __init__(
        self, *classes: Any, args: list[str], choose_loggers: LoggerRule | None, **options: Any
    ) -> None:
        commands = self.subcommands()
        # Creating parsers for all commands would take a quarter of the start-up time.
        wanted = {name: skip for name, skip in commands.items() if name in args[:1]} or commands
        self.subcommands = lambda: wanted  # type: ignore[method-assign]
        self._choose_loggers = choose_loggers
        self._read: dict[str, dict[str, Any]] = {}  # path -> checkpoint
        self._saved_hparams: dict[str, Any] | None = None  # from a dg-lightning checkpoint
        self._preparation: dict[str, Any] | None = None  # how the checkpoint's data was prepared
        super().__init__(*classes, args=args, **options)  # type: ignore[misc]

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        own = {"model", "datamodule"}
        return {**LightningCLI.subcommands(), "plan": own, "check": own}

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list)
        self._args = expand_callback_options(resolve_config_paths(args), parser)
        self._parse(self._args)

    def _parse(self, args: list[str]) -> None:
        self.config = self.parser.parse_args(args)
        given = self._plain_settings()
        check_classes(given)
        callbacks = given["trainer"].get("callbacks")
        if isinstance(callbacks, list) and (once := without_repeats(callbacks)) != callbacks:
            given["trainer"]["callbacks"] = once
            self._update_settings({"trainer": {"callbacks": once}})
        rules: tuple[LoggerRule, ...] = ()
        if self._choose_loggers is not None:
            rules = (self._choose_loggers,)
        elif _is_gated_module(self._settings):
            rules = (with_csv_logger_first, with_free_version)
        for rule in rules:
            if (loggers := rule(given["trainer"])) is not None:
                given["trainer"]["logger"] = loggers
                self._update_settings({"trainer": {"logger": loggers}})

    @property
    def _settings(self) -> Namespace:
        settings: Namespace = self.config[self.config.subcommand]
        return settings

    def _plain_settings(self) -> dict[str, Any]:
        return to_plain(self._parser(self.config.subcommand), self._settings)

    def _update_settings(self, values: dict[str, Any]) -> None:
        """Change settings, which the parser validates like command-line options."""
        self.config = self.parser.parse_object({self.config.subcommand: values}, self.config)

    @override
    def _parse_ckpt_path(self) -> None:
        """Use the complete model from a checkpoint.

        Lightning would pass the saved hyperparameters through its parser, which imports every class
        that they name.
        """
        settings = self._settings
        if "ckpt_path" not in settings:
            return
        path, command = settings.get("ckpt_path"), self.config.subcommand
        is_ours, given = _is_gated_module(settings), self._plain_settings()
        if is_ours and (path == "last" or (path is None and command != "fit")):
            # Without a checkpoint, Lightning would silently evaluate an untrained net.
            configs = [str(config) for config in settings.get("config") or []]
            settings.ckpt_path = path = newest_checkpoint(given["trainer"], configs)
            rank_zero_info(f"Using the newest checkpoint, {path}")
        elif path is None and command != "fit":
            rank_zero_warn(f"--ckpt_path is not set: `{command}` uses the model's initial weights.")
        if path is not None and settings.get("weights_only") is None:
            settings.weights_only = True  # otherwise Lightning unpickles files from a URL
        if path is None:
            return
        # Modules named on the command line are trusted.
        checkpoint = read_checkpoint(path, also=modules_named(given))
        self._read = {str(path): checkpoint}
        if command != "fit":
            self._use_data_of_run(path, given)
            settings = self._settings
        self._preparation = preparation_in(checkpoint)
        saved = dict(checkpoint.get("hyper_parameters", {}))
        if is_ours:
            self._load_model(path, saved, given["model"]["init_args"])
            return
        arguments = settings.get("model.init_args") or Namespace()
        parameters = inspect.signature(import_class(settings.model.class_path, object)).parameters
        for name, value in saved.items():
            if name not in arguments or name not in parameters:
                continue
            # The parser would import classes named by strings, except for `str` arguments.
            is_text = isinstance(value, str) and parameters[name].annotation is str
            if is_text or isinstance(value, (bool, int, float)):
                arguments[name] = value

    def _use_data_of_run(self, path: str, given: dict[str, Any]) -> None:
        """Use the data settings of a checkpoint's run, unless `--data` names another class."""
        found, configured = data_of_run(path), given.get("data")
        if found is None or configured is None:
            return
        data, config = found
        names_class = any(re.match(r"--data(=|$|\.class_path)", word) for word in self._args)
        if names_class and data["class_path"] != configured["class_path"]:
            rank_zero_info(f"The run was trained on other data, {data['class_path']}.")
            return
        check_trusted(data, config, also=modules_named(given))
        before = self._settings
        self._parse(with_config(self._args, {"data": data}, path))
        settings = self._settings
        settings.config = before.get("config")
        for key in ("ckpt_path", "weights_only"):
            settings[key] = before.get(key)
        if differences := _differences(configured, self._plain_settings()["data"], "data"):
            rank_zero_info(
                f"Using the run's data settings ({config}), which differ from the config in "
                f"{', '.join(differences)}."
            )

    def _load_model(self, path: str, saved: dict[str, Any], configured: dict[str, Any]) -> None:
        """Use the model from a checkpoint, and report differences from the config."""
        class_path = saved.get("_class_path")
        if not isinstance(class_path, str) or "_instantiator" in saved:
            raise cli_error(f"{path!r} is not a dg-lightning checkpoint: pass another one.")
        cls = import_class(class_path, GatedModule)
        if "net" in inspect.signature(cls).parameters and "net" not in saved:
            raise cli_error(
                f"{path!r} does not hold its net, which was given as a module: use it from Python, "
                f"with {cls.__name__}.load_from_checkpoint(path, net=...)."
            )
        self._saved_hparams = saved
        if differences := _differences(configured, saved):
            rank_zero_info(
                "Using the model saved in the checkpoint, which differs from the config in "
                f"{', '.join(differences)}."
            )

    @override
    def before_instantiate_classes(self) -> None:
        self._fill_sizes_from_data()
        if _is_gated_module(self._settings):
            self.parser.add_instantiator(
                self._instantiate_model, GatedModule, subclasses=True, prepend=True
            )

    def _fill_sizes_from_data(self) -> None:
        """Fill in missing model sizes from the data, so that they are saved."""
        settings = self._settings
        wanted = settings.get("model.init_args") or Namespace()
        sizes = [k for k in ("num_classes", "input_shape") if k in wanted and wanted[k] is None]
        if not sizes or settings.get("data") is None or self._saved_hparams is not None:
            return
        parser = self._parser(self.config.subcommand)
        data = parser.instantiate(Namespace(data=settings.data)).data
        for key in sizes:
            value = getattr(data, key, None)
            wanted[key] = list(value) if isinstance(value, (tuple, torch.Size)) else value

    def _instantiate_model(
        self, class_type: type[GatedModule], *args: Any, **kwargs: Any
    ) -> GatedModule:
        # The parser has validated the arguments and turned net and optimizer into factories. The
        # model gets plain values instead, because the checkpoint saves them as hyperparameters.
        if self._saved_hparams is None:
            return class_type(**self._plain_settings()["model"]["init_args"])
        saved = dict(self._saved_hparams)
        ((path, checkpoint),) = self._read.items()
        with limited_to_weights(checkpoint, path):
            return import_class(saved.pop("_class_path"), GatedModule)(**saved)

    @override
    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        use_preparation = getattr(self.datamodule, "use_preparation", None)
        path = self._settings.get("ckpt_path")
        # In `fit`, Lightning restores the preparation with the DataModule's state.
        if use_preparation is None or path is None or self.config.subcommand == "fit":
            return
        if self._preparation is None:
            rank_zero_warn(
                f"{path} is from an earlier version and does not record how its data was prepared: "
                "make sure that the data is prepared in the same way now."
            )
        else:
            use_preparation(self._preparation)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(self.model, GatedModule):
            writer: pl.Callback = WriteTestTables()
            if self.subcommand == "predict":
                writer = WriteSamples() if isinstance(self.model, GatedLM) else WritePredictions()
            trainer.callbacks.append(writer)  # type: ignore[attr-defined]
            if self.config.subcommand not in ("plan", "check"):
                claim_run_folder(trainer)
        if isinstance(trainer, CheckingTrainer):
            trainer.arguments = dict(self.config_init[self.config.subcommand].trainer)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO(self._read)
        return trainer

    def after_fit(self) -> None:
        """Print a summary, and fail if training diverged."""
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            print_summary(self.trainer)
        if reason := find_non_finite(self.trainer):
            raise cli_error(f"Training failed: {reason}.", status=1)

    def after_test(self) -> None:
        """Print a summary."""
        self._print_evaluation("test")

    def after_validate(self) -> None:
        """Print a summary."""
        self._print_evaluation("val")

    def _print_evaluation(self, stage: str) -> None:
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            print_evaluation(self.trainer, stage)


def _is_gated_module(settings: Namespace) -> bool:
    class_path = settings.get("model.class_path")
    return class_path is not None and issubclass(
        import_class(class_path, pl.LightningModule), GatedModule
    )


def _differences(configured: Any, saved: Any, key: str = "model") -> list[str]:
    """List the config values that a checkpoint replaces, except those that are None."""
    if configured is None or configured == saved:
        return []
    if isinstance(configured, dict) and isinstance(saved, dict):
        names = sorted(configured.keys() | saved.keys())
        parts = [(n, configured.get(n), saved.get(n)) for n in names]
        return [name for n, a, b in parts for name in _differences(a, b, f"{key}.{n}")]
    return [key]
