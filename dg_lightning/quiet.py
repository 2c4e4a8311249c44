"""Quiet mode: print only warnings and errors."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

_VARIABLE = "DG_QUIET"  # an environment variable, so that worker processes inherit it


def is_quiet() -> bool:
    """Return True if quiet mode is on."""
    return _VARIABLE in os.environ


@contextmanager
def quietly() -> Iterator[None]:
    """Print only warnings and errors inside this context."""
    before, disabled = dict(os.environ), logging.root.manager.disable
    os.environ |= {_VARIABLE: "1", "WANDB_SILENT": "true"}
    logging.disable(logging.INFO)
    try:
        with open(os.devnull, "w", encoding="utf-8") as devnull, redirect_stdout(devnull):
            yield
    finally:
        logging.disable(disabled)
        for name in (_VARIABLE, "WANDB_SILENT"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
