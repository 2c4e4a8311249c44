"""Packing of open (sample, block) pairs into rows, and operations on packed rows."""

from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from dg_lightning.gates import DynamicGate
from dg_lightning.gates.base import at_least_float32
from dg_lightning.runtime import kernels, packing_kernels
from dg_lightning.runtime.launching import (
    ROWS,
    accumulator_dtype,
    descriptor,
    most_rows,
    multiprocessors,
    power_of_2,
    tile_sizes,
    worst_case_fits,
)

__all__ = ["Packing"]

_SAMPLES = 64  # per program
_CHUNK = 64
_STRIP = 8  # tiles


class Packing:
    """Row indices of the open (sample, block) pairs, with products and sums of packed rows.

    If rows for all pairs fit in memory, the host need not know how many are open: it does not
    synchronize with the device, so the computation can be captured in a CUDA graph.

    Args:
        gate: The gates, ``(samples, blocks)``, nonzero if open.
        counts: Number of open samples by sample tile and block, if already known.
    """

    def __init__(self, gate: Tensor, counts: Tensor | None = None) -> None:
        gate = gate.detach().contiguous()
        self.samples, self.blocks = gate.shape
        self.device = gate.device
        tiles = triton.cdiv(self.samples, _SAMPLES)
        width = power_of_2(self.blocks, 16)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": gate.device}
        # Each block is padded by less than a tile.
        self.rows = most_rows(self.samples, self.blocks)
        self.position = torch.empty(self.samples, self.blocks, **int32)
        self.sample, self.ends = torch.empty(self.rows, **int32), torch.empty(self.blocks, **int32)
        shape = self.samples, self.blocks
        sizes = {"TILE": _SAMPLES, "WIDTH": width}
        if counts is None:
            counts = torch.empty(tiles, self.blocks, **int32)
            packing_kernels.count_open[(tiles,)](gate, counts, *shape, **sizes)
        packing_kernels.assign_rows[(1,)](
            counts,
            self.ends,
            self.sample,
            tiles,
            self.blocks,
            TILES=power_of_2(tiles, _CHUNK),  # rounded to limit recompilation
            ROWS=ROWS,
            CHUNK=_CHUNK,
            WIDTH=width,
        )
        pairs = self.position, self.sample
        packing_kernels.place_pairs[(tiles,)](gate, counts, *pairs, *shape, **sizes)

    @classmethod
    def decide(cls, gate: DynamicGate, x: Tensor) -> "Packing":
        """Run a linear gate with a threshold in a single kernel, without gradients."""
        linear: Any = gate.network[0]
        tiles = triton.cdiv(len(x), _SAMPLES)
        p, g = (torch.empty(len(x), gate.blocks, device=x.device) for _ in range(2))
        counts = torch.empty(tiles, gate.blocks, dtype=torch.int32, device=x.device)
        packing_kernels.decide[(tiles,)](
            x,
            linear.weight,
            linear.weight if linear.bias is None else linear.bias,
            gate.temperature,
            gate.threshold,
            p,
            g,
            counts,
            len(x),
            gate.blocks,
            x.stride(0),
            HAS_BIAS=linear.bias is not None,
            INNER=x.shape[1],
            DEPTH=128,
            TILE=_SAMPLES,
            WIDTH=power_of_2(gate.blocks, 16),
            num_warps=4,
            num_stages=4,
        )
        gate.probability, gate.gate = p, g
        return cls(g, counts)

    def fit_to_memory(self, row_bytes: int) -> None:
        """Read the exact number of rows from the device if the worst case does not fit."""
        if not worst_case_fits(self.samples, self.blocks, row_bytes, self.device):
            self.rows = max(int(self.ends[-1]), ROWS)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gathers: bool = False,
        activation: str = "",
        gate: Tensor | None = None,
        value: Tensor | None = None,
    ) -> Tensor:
        """Multiply each row with the weights of its block.

        Args:
            x: Rows, or samples if `gathers`.
            weight: Weights of each block, ``(blocks, outputs, inputs)``, any strides.
            bias: Bias of each block, ``(blocks, outputs)``.
            gathers: Whether each row reads its sample of `x`.
            activation: Activation applied to the product.
            gate: What the activated product is multiplied by, ``(samples, blocks)``.
            value: Rows that it is multiplied by, too.
        """
        _, width, inner = weight.shape
        columns, depth, warps, stages, has_descriptors = tile_sizes(x.device, x.dtype)
        columns = min(columns, power_of_2(width, 16))
        depth = min(depth, power_of_2(inner, 16))
        stages = min(stages, max(inner // depth - 1, 2))  # no more than the product needs
        even = inner % depth == 0 and width % columns == 0
        described, by_rows = (
            descriptor(weight, columns, depth) if has_descriptors and even else (None, False)
        )
        out = x.new_empty(self.rows, width)
        jobs = self.rows // ROWS * triton.cdiv(width, columns)
        kernels.product[(min(jobs, multiprocessors(x.device)),)](
            x,
            self.sample,
            self.ends,
            weight if described is None else described,
            x if bias is None else bias,
            x if gate is None else gate,
            x if value is None else value,
            out,
            self.blocks,
            width,
            x.stride(0),
            *weight.stride(),
            GATHERS=gathers,
            HAS_BIAS=bias is not None,
            SCALES=gate is not None,
            MULTIPLIES=value is not None,
            ACTIVATION=activation,
            USES_DESCRIPTOR=described is not None,
            BY_ROWS=by_rows,
            EVEN=even,
            INNER=inner,
            BLOCKS=power_of_2(self.blocks, 2),
            ROWS=ROWS,
            COLUMNS=columns,
            DEPTH=depth,
            STRIP=_STRIP,
            ACC_DTYPE=accumulator_dtype(x),
            num_warps=warps,
            num_stages=stages,
        )
        return out

    def gather(self, x: Tensor) -> Tensor:
        """Return the sample of each row; padding rows are 0."""
        width = x.shape[1]
        columns = min(power_of_2(width, 16), 2048)
        out = x.new_empty(self.rows, width)
        grid = (min(self.rows, 16 * multiprocessors(x.device)), triton.cdiv(width, columns))
        kernels.gather[grid](
            x, self.sample, self.ends, out, self.blocks, width, x.stride(0), COLUMNS=columns
        )
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``leftᵀ right`` over the rows of each block, ``(blocks, left, right)``.

        Padding must be 0 on one side.
        """
        grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)  # since torch 2.10
        aligned = left.shape[1] % 8 == right.shape[1] % 8 == 0  # it needs 16-byte alignment
        if grouped_mm is not None and left.is_cuda and left.dtype == torch.bfloat16 and aligned:
            out: Tensor = grouped_mm(left.t(), right, offs=self.ends)
            return out
        starts = [0, *self.ends.tolist()]
        return torch.stack([left[a:b].t() @ right[a:b] for a, b in pairwise(starts)])

    def sum_blocks(self, packed: Tensor) -> Tensor:
        """Return the sum of each block's rows, ``(blocks, width)``; padding must be 0."""
        width = packed.shape[1]
        parts = 8
        wide = at_least_float32(packed.dtype)
        out = packed.new_empty(parts, self.blocks, width, dtype=wide)
        grid = (self.blocks, triton.cdiv(width, 64), parts)
        sizes = {"ROWS": ROWS, "COLUMNS": 64, "ACC_DTYPE": accumulator_dtype(packed)}
        kernels.sum_blocks[grid](packed, self.ends, out, width, **sizes)
        return out.sum(0).to(packed.dtype)

    def sum_samples(self, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the sum of each sample's rows, plus the bias: ``(samples, width)``."""
        width = packed.shape[1]
        columns = min(power_of_2(width, 16), 2048)
        out = packed.new_empty(self.samples, width)
        kernels.sum_samples[(self.samples, triton.cdiv(width, columns))](
            packed,
            self.position,
            packed if bias is None else bias,
            out,
            width,
            HAS_BIAS=bias is not None,
            BLOCKS=self.blocks,
            COLUMNS=columns,
            ACC_DTYPE=accumulator_dtype(packed),
        )
        return out

    def activate(
        self, raw: Tensor, activation: str, gate: Tensor | None, value: Tensor | None
    ) -> Tensor:
        """Make units of products; a product that stored both was six times as slow with GELU."""
        out = torch.empty_like(raw)
        kernels.activate[self._by_row](
            raw,
            self.sample,
            self.ends,
            raw if gate is None else gate,
            raw if value is None else value,
            out,
            self.blocks,
            ACTIVATION=activation,
            SCALES=gate is not None,
            MULTIPLIES=value is not None,
            **self._row_sizes(raw),
        )
        return out

    @property
    def _by_row(self) -> tuple[int]:
        """The programs that share rows."""
        return (min(self.rows, 16 * multiprocessors(self.device)),)

    def _row_sizes(self, raw: Tensor) -> dict[str, Any]:
        width = raw.shape[1]
        return {
            "WIDTH": width,
            "BLOCKS": power_of_2(self.blocks, 2),
            "COLUMNS": min(power_of_2(width, 16), 1024),
            "ACC_DTYPE": accumulator_dtype(raw),
        }

    def activation_backward(
        self,
        grad_hidden: Tensor,
        raw: Tensor,
        activation: str,
        gate: Tensor | None,
        value: Tensor | None,
        wants_gate: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Propagate a gradient back through the gate and the activation, in place.

        Returns:
            The gradient of the gate, ``(samples, blocks)``, if `wants_gate`, and that of `value`.
        """
        shape = (self.samples, self.blocks) if wants_gate else (1,)
        grad_gate = raw.new_zeros(shape, dtype=at_least_float32(raw.dtype))
        grad_value = None if value is None else torch.empty_like(value)
        kernels.activation_backward[self._by_row](
            grad_hidden,
            raw,
            self.sample,
            self.ends,
            raw if gate is None else gate,
            raw if value is None else value,
            grad_gate,
            raw if grad_value is None else grad_value,
            self.blocks,
            ACTIVATION=activation,
            SCALES=gate is not None,
            MULTIPLIES=value is not None,
            SUMS=wants_gate,
            **self._row_sizes(raw),
        )
        return grad_gate if wants_gate else None, grad_value
