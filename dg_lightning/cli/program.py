"""The commands of one training, on LightningCLI; `many_runs` and `views` have the others."""

import inspect
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from dg_lightning import GatedClassifier, __version__, callbacks, datamodules
from dg_lightning.checkpoint import preparation_in, read_checkpoint
from dg_lightning.cli.callback_options import with_named_callbacks
from dg_lightning.cli.closing import not_finite, print_closing
from dg_lightning.cli.configs import with_config_paths
from dg_lightning.cli.errors import OneLineErrorParser, refusal
from dg_lightning.cli.outputs import SaveWholeConfig, WritePredictions, WriteTestTables, plain
from dg_lightning.cli.plan import PlanningTrainer
from dg_lightning.cli.runs import (
    claim_run_folder,
    free_version,
    newest_checkpoint,
    with_run_folder,
)
from dg_lightning.files import WholeFileCheckpointIO
from dg_lightning.spec import check_classes, import_class, modules_named
from dg_lightning.step_hooks import leave_out_empty_hooks

__all__ = ["GateCLI", "run_command"]

# Imported so that their classes can be named without a path: `--trainer.callbacks+=GatePenalty`.
_NAMED_BY_CLASS_ALONE = (callbacks, datamodules)
# Warnings and notes of Lightning that tell a user of this program nothing.
_NOISE = (
    ".*does not have many workers.*",  # the data is in memory
    ".*LeafSpec.*is deprecated.*",
    "The dirpath has changed",  # a test run writes no checkpoint
)
_ADVERTISING = "Tip: For seamless cloud"


def run_command(args: list[str], callbacks: Sequence[pl.Callback] = ()) -> "GateCLI":
    """Run a command of one training, with further callbacks, and return what it was made of."""
    for noise in _NOISE:
        warnings.filterwarnings("ignore", noise)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertising)
    return GateCLI(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        trainer_class=PlanningTrainer,
        trainer_defaults={"callbacks": list(callbacks)},
        save_config_callback=SaveWholeConfig,
        save_config_kwargs={"save_to_log_dir": False},  # it knows the run's folder better
        seed_everything_default=0,
        parser_class=OneLineErrorParser,
        parser_kwargs={
            "prog": "dg-lightning",
            "version": __version__,
            "description": "Train and use networks that decide which of their units to run.",
        },
        auto_configure_optimizers=False,
        args=args,
    )


def _is_no_advertising(record: logging.LogRecord) -> bool:
    return _ADVERTISING not in record.getMessage()


class GateCLI(LightningCLI):
    """LightningCLI that finds configs and checkpoints, and lets the data size the net.

    Args:
        *classes: Classes of model and data.
        args: What the command line says.
        **options: Other arguments of `LightningCLI`.
    """

    def __init__(self, *classes: Any, args: list[str], **options: Any) -> None:
        every = self.subcommands()
        # To make the parsers of all the other commands takes a quarter of the start.
        wanted = {name: skipped for name, skipped in every.items() if name in args[:1]} or every
        self.subcommands = lambda: wanted  # type: ignore[method-assign]
        self._saved: dict[str, Any] | None = None  # hyper-parameters of a checkpoint of ours
        self._preparation: dict[str, Any] | None = None  # of the data that it was trained on
        super().__init__(*classes, args=args, **options)  # type: ignore[misc]

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "plan": {"model", "datamodule"}}

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list)
        resolved = with_named_callbacks(with_config_paths(args), parser)
        self.config = parser.parse_args(resolved)
        given = self._plain()
        check_classes(given)
        if not _is_gated_classifier(self._settings):
            return
        for rule in (with_run_folder, free_version):
            if (loggers := rule(given["trainer"])) is not None:
                given["trainer"]["logger"] = loggers
                self._change({"trainer": {"logger": loggers}})

    @property
    def _settings(self) -> Namespace:
        settings: Namespace = self.config[self.config.subcommand]
        return settings

    def _plain(self) -> dict[str, Any]:
        return plain(self._parser(self.config.subcommand), self._settings)

    def _change(self, values: dict[str, Any]) -> None:
        """Change settings; the parser checks them as if they had been given."""
        self.config = self.parser.parse_object({self.config.subcommand: values}, self.config)

    @override
    def _parse_ckpt_path(self) -> None:
        """Let a checkpoint bring its own model, as a whole.

        Lightning would merge its hyper-parameters into those of the config instead, by its parser,
        which imports what they name.
        """
        settings = self._settings
        if "ckpt_path" not in settings:
            return
        path, command = settings.get("ckpt_path"), self.config.subcommand
        is_ours, given = _is_gated_classifier(settings), self._plain()
        if is_ours and (path == "last" or (path is None and command != "fit")):
            # Without a checkpoint, Lightning would quietly evaluate an untrained net.
            configs = [str(config) for config in settings.get("config") or []]
            settings.ckpt_path = path = newest_checkpoint(given["trainer"], configs)
            rank_zero_info(f"Using the newest checkpoint, {path}")
        elif path is None and command != "fit":
            rank_zero_warn(
                f"There is no --ckpt_path: `{command}` uses the weights that the model begins with."
            )
        if path is not None and settings.get("weights_only") is None:
            settings.weights_only = True  # Lightning reads pickles from a URL otherwise
        if path is None:
            return
        # The user trusts what this command itself names.
        checkpoint = read_checkpoint(path, also=modules_named(given))
        self._preparation = preparation_in(checkpoint)
        saved = dict(checkpoint.get("hyper_parameters", {}))
        if is_ours:
            self._take_model(path, saved, given["model"]["init_args"])
            return
        arguments = settings.get("model.init_args") or Namespace()
        parameters = inspect.signature(import_class(settings.model.class_path, object)).parameters
        for name, value in saved.items():
            if name not in arguments or name not in parameters:
                continue
            # The parser would import what a text names, unless it is to be a text.
            is_text = isinstance(value, str) and parameters[name].annotation is str
            if is_text or isinstance(value, (bool, int, float)):
                arguments[name] = value

    def _take_model(self, path: str, saved: dict[str, Any], configured: dict[str, Any]) -> None:
        """Use the model of a checkpoint, and say where the config's differs."""
        class_path = saved.get("_class_path")
        if not isinstance(class_path, str) or "_instantiator" in saved:
            raise refusal(f"{path!r} is no checkpoint of a GatedClassifier: give another one.")
        import_class(class_path, GatedClassifier)
        self._saved = saved
        if differing := _differing(configured, saved):
            rank_zero_info(
                "The checkpoint brings its own model, which differs from the config in "
                f"{', '.join(differing)}."
            )

    @override
    def before_instantiate_classes(self) -> None:
        self._size_by_data()
        if _is_gated_classifier(self._settings):
            self.parser.add_instantiator(
                self._instantiate_plainly, GatedClassifier, subclasses=True, prepend=True
            )

    def _size_by_data(self) -> None:
        """Fill in what the model leaves open and the data knows, so that it is saved too."""
        settings = self._settings
        wanted = settings.get("model.init_args") or Namespace()
        sizes = [k for k in ("num_classes", "input_shape") if k in wanted and wanted[k] is None]
        if not sizes or settings.get("data") is None or self._saved is not None:
            return
        parser = self._parser(self.config.subcommand)
        data = parser.instantiate(Namespace(data=settings.data)).data
        for key in sizes:
            value = getattr(data, key, None)
            wanted[key] = list(value) if isinstance(value, (tuple, torch.Size)) else value

    def _instantiate_plainly(
        self, class_type: type[GatedClassifier], *args: Any, **kwargs: Any
    ) -> GatedClassifier:
        # The parser has checked the arguments and made factories of net and optimizer. The model is
        # given the plain values instead: they are its hyper-parameters in the checkpoint.
        if self._saved is None:
            return class_type(**self._plain()["model"]["init_args"])
        saved = dict(self._saved)
        return import_class(saved.pop("_class_path"), GatedClassifier)(**saved)

    @override
    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        use_preparation = getattr(self.datamodule, "use_preparation", None)
        path = self._settings.get("ckpt_path")
        # In a fit, Lightning hands it over when it restores the data.
        if use_preparation is None or path is None or self.config.subcommand == "fit":
            return
        if self._preparation is None:
            rank_zero_warn(
                f"{path} does not say how its data was prepared, as those of earlier versions "
                "do not: see that this data is prepared in the same way."
            )
        else:
            use_preparation(self._preparation)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(self.model, GatedClassifier):
            predicts = self.subcommand == "predict"
            trainer.callbacks.append(WritePredictions() if predicts else WriteTestTables())  # type: ignore[attr-defined]
            if self.config.subcommand != "plan":
                claim_run_folder(trainer)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFileCheckpointIO()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            leave_out_empty_hooks(callback)
        return trainer

    def after_fit(self) -> None:
        """Say how a training has ended."""
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            print_closing(self.trainer)
        if reason := not_finite(self.trainer):
            raise refusal(f"The training has failed: {reason}.", status=1)


def _is_gated_classifier(settings: Namespace) -> bool:
    class_path = settings.get("model.class_path")
    return class_path is not None and issubclass(
        import_class(class_path, pl.LightningModule), GatedClassifier
    )


def _differing(configured: Any, brought: Any, key: str = "model") -> list[str]:
    """Name the values of the config that a checkpoint replaces; what was left open is no value."""
    if configured is None or configured == brought:
        return []
    if isinstance(configured, dict) and isinstance(brought, dict):
        names = sorted(configured.keys() | brought.keys())
        parts = [(n, configured.get(n), brought.get(n)) for n in names]
        return [name for n, a, b in parts for name in _differing(a, b, f"{key}.{n}")]
    return [key]
