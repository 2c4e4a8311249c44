"""Fast inference of trained nets: compaction, skipped blocks and export."""

from dg_lightning.runtime.compaction import (
    Compact,
    compact,
    fastest_compact,
    freeze_gates,
    frozen_where_faster,
    usage_of,
)
from dg_lightning.runtime.export import export
from dg_lightning.runtime.skipping import skip_closed_blocks

__all__ = [
    "Compact",
    "compact",
    "export",
    "fastest_compact",
    "freeze_gates",
    "frozen_where_faster",
    "skip_closed_blocks",
    "usage_of",
]
