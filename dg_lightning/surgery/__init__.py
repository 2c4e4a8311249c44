"""Surgery: gates put into other people's models, and taken out again.

`find_units` runs a model on an example and says what can be gated. `add_gates` puts gates in, which
callbacks then train. `remove_gates` takes them out; `compact` takes out what they close, too.
`convert` makes a trained Transformer decide token by token what to run.
"""

from .compaction import CompactModel, compact, load_compact, save_compact
from .conversion import Converted, convert
from .finding import Units, UnitSearchResult, find_units
from .gating import add_gates, remove_gates, restore_gates

__all__ = [
    "CompactModel",
    "Converted",
    "UnitSearchResult",
    "Units",
    "add_gates",
    "compact",
    "convert",
    "find_units",
    "load_compact",
    "remove_gates",
    "restore_gates",
    "save_compact",
]
