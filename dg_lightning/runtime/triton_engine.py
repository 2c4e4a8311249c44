"""The Triton engine: forward and backward passes over packed rows of open blocks."""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from dg_lightning.gates import DynamicGate, Gate
from dg_lightning.gates.base import at_least_float32
from dg_lightning.runtime import kernels
from dg_lightning.runtime.engines import FeedForward, Operands, check_no_double_backward

ROWS = 128  # rows per tile
_MAX_MEMORY_SHARE = 1 / 8  # maximum share of device memory for packed rows


def descriptor(weight: Tensor, columns: int, depth: int) -> tuple[Any, bool]:
    """Return a descriptor of the weight matrix, and whether each block is a range of rows."""
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
    """Return the number of programs that run concurrently."""
    if device.type != "cuda":
        return 4  # Triton interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def most_rows(samples: int, blocks: int, most_open: int | None = None) -> int:
    """Return the largest possible number of rows, including padding for each block."""
    return (samples * min(most_open or blocks, blocks) // ROWS + blocks) * ROWS


@lru_cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**33


def power_of_2(size: int, least: int) -> int:
    """Round up to a power of 2 that is at least `least`."""
    return max(int(triton.next_power_of_2(size)), least)


def accumulator_dtype(tensor: Tensor) -> Any:
    """Return the dtype in which sums are accumulated."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


_SAMPLES = 64  # samples per program
_CHUNK = 64
_STRIP = 8  # tiles per strip


class Packing:
    """Packs open (sample, block) pairs into rows, and computes products and sums of rows.

    If rows for all pairs that can be open fit in memory, the host does not need to know how many
    are. Then it never waits for the device, and the computation can be captured in a CUDA graph.

    Args:
        gate: The gates, ``(samples, blocks)``, nonzero if open.
        counts: Number of open pairs by sample tile and block, if already known.
        most_open: Largest number of blocks that a sample can open; None if it can open all.
    """

    def __init__(
        self, gate: Tensor, counts: Tensor | None = None, most_open: int | None = None
    ) -> None:
        gate = gate.detach().contiguous()
        self.samples, self.blocks = gate.shape
        self.device = gate.device
        tiles = triton.cdiv(self.samples, _SAMPLES)
        width = power_of_2(self.blocks, 16)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": gate.device}
        # Each block is padded by less than a tile.
        self.rows = most_rows(self.samples, self.blocks, most_open)
        self.position = torch.empty(self.samples, self.blocks, **int32)
        self.sample, self.ends = torch.empty(self.rows, **int32), torch.empty(self.blocks, **int32)
        shape = self.samples, self.blocks
        sizes = {"TILE": _SAMPLES, "WIDTH": width}
        if counts is None:
            counts = torch.empty(tiles, self.blocks, **int32)
            kernels.count_open[(tiles,)](gate, counts, *shape, **sizes)
        kernels.assign_rows[(1,)](
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
        kernels.place_pairs[(tiles,)](gate, counts, *pairs, *shape, **sizes)

    def fit_to_memory(self, row_bytes: int) -> None:
        """Read the exact number of rows if the worst case does not fit in memory."""
        if self.rows * row_bytes > _MAX_MEMORY_SHARE * _memory(self.device):
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
        """Multiply each row by the weights of its block.

        Args:
            x: Rows, or samples if `gathers`.
            weight: Weights of each block, ``(blocks, outputs, inputs)``, with any strides.
            bias: Bias of each block, ``(blocks, outputs)``.
            gathers: Whether `x` holds samples, from which each row reads its own.
            activation: Activation applied to the product.
            gate: Factors of the activated product, ``(samples, blocks)``.
            value: Further factors of the activated product, as packed rows.
        """
        _, width, inner = weight.shape
        columns, depth, warps, stages, has_descriptors = tile_sizes(x.device, x.dtype)
        columns = min(columns, power_of_2(width, 16))
        depth = min(depth, power_of_2(inner, 16))
        stages = min(stages, max(inner // depth - 1, 2))  # a short product needs few stages
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
        """Return each row's sample, with 0 in padding rows."""
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

        Padding rows must be 0 in `left` or `right`.
        """
        grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)  # since torch 2.10
        aligned = left.shape[1] % 8 == right.shape[1] % 8 == 0  # to 16 bytes
        if grouped_mm is not None and left.is_cuda and left.dtype == torch.bfloat16 and aligned:
            out: Tensor = grouped_mm(left.t(), right, offs=self.ends)
            return out
        starts = [0, *self.ends.tolist()]
        return torch.stack([left[a:b].t() @ right[a:b] for a, b in pairwise(starts)])

    def sum_blocks(self, packed: Tensor) -> Tensor:
        """Return the sum of each block's rows, ``(blocks, width)``. Padding rows must be 0."""
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
        """Compute units from products.

        With GELU, a product kernel that stored both products and units took six times as long.
        """
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
        """Grid of the programs that share the rows."""
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
        """Propagate a gradient through gate and activation, in place.

        Returns:
            The gradients of the gate, ``(samples, blocks)``, if `wants_gate`, and of `value`.
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


def run_triton(x: Tensor, gate: Tensor, net: FeedForward, counts: Tensor | None = None) -> Tensor:
    """Compute the open blocks with Triton kernels.

    Args:
        x: The samples.
        gate: The gates, nonzero if open.
        net: The feed-forward.
        counts: Number of open pairs, from `decide_by_kernel`.
    """
    with torch.cuda.device_of(x):  # kernels are launched on the current device
        tensors = (x, gate, *net.tensors)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if len(x) <= FEW and not needs_grad:
            return _run_few(x.contiguous(), gate.contiguous(), net)
        return _run_packed(x.contiguous(), gate, net, needs_grad, counts)


FEW = 16  # largest batch for the kernels that generate text
_UNITS, _OUTPUTS = 16, 32  # units and outputs per job
_DEPTH = 256  # entries of a row of weights that are read at once
_PROGRAMS = 8  # per multiprocessor, so that reads overlap


def _run_few(x: Tensor, gate: Tensor, net: FeedForward) -> Tensor:
    """Read the weights of open blocks once for all of a few samples, without gradients."""
    (fc1, fc1_bias), (fc2, fc2_bias), size = net.fc1, net.fc2, net.block_size
    samples, blocks, width = len(x), gate.shape[1], len(fc2)
    value, value_bias = net.fc1_gate or (None, None)
    units = x.new_empty(samples, len(fc1))
    accumulator: Any = {"ACC_DTYPE": accumulator_dtype(x), "SAMPLES": FEW}
    programs = _PROGRAMS * multiprocessors(x.device)
    jobs = triton.cdiv(size, _UNITS) * blocks
    kernels.few_units[(min(jobs, programs),)](
        x,
        gate,
        fc1.contiguous(),
        x if fc1_bias is None else fc1_bias,
        x if value is None else value.contiguous(),
        x if value_bias is None else value_bias,
        units,
        samples,
        blocks,
        x.stride(0),
        HAS_BIAS=fc1_bias is not None,
        HAS_VALUE=value is not None,
        HAS_VALUE_BIAS=value_bias is not None,
        SCALES=net.scaled,
        ACTIVATION=activation_name(net.activation),
        BLOCK=size,
        BLOCKS=power_of_2(blocks, 2),
        INNER=x.shape[1],
        COLUMNS=_UNITS,
        DEPTH=min(power_of_2(x.shape[1], 16), _DEPTH),
        num_stages=4,
        **accumulator,
    )
    depth = min(power_of_2(size, 16), 128)
    across = triton.cdiv(width, _OUTPUTS)
    splits = min(triton.cdiv(programs, 2 * across), blocks * triton.cdiv(size, depth))
    partial = x.new_empty(splits, samples, width, dtype=at_least_float32(x.dtype))
    kernels.few_outputs[(across, splits)](
        units,
        gate,
        fc2,
        partial,
        samples,
        blocks,
        width,
        *fc2.stride(),
        BLOCK=size,
        BLOCKS=power_of_2(blocks, 2),
        COLUMNS=_OUTPUTS,
        DEPTH=depth,
        num_stages=4,
        **accumulator,
    )
    out = x.new_empty(samples, width)
    kernels.few_sums[(triton.cdiv(out.numel(), 256),)](
        partial,
        x if fc2_bias is None else fc2_bias,
        out,
        splits,
        out.numel(),
        width,
        HAS_BIAS=fc2_bias is not None,
        COLUMNS=256,
        ACC_DTYPE=accumulator_dtype(x),
    )
    return out


def _run_packed(
    x: Tensor, gate: Tensor, net: FeedForward, needs_grad: bool, counts: Tensor | None
) -> Tensor:
    name = activation_name(net.activation)
    packing = Packing(gate, counts, net.most_open)
    # Each row holds gated units, outputs of `fc2`, and if needed pre-activations and `value`.
    entries = (1 + needs_grad + (net.fc1_gate is not None)) * net.block_size + len(net.fc2[0])
    packing.fit_to_memory(entries * x.element_size())
    scale = gate.detach().contiguous() if net.scaled else None
    fc1_gate = net.fc1_gate or (None, None)
    tensors = Operands(x, gate, *net.fc1, *net.fc2, *fc1_gate)
    if needs_grad:
        options = net.block_size, name, packing, scale
        out: Tensor = _GatedFeedForward.apply(*options, *tensors)  # type: ignore[no-untyped-call]
        return out
    return _forward(tensors, net.block_size, name, packing, scale)[0]


def decide_by_kernel(gate: Gate, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Run the gate in a single kernel if it is simple enough, otherwise return None.

    The gate records p and g.

    Returns:
        The factors of units, and the number of open pairs by sample tile and block. A few samples
        are not counted.
    """
    simple = (
        isinstance(gate, DynamicGate)
        and len(gate.network) == 1
        and gate.k is None
        and not gate._floor
        and gate.policy != "hard_concrete"
        and (gate.policy == "threshold" or not gate.training)
    )
    if not simple or torch.is_grad_enabled() or not x.is_cuda or x.dtype.itemsize != 2:
        return None
    assert isinstance(gate, DynamicGate)
    with torch.cuda.device_of(x):
        counts = decide_linear(gate, x.contiguous())
    assert gate.gate is not None
    assert gate.probability is not None
    return gate.scaled(gate.gate, gate.probability), counts


def decide_linear(gate: DynamicGate, x: Tensor) -> Tensor | None:
    """Run a linear threshold gate in a single kernel, without gradients."""
    linear: Any = gate.network[0]
    bias = linear.weight if linear.bias is None else linear.bias
    p, g = (torch.empty(len(x), gate.blocks, device=x.device) for _ in range(2))
    tensors = x, linear.weight, bias, gate.temperature, gate.threshold, p, g
    sizes = len(x), gate.blocks, x.stride(0)
    shape: Any = {"HAS_BIAS": linear.bias is not None, "INNER": x.shape[1]}
    gate.probability, gate.gate = p, g
    if len(x) <= FEW:
        depth = min(power_of_2(x.shape[1], 16), 1024)
        kernels.few_gates[(gate.blocks,)](*tensors, *sizes, DEPTH=depth, **shape)
        return None
    tiles = triton.cdiv(len(x), _SAMPLES)
    counts = torch.empty(tiles, gate.blocks, dtype=torch.int32, device=x.device)
    kernels.decide[(tiles,)](
        *tensors,
        counts,
        *sizes,
        DEPTH=128,
        TILE=_SAMPLES,
        WIDTH=power_of_2(gate.blocks, 16),
        num_warps=4,
        num_stages=4,
        **shape,
    )
    return counts


def activation_name(activation: Any) -> str:
    """Return the name of an activation in the kernels."""
    names = {nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh"}
    name = names.get(type(activation))
    if name is None or getattr(activation, "approximate", "none") != "none":
        raise ValueError(
            f"The 'triton' engine does not support the activation {activation}, only "
            f"{', '.join(names.values())}: use engine='blocks'."
        )
    return name


def _forward(
    tensors: Operands,
    block: int,
    activation: str,
    packing: Packing,
    scale: Tensor | None,
    keeps_raw: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return outputs, pre-activations (None if not kept), gated units, and `fc1_gate` outputs."""

    def split_blocks(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        by_block = weight.unflatten(0, (-1, block))
        return by_block, None if bias is None else bias.unflatten(0, (-1, block))

    x, _, fc1, fc1_bias, fc2, fc2_bias, fc1_gate, fc1_gate_bias = tensors
    value = None
    if fc1_gate is not None:
        value = packing.product(x, *split_blocks(fc1_gate, fc1_gate_bias), gathers=True)
    how: Any = {"activation": activation, "gate": scale, "value": value}
    raw = None
    if keeps_raw:
        raw = packing.product(x, *split_blocks(fc1, fc1_bias), gathers=True)
        units = packing.activate(raw, **how)
    else:
        units = packing.product(x, *split_blocks(fc1, fc1_bias), gathers=True, **how)
    packed = packing.product(units, _by_block(fc2, block))
    return packing.sum_samples(packed, fc2_bias), raw, units, value


def _by_block(fc2: Tensor, block: int) -> Tensor:
    """Return the weight of `fc2` as ``(blocks, outputs, units)``."""
    by_block: Tensor = fc2.unflatten(1, (-1, block)).transpose(0, 1)
    return by_block


class _GatedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        block: int,
        activation: str,
        packing: Packing,
        scale: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        given = Operands(*tensors)
        options = block, activation, packing, scale
        out, raw, units, value = _forward(given, *options, keeps_raw=True)
        ctx.save_for_backward(
            given.x, given.fc1, given.fc2, given.fc1_gate, raw, units, value, scale
        )
        ctx.block, ctx.activation, ctx.packing = block, activation, packing
        ctx.gate_type = given.gate.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        check_no_double_backward()
        x, fc1, fc2, fc1_gate, raw, units, value, scale = ctx.saved_tensors
        packing: Packing = ctx.packing
        wanted = Operands(*ctx.needs_input_grad[4:])
        grads: dict[str, Tensor | None] = {}
        # Padding rows are 0 here, and therefore in all gradients below.
        grad_rows = packing.gather(grad_output.contiguous())
        grad_raw = packing.product(grad_rows, _by_block(fc2, ctx.block).transpose(1, 2))
        if wanted.fc2:
            grads["fc2"] = _grad_w2(packing, grad_rows, units, fc2)
        if wanted.fc2_bias:
            grads["fc2_bias"] = grad_output.sum(0)
        # The gradient of an open gate is the sum of `grad_raw` times its unscaled units.
        grad_gate, grad_value = packing.activation_backward(
            grad_raw, raw, ctx.activation, scale, value, wanted.gate
        )
        grads["gate"] = None if grad_gate is None else grad_gate.to(ctx.gate_type)
        up_projections = [("fc1", grad_raw, fc1)]
        if grad_value is not None:
            up_projections.append(("fc1_gate", grad_value, fc1_gate))
        rows = packing.gather(x) if wanted.fc1 or wanted.fc1_gate else x
        grad_x: Tensor | None = None
        for name, gradient, weight in up_projections:
            if getattr(wanted, name):
                grads[name] = packing.outer(gradient, rows).flatten(0, 1)
            if getattr(wanted, f"{name}_bias"):
                grads[f"{name}_bias"] = packing.sum_blocks(gradient).flatten()
            if wanted.x:
                back = weight.unflatten(0, (-1, ctx.block)).transpose(1, 2)
                part = packing.sum_samples(packing.product(gradient, back))
                grad_x = part if grad_x is None else grad_x + part
        return None, None, None, None, *Operands(x=grad_x, **grads)


def _grad_w2(packing: Packing, grad_rows: Tensor, hidden: Tensor, fc2: Tensor) -> Tensor:
    """Return the gradient of the weight of `fc2`, in the same memory layout."""
    if fc2.stride(0) == 1:  # stored by unit
        return packing.outer(hidden, grad_rows).flatten(0, 1).t()
    return packing.outer(grad_rows, hidden).transpose(0, 1).flatten(1)
