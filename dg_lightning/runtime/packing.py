"""Open (sample, block) pairs as packed rows, and the kernels that work on them."""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dg_lightning.gates import DynamicGate
from dg_lightning.runtime import kernels

__all__ = ["Packing", "has_room"]

_ROWS = 128  # of a tile
_SAMPLES = 64  # that one program decides about
_CHUNK = 64
_STRIP = 8  # tiles
_ROOM_WITHOUT_WAITING = 1 / 8  # of the device's memory


class Packing:
    """Which row each open pair of samples and blocks has, and products and sums of such rows.

    Where there is room for every pair that could be open, the host need not know how many are: it
    does not wait for the device, and a CUDA graph can hold the whole.

    Args:
        gate: The gates, ``(samples, blocks)``, not 0 where open.
        counts: How many are open, by tile of samples and block, where that is known already.
    """

    def __init__(self, gate: Tensor, counts: Tensor | None = None) -> None:
        gate = gate.detach().contiguous()
        self.samples, self.blocks = gate.shape
        self.device = gate.device
        tiles = triton.cdiv(self.samples, _SAMPLES)
        width = _power_of_2(self.blocks, 16)
        make: dict[str, Any] = {"dtype": torch.int32, "device": gate.device}
        # Each block is padded by less than a tile.
        self.rows = _most_rows(self.samples, self.blocks)
        self.position = torch.empty(self.samples, self.blocks, **make)
        self.sample, self.ends = torch.empty(self.rows, **make), torch.empty(self.blocks, **make)
        shape = self.samples, self.blocks
        sizes = {"TILE": _SAMPLES, "WIDTH": width}
        if counts is None:
            counts = torch.empty(tiles, self.blocks, **make)
            kernels.count_open[(tiles,)](gate, counts, *shape, **sizes)
        kernels.lay_out[(1,)](
            counts,
            self.ends,
            self.sample,
            tiles,
            self.blocks,
            TILES=_power_of_2(tiles, _CHUNK),  # rounded, so that few sizes are compiled
            ROWS=_ROWS,
            CHUNK=_CHUNK,
            WIDTH=width,
        )
        kernels.place_pairs[(tiles,)](gate, counts, self.position, self.sample, *shape, **sizes)

    @classmethod
    def decided(cls, gate: DynamicGate, x: Tensor) -> "Packing":
        """Let a linear gate with a threshold decide, all in one kernel; without gradients."""
        linear: Any = gate.network[0]
        tiles = triton.cdiv(len(x), _SAMPLES)
        p, g = (torch.empty(len(x), gate.blocks, device=x.device) for _ in range(2))
        counts = torch.empty(tiles, gate.blocks, dtype=torch.int32, device=x.device)
        kernels.decide[(tiles,)](
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
            BIASED=linear.bias is not None,
            INNER=x.shape[1],
            DEPTH=128,
            TILE=_SAMPLES,
            WIDTH=_power_of_2(gate.blocks, 16),
            num_warps=4,
            num_stages=4,
        )
        gate.probability, gate.gate = p, g
        return cls(g, counts)

    def make_room(self, row_bytes: int) -> None:
        """Wait for the device to say how many rows there are, if there is no room for all."""
        if not has_room(self.samples, self.blocks, row_bytes, self.device):
            self.rows = max(int(self.ends[-1]), _ROWS)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gathers: bool = False,
        activation: str = "",
        raw: Tensor | None = None,
    ) -> Tensor:
        """Multiply each row with the weights of its block.

        Args:
            x: Rows, or samples if `gathers`.
            weight: The weights of each block, ``(blocks, outputs, inputs)``, any strides.
            bias: A bias for each block's outputs, ``(blocks, outputs)``.
            gathers: Whether a row takes its sample of `x`.
            activation: What is applied to the product.
            raw: Where the product goes before that, if wanted.
        """
        _, width, inner = weight.shape
        columns, depth, warps, stages, describes = _tile_sizes(x.device, x.dtype)
        columns = min(columns, _power_of_2(width, 16))
        depth = min(depth, _power_of_2(inner, 16))
        stages = min(stages, max(inner // depth - 1, 2))  # no deeper than the product
        even = inner % depth == 0 and width % columns == 0
        handed, by_rows = (
            _described(weight, columns, depth) if describes and even else (None, False)
        )
        out = x.new_empty(self.rows, width)
        jobs = self.rows // _ROWS * triton.cdiv(width, columns)
        kernels.product[(min(jobs, _processors(x.device)),)](
            x,
            self.sample,
            self.ends,
            weight if handed is None else handed,
            x if bias is None else bias,
            out if raw is None else raw,
            out,
            self.blocks,
            width,
            x.stride(0),
            *weight.stride(),
            GATHERS=gathers,
            BIASED=bias is not None,
            KEEPS_RAW=raw is not None,
            ACTIVATION=activation,
            DESCRIBED=handed is not None,
            BY_ROWS=by_rows,
            EVEN=even,
            INNER=inner,
            BLOCKS=_power_of_2(self.blocks, 2),
            ROWS=_ROWS,
            COLUMNS=columns,
            DEPTH=depth,
            STRIP=_STRIP,
            WIDE=_wide(x),
            num_warps=warps,
            num_stages=stages,
        )
        return out

    def gathered(self, x: Tensor) -> Tensor:
        """Return the sample of each row; 0 where it is padding."""
        width = x.shape[1]
        columns = min(_power_of_2(width, 16), 2048)
        out = x.new_empty(self.rows, width)
        grid = (min(self.rows, 16 * _processors(x.device)), triton.cdiv(width, columns))
        kernels.gather[grid](
            x, self.sample, self.ends, out, self.blocks, width, x.stride(0), COLUMNS=columns
        )
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``leftᵀ right`` over the rows of each block, ``(blocks, left, right)``.

        Padding must be 0 on one side.
        """
        grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)  # from torch 2.10 on
        aligned = left.shape[1] % 8 == right.shape[1] % 8 == 0  # it asks for rows of 16 bytes
        if grouped_mm is not None and left.is_cuda and left.dtype == torch.bfloat16 and aligned:
            out: Tensor = grouped_mm(left.t(), right, offs=self.ends)
            return out
        starts = [0, *self.ends.tolist()]
        return torch.stack([left[a:b].t() @ right[a:b] for a, b in pairwise(starts)])

    def sum_of_blocks(self, packed: Tensor) -> Tensor:
        """Return the sum of each block's rows, ``(blocks, width)``; padding must be 0."""
        width = packed.shape[1]
        parts = 8
        wide = _at_least_float32(packed.dtype)
        out = packed.new_empty(parts, self.blocks, width, dtype=wide)
        grid = (self.blocks, triton.cdiv(width, 64), parts)
        sizes = {"ROWS": _ROWS, "COLUMNS": 64, "WIDE": _wide(packed)}
        kernels.sum_of_blocks[grid](packed, self.ends, out, width, **sizes)
        return out.sum(0).to(packed.dtype)

    def sum_of_samples(self, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the sum of each sample's rows, plus the bias: ``(samples, width)``."""
        width = packed.shape[1]
        columns = min(_power_of_2(width, 16), 2048)
        out = packed.new_empty(self.samples, width)
        kernels.sum_of_samples[(self.samples, triton.cdiv(width, columns))](
            packed,
            self.position,
            packed if bias is None else bias,
            out,
            width,
            BIASED=bias is not None,
            BLOCKS=self.blocks,
            COLUMNS=columns,
            WIDE=_wide(packed),
        )
        return out

    def through_activation(
        self, of_hidden: Tensor, raw: Tensor, activation: str, of_pairs: bool
    ) -> Tensor | None:
        """Take a gradient back through the activation, in place.

        Returns:
            What each pair's hidden units and their gradients have in common, if `of_pairs`.
        """
        width = raw.shape[1]
        of_row = raw.new_empty(self.rows, dtype=_at_least_float32(raw.dtype))
        kernels.activation_backward[(min(self.rows, 16 * _processors(raw.device)),)](
            of_hidden,
            raw,
            self.ends,
            of_row,
            self.blocks,
            ACTIVATION=activation,
            SUMS=of_pairs,
            WIDTH=width,
            COLUMNS=min(_power_of_2(width, 16), 1024),
            WIDE=_wide(raw),
        )
        if not of_pairs:
            return None
        return of_row[self.position.clamp(min=0)].masked_fill_(self.position < 0, 0)


def has_room(samples: int, blocks: int, row_bytes: int, device: torch.device) -> bool:
    """Tell whether all pairs could be open and their rows still find room."""
    return _most_rows(samples, blocks) * row_bytes <= _ROOM_WITHOUT_WAITING * _memory(device)


def _most_rows(samples: int, blocks: int) -> int:
    return (samples * blocks // _ROWS + blocks) * _ROWS


def _described(weight: Tensor, columns: int, depth: int) -> tuple[Any, bool]:
    """Return a descriptor of the matrix that the blocks are rows (True) or columns of."""
    blocks, width, inner = weight.shape
    of_block, of_output, of_input = weight.stride()
    if of_input != 1 or of_output * weight.element_size() % 16 or weight.data_ptr() % 16:
        return None, False
    if of_block == width * of_output:
        matrix = weight.as_strided((blocks * width, inner), (of_output, 1))
        return TensorDescriptor.from_tensor(matrix, [columns, depth]), True
    if of_block != inner:
        return None, False
    matrix = weight.as_strided((width, blocks * inner), (of_output, 1))
    return TensorDescriptor.from_tensor(matrix, [columns, depth]), False


@lru_cache
def _tile_sizes(device: torch.device, dtype: torch.dtype) -> tuple[int, int, int, int, bool]:
    """Choose sizes that the device has memory for: columns, depth, warps, stages, descriptors."""
    if dtype.itemsize > 2 or device.type != "cuda":
        return 64, 32, 4, 2, False
    properties: Any = torch.cuda.get_device_properties(device)
    memory = properties.shared_memory_per_block_optin
    for columns, warps in ((256, 8), (128, 4)):
        stages = min(memory // ((_ROWS + columns) * 64 * dtype.itemsize), 4)
        if stages >= 3:
            return columns, 64, warps, stages, properties.major >= 9
    return 64, 64, 4, 2, False


@lru_cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**33


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # interpreted
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_2(size: int, least: int) -> int:
    return max(int(triton.next_power_of_2(size)), least)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(tensor: Tensor) -> Any:
    """Return the type that sums are held in."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32
