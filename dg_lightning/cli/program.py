"""The program, with its commands of one training; `many_runs` has the others."""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from dg_lightning import GatedClassifier, __version__, callbacks, datamodules
from dg_lightning.cli.checkpoints import newest_checkpoint, read_checkpoint
from dg_lightning.cli.closing import print_closing
from dg_lightning.cli.configs import with_config_paths
from dg_lightning.cli.errors import OneLineErrorParser, is_users_error, one_line, refusal
from dg_lightning.cli.many_runs import MANY_RUNS, run_many
from dg_lightning.cli.outputs import SaveWholeConfig, WritePredictions, WriteTestTables, plain
from dg_lightning.cli.plan import PlanningTrainer
from dg_lightning.cli.quiet import quietly
from dg_lightning.cli.views import VIEWS, show
from dg_lightning.spec import import_class
from dg_lightning.step_hooks import leave_out_empty_hooks

__all__ = ["GateCLI", "main", "run_command"]

# Imported so that their classes can be named without a path: `--trainer.callbacks+=GatePenalty`.
_NAMED_BY_CLASS_ALONE = (callbacks, datamodules)
# Warnings and notes of Lightning that tell a user of this program nothing.
_NOISE = (
    ".*does not have many workers.*",  # the data is in memory
    ".*LeafSpec.*is deprecated.*",
    "The dirpath has changed",  # a test run writes no checkpoint
)
_QUIET = "--quiet"
_INTERRUPTED = 130  # 128 + SIGINT, as shells say it
_ADVERTISING = "Tip: For seamless cloud"


def main(args: Sequence[str] | None = None) -> None:
    """Run the program with the given arguments, or with those of the command line."""
    # What the optimizer keeps of a closed unit halves with every few steps, and CPUs are many times
    # slower with numbers below 1e-38: up to a third of the time after some epochs. First of all,
    # because threads take it over when they are made.
    torch.set_flush_denormal(True)
    sys.path.append(os.getcwd())  # as `python -m` does; last, so that nothing is shadowed
    given = list(sys.argv[1:] if args is None else args)
    if _QUIET in given:
        asks = any(a in ("-h", "--help") or a.startswith("--print_config") for a in given)
        with nullcontext() if asks else quietly():
            main([argument for argument in given if argument != _QUIET])
        return
    try:
        if given and given[0] in MANY_RUNS:
            run_many(given)
        elif given and given[0] in VIEWS:
            show(given)
        elif given and given[0] == "export":
            # Here, because it takes a moment to import, and training needs none of it.
            from dg_lightning.cli.export import run_export

            run_export(given[1:])
        elif given and given[0] == "bench":
            from dg_lightning.cli.bench import run_bench

            run_bench(given[1:])
        else:
            run_command(given)
    except KeyboardInterrupt:  # no fault at all; a training is ended well by Lightning itself
        sys.stderr.write("dg-lightning: interrupted.\n")
        raise SystemExit(_INTERRUPTED) from None
    except Exception as error:  # whose fault it is, type and origin tell together
        if not is_users_error(error):
            raise
        raise refusal(one_line(str(error)), error) from error
    if dist.is_available() and dist.is_initialized():
        # Lightning leaves this to the end of the process, where gloo may abort a rank that is left.
        dist.barrier()
        dist.destroy_process_group()


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
            "epilog": "Many trainings: dg-lightning {study,search} --help; what came out: "
            "dg-lightning {report,wandb-workspace} --help; made fast: dg-lightning {export,bench} "
            "--help. With --quiet, warnings and errors only.",
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
        super().__init__(*classes, args=args, **options)  # type: ignore[misc]

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "plan": {"model", "datamodule"}}

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list)
        try:
            self.config = parser.parse_args(with_config_paths(args))
        except UnicodeDecodeError as error:
            raise refusal(f"A config file is not text: {error}.", error) from error

    @property
    def _settings(self) -> Namespace:
        settings: Namespace = self.config[self.config.subcommand]
        return settings

    @override
    def _parse_ckpt_path(self) -> None:
        """Let a checkpoint bring its own model, as a whole.

        Lightning would merge its hyper-parameters into those of the config instead.
        """
        settings = self._settings
        if "ckpt_path" not in settings:
            return
        path = settings.get("ckpt_path")
        if not _is_gated_classifier(settings):
            if path is not None and os.path.isfile(path):
                read_checkpoint(path)
            super()._parse_ckpt_path()
            return
        # Without a checkpoint, Lightning would quietly evaluate an untrained net.
        if path == "last" or (path is None and self.config.subcommand != "fit"):
            settings.ckpt_path = path = newest_checkpoint(settings)
            rank_zero_info(f"Using the newest checkpoint, {path}")
        if path is None or path.startswith("registry") or "://" in path:
            return
        saved = dict(read_checkpoint(path).get("hyper_parameters", {}))
        class_path = saved.pop("_class_path", None)
        if class_path is None or not issubclass(import_class(class_path), GatedClassifier):
            raise refusal(f"{path!r} is no checkpoint of a GatedClassifier: give another one.")
        parser = self._parser(self.config.subcommand)
        configured = plain(parser, settings)["model"]["init_args"]
        settings.model = None
        model = {"class_path": class_path, "init_args": saved}
        self.config = self.parser.parse_object(
            {self.config.subcommand: {"model": model}}, self.config
        )
        brought = plain(parser, self._settings)["model"]["init_args"]
        if differing := _differing(configured, brought):
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
        if not sizes or settings.get("data") is None:
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
        model = plain(self._parser(self.config.subcommand), self._settings)["model"]
        return class_type(**model["init_args"])

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(self.model, GatedClassifier):
            predicts = self.subcommand == "predict"
            trainer.callbacks.append(WritePredictions() if predicts else WriteTestTables())  # type: ignore[attr-defined]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            leave_out_empty_hooks(callback)
        return trainer

    def after_fit(self) -> None:
        """Say how a training has ended."""
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            print_closing(self.trainer)


def _is_gated_classifier(settings: Namespace) -> bool:
    class_path = settings.get("model.class_path")
    return class_path is not None and issubclass(import_class(class_path), GatedClassifier)


def _differing(configured: Any, brought: Any, key: str = "model") -> list[str]:
    """Name the values of the config that a checkpoint replaces; what was left open is no value."""
    if configured is None or configured == brought:
        return []
    if isinstance(configured, dict) and isinstance(brought, dict):
        names = sorted(configured.keys() | brought.keys())
        parts = [(n, configured.get(n), brought.get(n)) for n in names]
        return [name for n, a, b in parts for name in _differing(a, b, f"{key}.{n}")]
    return [key]
