"""Fast inference of trained nets: compaction, block-wise execution, export and benchmarks."""

from dg_lightning.runtime.block_gated import BlockGatedMLP
from dg_lightning.runtime.choice import (
    fastest_compact,
    freeze_gates,
    frozen_where_faster,
    usage_of,
)
from dg_lightning.runtime.compaction import Compact, compact
from dg_lightning.runtime.export import export
from dg_lightning.runtime.skipping import skip_closed_blocks
from dg_lightning.runtime.sparse import SparseLinear

__all__ = [
    "BlockGatedMLP",
    "Compact",
    "SparseLinear",
    "compact",
    "export",
    "fastest_compact",
    "freeze_gates",
    "frozen_where_faster",
    "skip_closed_blocks",
    "usage_of",
]
