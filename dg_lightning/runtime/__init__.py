"""Fast inference with trained nets: blocks that are closed are skipped."""

from dg_lightning.runtime.skipping import lay_out_by_unit, skip_closed_blocks

__all__ = [
    "lay_out_by_unit",
    "skip_closed_blocks",
]
