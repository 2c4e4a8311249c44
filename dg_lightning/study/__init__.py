"""Studies of variants over several seeds, and searches for good settings."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dg_lightning.study.settings import Variant
from dg_lightning.study.tables import paired_difference, published, summarised

if TYPE_CHECKING:
    from dg_lightning.study.runner import Study, run_study
    from dg_lightning.study.search import Parameter, Search, run_search

__all__ = [
    "Parameter",
    "Search",
    "Study",
    "Variant",
    "paired_difference",
    "published",
    "run_search",
    "run_study",
    "summarised",
]

# Imported lazily: these need Optuna, while the tables used by reports do not.
_LAZY = {
    "Study": "runner",
    "run_study": "runner",
    "Parameter": "search",
    "Search": "search",
    "run_search": "search",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
