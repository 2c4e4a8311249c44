"""Dispatch commands and turn errors into one-line messages."""

import os
import sys
from contextlib import nullcontext
from errno import EFBIG, ENOSPC
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dg_lightning.cli.errors import (
    OneLineErrorParser,
    describe_unexpected,
    involves_user_code,
    is_user_error,
    one_line,
)
from dg_lightning.cli.program import run_command
from dg_lightning.cli.runs import add_run_options, expand_run, selected_checkpoint
from dg_lightning.cli.start import COMMANDS
from dg_lightning.cli_error import cli_error
from dg_lightning.configs import resolve_config_paths
from dg_lightning.files import write_text
from dg_lightning.quiet import quietly

T = TypeVar("T")


def report_command(args: list[str]) -> None:
    """Run `dg-lightning report`."""
    from dg_lightning.study.report import write_report

    parser = OneLineErrorParser(
        prog="dg-lightning report",
        description="Write an HTML report on a run or a study as a single file. With --wandb, save "
        "a W&B workspace that shows open rates, heat maps and accuracy against MACs instead.",
    )
    add_run_options(parser)
    parser.add_argument(
        "--output", type=str, help="Output file; by default report.html in the run folder."
    )
    parser.add_argument("--wandb", type=str, help="entity/project in W&B, instead of a run.")
    parser.add_argument(
        "--by_variant", action="store_true", help="With --wandb: average the seeds of a study."
    )
    given = parser.parse_args(args)
    chosen = [name for name in ("run", "config", "ckpt_path") if getattr(given, name) is not None]
    if given.wandb is not None and chosen:
        raise cli_error(f"`report --wandb` reports on a project: leave out `{chosen[0]}`.")
    if given.by_variant and given.wandb is None:
        raise cli_error("`--by_variant` needs `--wandb entity/project`.")
    if given.wandb is not None:
        _save_workspace(given.wandb, given.output, given.by_variant)
        return
    is_folder = given.run is not None and Path(given.run).is_dir()  # a run or a study
    if is_folder and given.config is None and given.ckpt_path is None:
        folder = Path(given.run)
    else:
        folder = Path(selected_checkpoint(given)).parents[1]
    path = write_report(folder, None if given.output is None else Path(given.output))
    print(f"The report is {path}.")


def _save_workspace(name: str, output: str | None, by_variant: bool) -> None:
    entity, _, project = name.partition("/")
    if not entity or not project:
        raise cli_error(f"`wandb` must be entity/project, got {name!r}.")
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ModuleNotFoundError as error:
        raise cli_error(
            "`report --wandb` needs W&B: pip install wandb wandb-workspaces.", error
        ) from error
    from dg_lightning.monitoring.workspace import gate_workspace, reachable_server, specification

    workspace = gate_workspace(entity, project, by_variant)
    address, answers = reachable_server()
    reason = "could not be reached"
    if answers:
        try:
            workspace.save()
        except (wandb.Error, ValueError, OSError) as error:
            reason = f"rejected the workspace ({' '.join(str(error).split())})"
        else:
            print(f"The workspace is {workspace.url}.")
            return
    path = Path(output or "wandb_workspace.json")
    write_text(path, specification(workspace))
    sys.stderr.write(
        f"{address} {reason}: the workspace specification is in {path}. To save it in W&B, run "
        "`wandb login` and then this command on a machine that can reach the server.\n"
    )


def study_command(args: list[str]) -> None:
    """Run `dg-lightning study`."""
    _require_optuna("study")
    from dg_lightning.study import Study, run_study

    if not run_study(_read_settings("study", Study, args), run_command):
        sys.exit(1)


def search_command(args: list[str]) -> None:
    """Run `dg-lightning search`."""
    _require_optuna("search")
    from dg_lightning.study import Search, run_search

    if not run_search(_read_settings("search", Search, args), run_command):
        sys.exit(1)


def _require_optuna(command: str) -> None:
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise cli_error(f"`{command}` needs Optuna: pip install optuna.", error) from error


def _read_settings(command: str, kind: type[T], args: list[str]) -> T:
    parser = OneLineErrorParser(prog=f"dg-lightning {command}", description=COMMANDS[command])
    parser.add_argument(
        "--config", action="config", help="Name of a shipped config, or path of a config file."
    )
    parser.add_class_arguments(kind)
    given = parser.parse_args(resolve_config_paths(args))
    given.pop("config")
    return kind(**parser.instantiate(given).as_dict())


# Command -> module, for commands that are not subcommands of GateCLI.
_MODULES = {
    "study": "dg_lightning.cli.commands",
    "search": "dg_lightning.cli.commands",
    "report": "dg_lightning.cli.commands",
    "features": "dg_lightning.cli.features",
    "export": "dg_lightning.cli.export",
    "convert": "dg_lightning.cli.convert",
}
_QUIET = "--quiet"
_TERMINATED = 143  # 128 + SIGTERM, as shells report it


def run(given: list[str]) -> None:
    """Run a command that needs torch."""
    # The optimizer state of closed units decays to denormal numbers, which slow CPUs down by up to
    # a third after some epochs. This comes first, because new threads inherit the setting.
    torch.set_flush_denormal(True)
    if _QUIET in given:
        prints = any(a in ("-h", "--help") or a.startswith("--print_config") for a in given)
        with nullcontext() if prints else quietly():
            run([argument for argument in given if argument != _QUIET])
        return
    command, *rest = given
    try:
        sys.path.append(os.getcwd())  # as `python -m` does, but last, so that it shadows nothing
        if command in _MODULES:
            # Imported here, because training does not need it.
            getattr(import_module(_MODULES[command]), f"{command}_command")(rest)
        elif run_command(expand_run(given)).trainer.received_sigterm:
            raise SIGTERMException
    except SIGTERMException:  # Lightning exits with status 0
        hint = "; `fit --ckpt_path last` resumes from the last checkpoint, if any" * (
            command == "fit"
        )
        sys.stderr.write(f"dg-lightning: terminated{hint}.\n")
        raise SystemExit(_TERMINATED) from None
    except Exception as error:  # classified by type and origin
        if is_user_error(error):
            is_full = getattr(error, "errno", None) in (ENOSPC, EFBIG)
            remedy = ": free some space; existing files are intact." * is_full
            raise cli_error(f"{one_line(str(error))}{remedy}", error) from error
        if involves_user_code(error):  # the author of that code needs the full traceback
            raise
        raise cli_error(describe_unexpected(error), error, status=1) from error
    if dist.is_available() and dist.is_initialized():
        # Lightning leaves this to process exit, where gloo may abort the remaining ranks.
        dist.barrier()
        dist.destroy_process_group()
