"""Add gates to existing models, and remove them again.

`find_units` runs a model on an example and reports what can be gated. `add_gates` adds gates, which
callbacks then train. `remove_gates` removes the gates. `compact` also removes the units that gates
close. `convert` turns a trained Transformer into one that selects feed-forward blocks per token.
"""

from .compaction import CompactModel, compact, load_compact, save_compact
from .conversion import Converted, convert
from .exporting import ExportedModel, export_model
from .finding import Units, UnitSearchResult, find_units
from .freezing import freeze_gates
from .gating import add_gates, load_weights, remove_gates, restore_gates
from .measuring import LatencyTable, Savings, measure_latency, measure_savings
from .pruning import prune

__all__ = [
    "CompactModel",
    "Converted",
    "ExportedModel",
    "LatencyTable",
    "Savings",
    "UnitSearchResult",
    "Units",
    "add_gates",
    "compact",
    "convert",
    "export_model",
    "find_units",
    "freeze_gates",
    "load_compact",
    "load_weights",
    "measure_latency",
    "measure_savings",
    "prune",
    "remove_gates",
    "restore_gates",
    "save_compact",
]
