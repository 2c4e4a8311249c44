"""How Triton kernels are launched: sizes of tiles, descriptors of weights, what a device has."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "ROWS",
    "accumulator_dtype",
    "descriptor",
    "most_rows",
    "multiprocessors",
    "power_of_2",
    "tile_sizes",
    "worst_case_fits",
]

ROWS = 128  # per tile
_MAX_MEMORY_SHARE = 1 / 8  # of the device memory


def descriptor(weight: Tensor, columns: int, depth: int) -> tuple[Any, bool]:
    """Return a descriptor of the full matrix, and whether blocks are rows of it."""
    blocks, width, inner = weight.shape
    block_stride, output_stride, input_stride = weight.stride()
    if input_stride != 1 or output_stride * weight.element_size() % 16 or weight.data_ptr() % 16:
        return None, False
    if block_stride == width * output_stride:
        matrix = weight.as_strided((blocks * width, inner), (output_stride, 1))
        return TensorDescriptor.from_tensor(matrix, [columns, depth]), True
    if block_stride != inner:
        return None, False
    matrix = weight.as_strided((width, blocks * inner), (output_stride, 1))
    return TensorDescriptor.from_tensor(matrix, [columns, depth]), False


@lru_cache
def tile_sizes(device: torch.device, dtype: torch.dtype) -> tuple[int, int, int, int, bool]:
    """Return columns, depth, warps, stages and descriptor support for the device."""
    if dtype.itemsize > 2 or device.type != "cuda":
        return 64, 32, 4, 2, False
    properties: Any = torch.cuda.get_device_properties(device)
    memory = properties.shared_memory_per_block_optin
    for columns, warps in ((256, 8), (128, 4)):
        stages = min(memory // ((ROWS + columns) * 64 * dtype.itemsize), 4)
        if stages >= 3:
            return columns, 64, warps, stages, properties.major >= 9
    return 64, 64, 4, 2, False


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return how many programs run at a time."""
    if device.type != "cuda":
        return 4  # Triton interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def worst_case_fits(samples: int, blocks: int, row_bytes: int, device: torch.device) -> bool:
    """Return True if the rows fit in memory even if all pairs are open."""
    return most_rows(samples, blocks) * row_bytes <= _MAX_MEMORY_SHARE * _memory(device)


def most_rows(samples: int, blocks: int) -> int:
    """Return how many rows there are if all pairs are open; each block is padded."""
    return (samples * blocks // ROWS + blocks) * ROWS


@lru_cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**33


def power_of_2(size: int, least: int) -> int:
    """Round up to a power of 2 that is at least `least`."""
    return max(int(triton.next_power_of_2(size)), least)


def accumulator_dtype(tensor: Tensor) -> Any:
    """Return the dtype in which sums are accumulated."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32
