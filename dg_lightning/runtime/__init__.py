"""Fast inference with trained nets: plain layers, skipped blocks and export."""

from dg_lightning.runtime.export import export
from dg_lightning.runtime.lowering import (
    PlainNet,
    block_usage,
    fastest_plain_net,
    freeze_gates,
    freeze_if_faster,
    plain_net,
)
from dg_lightning.runtime.skipping import lay_out_by_unit, skip_closed_blocks

__all__ = [
    "PlainNet",
    "block_usage",
    "export",
    "fastest_plain_net",
    "freeze_gates",
    "freeze_if_faster",
    "lay_out_by_unit",
    "plain_net",
    "skip_closed_blocks",
]
