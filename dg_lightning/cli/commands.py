"""Which function runs a command, and what becomes of its errors."""

import os
import sys
from contextlib import nullcontext
from errno import EFBIG, ENOSPC

import torch
import torch.distributed as dist

from dg_lightning.cli.errors import (
    is_users_error,
    one_line,
    passes_own_code,
    refusal,
    unexpected,
)
from dg_lightning.cli.many_runs import MANY_RUNS, run_many
from dg_lightning.cli.program import run_command
from dg_lightning.cli.quiet import quietly
from dg_lightning.cli.views import VIEWS, show

__all__ = ["run"]

_QUIET = "--quiet"


def run(given: list[str]) -> None:
    """Run a command that `start.main` has not answered by itself."""
    # What the optimizer keeps of a closed unit halves with every few steps, and CPUs are many times
    # slower with numbers below 1e-38: up to a third of the time after some epochs. First of all,
    # because threads take it over when they are made.
    torch.set_flush_denormal(True)
    if _QUIET in given:
        asks = any(a in ("-h", "--help") or a.startswith("--print_config") for a in given)
        with nullcontext() if asks else quietly():
            run([argument for argument in given if argument != _QUIET])
        return
    command, *rest = given
    try:
        sys.path.append(os.getcwd())  # as `python -m` does; last, so that nothing is shadowed
        if command in MANY_RUNS:
            run_many(given)
        elif command in VIEWS:
            show(given)
        elif command == "export":
            # Here, because it takes a moment to import, and training needs none of it.
            from dg_lightning.cli.export import run_export

            run_export(rest)
        elif command == "bench":
            from dg_lightning.cli.bench import run_bench

            run_bench(rest)
        else:
            run_command(given)
    except Exception as error:  # whose fault it is, type and origin tell together
        if is_users_error(error):
            is_full = getattr(error, "errno", None) in (ENOSPC, EFBIG)
            way_out = ": free some space, nothing old is lost." * is_full
            raise refusal(f"{one_line(str(error))}{way_out}", error) from error
        if passes_own_code(error):  # whoever wrote it wants to see where
            raise
        raise refusal(unexpected(error), error, status=1) from error
    if dist.is_available() and dist.is_initialized():
        # Lightning leaves this to the end of the process, where gloo may abort a rank that is left.
        dist.barrier()
        dist.destroy_process_group()
