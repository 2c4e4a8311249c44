"""Measure what compact models save, and which budget of MACs takes a given share of the time."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dg_lightning.budget.budget import gate_budgets
from dg_lightning.gates import gate_layers
from dg_lightning.runtime.timing import median_seconds
from dg_lightning.surgery.compaction import CompactModel, compact
from dg_lightning.surgery.gating import gated_units, remove_gates, without_gates
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


_MULTIPLES = (1, 8, 32, 64)
_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
_CLOSED = -10.0  # a logit whose p is below every useful threshold


@dataclass(frozen=True)
class LatencyTable:
    """Measured times of compact versions of a model.

    Args:
        multiple: The multiple of widths that was fastest, for `compact(..., multiple=...)`.
        macs: MACs of each version relative to dense, as `BudgetController` counts them.
        times: Time of each version relative to the model without gates.
    """

    multiple: int
    macs: list[float]
    times: list[float]

    def budget(self, latency: float) -> float:
        """Return the share of the MACs that takes a share of the time.

        Raises:
            ValueError: If no version is as fast.
        """
        if not 0 < latency <= 1:
            raise ValueError(f"`latency` must be in (0, 1], got {latency}.")
        points = sorted(zip(self.macs, self.times, strict=True), reverse=True)
        for (more, slower), (less, faster) in pairwise([(1.0, 1.0), *points]):
            if slower <= latency:
                return more
            if faster <= latency:
                return less + (more - less) * (latency - faster) / (slower - faster)
        fastest, macs = min(zip(self.times, self.macs, strict=True))
        raise ValueError(
            f"`latency` must be at least {fastest:.3g} on this machine, got {latency:.3g}: the "
            f"fastest version, with {macs:.0%} of the MACs, takes {fastest:.1%} of the time."
        )


def measure_latency(
    model: nn.Module,
    example: Any,
    *,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    shares: Sequence[float] = _SHARES,
    multiples: Sequence[int] = _MULTIPLES,
) -> LatencyTable:
    """Time compact versions of a model on this machine, which keep other shares of all units.

    The table says which budget takes, for example, half of the time. Pass it to `BudgetController`,
    and compact the trained model with the table's `multiple`.

    Args:
        model: A model with static gates. It is not changed, and its gates may be untrained.
        example: Example inputs, as in `find_units`, whose tensors have one entry per sample.
        batch_size: Number of samples per call (default: that of the example).
        device: Where to run (default: the model's device).
        dtype: Type of the weights and of floating-point inputs (default: the model's).
        shares: Shares of the units that the versions keep.
        multiples: Multiples of widths to choose from.
    """
    if not gated_units(model):
        raise ValueError(f"{type(model).__name__} has no gates from `add_gates`: call it first.")
    if not shares or not all(0 < share < 1 for share in shares):
        raise ValueError(f"`shares` must be shares of the units in (0, 1), got {shares!r}.")
    twin = copy.deepcopy(model).eval()
    args, kwargs = arguments_of(twin, example)
    place = torch.device(device) if device is not None else next(twin.parameters()).device
    timed = _converted(_resized((args, kwargs), batch_size), place, dtype)
    dense = copy.deepcopy(twin)
    remove_gates(dense)
    runs = {"dense": _call(dense.to(place, dtype), timed)}
    for multiple in dict.fromkeys(multiples):
        runs[str(multiple)] = _call(_shrunk(twin, example, 0.5, multiple, place, dtype), timed)
    seconds = median_seconds(runs, place)
    multiple = min(dict.fromkeys(multiples), key=lambda m: seconds[str(m)])
    macs = []
    runs = {"dense": runs["dense"]}
    for share in shares:
        _keep(twin, share)
        with torch.no_grad():
            twin(*args, **kwargs)
        macs.append(float(gate_budgets(twin, {"": 1.0}, None, "macs")[""].used()))
        runs[str(share)] = _call(_shrunk(twin, example, share, multiple, place, dtype), timed)
    seconds = median_seconds(runs, place)
    return LatencyTable(multiple, macs, [seconds[str(s)] / seconds["dense"] for s in shares])


def _keep(model: nn.Module, share: float) -> None:
    """Open the first units of every gate, and close the others."""
    for gate in gate_layers(model).values():
        logit: Any = getattr(gate, "logit", None)
        if not isinstance(logit, Tensor):
            raise ValueError("Latency is measured with static gates only: use `kind='static'`.")
        logit.data.fill_(-_CLOSED)
        logit.data[max(1, round(share * len(logit))) :] = _CLOSED


def _shrunk(
    model: nn.Module, example: Any, share: float, multiple: int, device: Any, dtype: Any
) -> nn.Module:
    _keep(model, share)
    return compact(model, example, multiple=multiple).model.to(device, dtype)


def _call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = inputs

    @torch.inference_mode()
    def call() -> object:
        return model(*args, **kwargs)

    return call


def _resized(inputs: Any, size: int | None) -> Any:
    if size is None:
        return inputs
    index = torch.arange(size)

    def resize(tensor: Tensor) -> Tensor:
        return tensor[index % len(tensor)] if tensor.ndim else tensor

    return apply_to_collection(inputs, Tensor, resize)


def _converted(inputs: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return apply_to_collection(inputs, Tensor, convert)
