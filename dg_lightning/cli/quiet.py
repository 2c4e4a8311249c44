"""A terminal that only warnings and errors are said on."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

__all__ = ["is_quiet", "quietly"]

_VARIABLE = "DG_QUIET"  # in the environment, so that worker processes know it too


def is_quiet() -> bool:
    """Tell whether nothing is to be said."""
    return _VARIABLE in os.environ


@contextmanager
def quietly() -> Iterator[None]:
    """Leave the terminal to warnings and errors."""
    before = dict(os.environ)
    os.environ |= {_VARIABLE: "1", "WANDB_SILENT": "true"}
    logging.disable(logging.INFO)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(logging.NOTSET)
        for name in (_VARIABLE, "WANDB_SILENT"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
