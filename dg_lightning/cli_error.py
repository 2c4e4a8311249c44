"""Exit from the program with a one-line error message."""

import os
import sys
import traceback

from lightning_utilities.core.rank_zero import rank_zero_only


class CLIError(SystemExit):
    """Exits the program with status 2 for a user error, or 1 for a failed run."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(status)
        self.message = message


def cli_error(message: str, cause: BaseException | None = None, status: int = 2) -> CLIError:
    """Print the message and return the exception to raise.

    If the environment variable `DG_TRACEBACK` is set, also print the traceback of the cause.
    """
    if cause is not None and os.environ.get("DG_TRACEBACK"):
        traceback.print_exception(cause)
    if getattr(rank_zero_only, "rank", 0) == 0:
        sys.stderr.write(f"dg-lightning: error: {message}\n")
    return CLIError(message, status)
