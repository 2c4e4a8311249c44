"""Many runs: variants x seeds with a table at the end, and the search for good settings."""

from dg_lightning.study.published import published
from dg_lightning.study.runner import Study, run_study
from dg_lightning.study.search import Parameter, Search, run_search
from dg_lightning.study.settings import Variant
from dg_lightning.study.tables import paired_difference, summarised

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
