"""Dispatch of commands to functions, and handling of their errors."""

import os
import sys
from contextlib import nullcontext
from errno import EFBIG, ENOSPC

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dg_lightning.cli.errors import (
    describe_unexpected,
    involves_user_code,
    is_user_error,
    one_line,
    refusal,
)
from dg_lightning.cli.program import run_command
from dg_lightning.cli.study_commands import STUDY_COMMANDS, run_study_command
from dg_lightning.cli.views import VIEW_COMMANDS, run_view_command
from dg_lightning.study.quiet import quietly

__all__ = ["run"]

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
