"""Find the function of a command, and turn errors into one line."""

import os
import sys
from contextlib import nullcontext
from errno import EFBIG, ENOSPC
from pathlib import Path

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
from dg_lightning.cli.runs import add_config_option, newest_run
from dg_lightning.configs import resolve_config_paths
from dg_lightning.files import write_text
from dg_lightning.quiet import quietly
from dg_lightning.refusal import refusal

VIEW_COMMANDS = ("report", "features")


def run_view_command(args: list[str]) -> None:
    """Run one of these commands with the arguments after its name."""
    command, *rest = args
    if command == "report":
        _report(rest)
    else:
        from dg_lightning.cli.features import run_features

        run_features(rest)


def _report(args: list[str]) -> None:
    from dg_lightning.study.report import write_report

    parser = OneLineErrorParser(
        prog="dg-lightning report",
        description="Write the HTML report of a study or of a run as a single file. With --wandb, "
        "save a workspace in W&B: open rates, heat maps, accuracy against MACs.",
    )
    parser.add_argument("folder", type=str, nargs="?", help="Folder of a study, or of a run.")
    add_config_option(parser)
    parser.add_argument("--output", type=str, help="The file; report.html in that folder if None.")
    parser.add_argument("--wandb", type=str, help="entity/project in W&B, in place of a folder.")
    given = parser.parse_args(args)
    if given.wandb is not None:
        _save_workspace(given.wandb, given.output)
        return
    if (given.folder is None) == (given.config is None):
        raise refusal("Give either a folder, or --config for the newest run of a config.")
    folder = given.folder or Path(newest_run(given.config)).parents[1]
    path = write_report(Path(folder), None if given.output is None else Path(given.output))
    print(f"The report is {path}.")


def _save_workspace(name: str, output: str | None) -> None:
    entity, _, project = name.partition("/")
    if not entity or not project:
        raise refusal(f"`wandb` must be entity/project, got {name!r}.")
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ModuleNotFoundError as error:
        raise refusal(
            "`report --wandb` needs W&B: pip install wandb wandb-workspaces.", error
        ) from error
    from dg_lightning.monitoring.workspace import gate_workspace, reachable_server, specification

    workspace = gate_workspace(entity, project)
    address, answers = reachable_server()
    reason = "could not be reached"
    if answers:
        try:
            workspace.save()
        except (wandb.Error, ValueError, OSError) as error:
            reason = f"would not take it ({' '.join(str(error).split())})"
        else:
            print(f"The workspace is {workspace.url}.")
            return
    path = Path(output or "wandb_workspace.json")
    write_text(path, specification(workspace))
    sys.stderr.write(
        f"{address} {reason}: the specification of the workspace is in {path}. To save it, run "
        "`wandb login` and this command again where the server can be reached.\n"
    )


_DESCRIPTIONS = {
    "study": "Train and test variants x seeds of a dataset, and compare them in one table.",
    "search": "Search settings that are accurate and cheap, by validation alone.",
}
STUDY_COMMANDS = tuple(_DESCRIPTIONS)


def run_study_command(args: list[str]) -> None:
    """Run `study` or `search` with the arguments after that word."""
    command, *rest = args
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise refusal(f"`{command}` needs Optuna: pip install optuna.", error) from error
    from dg_lightning.cli.program import run_command
    from dg_lightning.study import Search, Study, run_search, run_study

    kind = Study if command == "study" else Search
    parser = OneLineErrorParser(prog=f"dg-lightning {command}", description=_DESCRIPTIONS[command])
    parser.add_argument("--config", action="config", help="One that ships, or a file.")
    parser.add_class_arguments(kind)
    given = parser.parse_args(resolve_config_paths(rest))
    given.pop("config")
    settings = kind(**parser.instantiate(given).as_dict())
    if isinstance(settings, Search):
        succeeded = run_search(settings, run_command)
    else:
        succeeded = run_study(settings, run_command)
    if not succeeded:
        sys.exit(1)


_QUIET = "--quiet"
_TERMINATED = 143  # 128 + SIGTERM, as shells report it


def run(given: list[str]) -> None:
    """Run a command that `start.main` has not answered without torch."""
    # Optimizer state of closed units decays to denormal numbers, which slow CPUs down by up to a
    # third after some epochs. Set first, because threads inherit it when they are created.
    torch.set_flush_denormal(True)
    if _QUIET in given:
        prints = any(a in ("-h", "--help") or a.startswith("--print_config") for a in given)
        with nullcontext() if prints else quietly():
            run([argument for argument in given if argument != _QUIET])
        return
    command, *rest = given
    try:
        sys.path.append(os.getcwd())  # as `python -m`, but last, to shadow nothing
        if command in STUDY_COMMANDS:
            run_study_command(given)
        elif command in VIEW_COMMANDS:
            run_view_command(given)
        elif command == "export":
            # Imported here because it is slow and training does not need it.
            from dg_lightning.cli.export import run_export

            run_export(rest)
        elif command == "convert":
            from dg_lightning.cli.convert import run_convert

            run_convert(rest)
        elif run_command(given).trainer.received_sigterm:
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
            remedy = ": free some space, nothing old is lost." * is_full
            raise refusal(f"{one_line(str(error))}{remedy}", error) from error
        if involves_user_code(error):  # its author needs the traceback
            raise
        raise refusal(describe_unexpected(error), error, status=1) from error
    if dist.is_available() and dist.is_initialized():
        # Lightning leaves this to process exit, where gloo may abort the remaining ranks.
        dist.barrier()
        dist.destroy_process_group()
