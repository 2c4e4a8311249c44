"""Measure what a compact model saves: parameters, MACs, bytes and milliseconds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dg_lightning.runtime.timing import median_seconds
from dg_lightning.surgery.compaction import CompactModel
from dg_lightning.surgery.gating import without_gates
from dg_lightning.surgery.recording import arguments_of

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Savings:
    """Sizes of a model without gates and of its compact version, in this order.

    Args:
        parameters: Number of parameters.
        macs: MACs per sample, by torch's counter.
        megabytes: Size of the weights.
        milliseconds: Median time per call on this machine, by batch size.
    """

    parameters: tuple[int, int]
    macs: tuple[int, int]
    megabytes: tuple[float, float]
    milliseconds: dict[int, tuple[float, float]] = field(default_factory=dict)

    def table(self) -> "Table":
        """Return the sizes as a table."""
        from rich.table import Table

        table = Table("", "before", "compact", "ratio")
        rows: dict[str, tuple[tuple[float, float], str]] = {
            "parameters": (self.parameters, ",.0f"),
            "MACs per sample": (self.macs, ",.0f"),
            "weights, MB": (self.megabytes, ",.2f"),
        }
        for size, times in self.milliseconds.items():
            rows[f"batch of {size}, ms"] = times, ",.3g"
        for name, ((before, after), form) in rows.items():
            table.add_row(name, f"{before:{form}}", f"{after:{form}}", f"{after / before:.2f}")
        return table


@torch.no_grad()
def measure_savings(
    model: nn.Module, compact: CompactModel, example: Any, batch_sizes: Sequence[int] = (1,)
) -> Savings:
    """Compare a compact model with its original without gates.

    Args:
        model: The model that was made compact. It is not changed.
        compact: The result of `compact`.
        example: Example inputs, whose tensors have one entry per sample.
        batch_sizes: Batch sizes to time; none to measure no times.
    """
    pair = (without_gates(model), compact.model.eval())
    args, kwargs = arguments_of(model, example)
    device = next(compact.model.parameters()).device
    milliseconds = {}
    for size in batch_sizes:
        inputs: Any = apply_to_collection((args, kwargs), Tensor, _repeat, size)
        runs = {str(i): _caller(one, *inputs) for i, one in enumerate(pair)}
        seconds = median_seconds(runs, device)
        milliseconds[size] = 1e3 * seconds["0"], 1e3 * seconds["1"]
    single: Any = apply_to_collection((args, kwargs), Tensor, _repeat, 1)
    return Savings(
        (_parameters(pair[0]), _parameters(pair[1])),
        (_macs(pair[0], *single), _macs(pair[1], *single)),
        (_megabytes(pair[0]), _megabytes(pair[1])),
        milliseconds,
    )


def _repeat(tensor: Tensor, size: int) -> Tensor:
    return tensor[:1].expand(size, *tensor.shape[1:]).contiguous() if tensor.ndim else tensor


def _caller(model: nn.Module, args: Any, kwargs: Any) -> Any:
    return lambda: model(*args, **kwargs)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _macs(model: nn.Module, args: Any, kwargs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    return int(counter.get_total_flops()) // 2


def _megabytes(model: nn.Module) -> float:
    unique = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in unique) / 1e6
