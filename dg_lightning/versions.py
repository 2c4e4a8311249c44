"""Versions of the packages that a result depends on."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import dg_lightning

_LIBRARIES = ("torch", "lightning", "torchmetrics", "numpy")


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of this package and its main dependencies, keyed by package name.

    >>> "torch" in versions()
    True
    """
    found = {"dg-lightning": dg_lightning.__version__}
    for name in (*_LIBRARIES, *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
