"""Linear layers with few connections, in the fastest storage format: sparse or dense."""

import copy
import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.backends import mkl
from torch.nn import functional as F
from typing_extensions import override

from dg_lightning.runtime.timing import median_seconds

__all__ = ["Form", "SparseLinear", "fastest_form", "with_fast_connections"]

Form: TypeAlias = Literal["dense", "csr", "bag", "block"]
_MAX_DENSITY = 0.5  # no sparse form is tried above this density


class SparseLinear(nn.Module):
    """A linear layer that skips missing connections, without gradients.

    Args:
        linear: The layer; missing connections have a weight of 0.
        form: `csr`: compressed sparse rows. `bag`: an embedding bag over the transposed batch for
            each output; suits a constant fan-in. `block`: skips blocks of zeros (torch's
            block-sparse product: Triton on CUDA, MKL on a CPU if available; otherwise our own).
            `dense`.
        block: Side length of the blocks.
    """

    def __init__(self, linear: nn.Linear, form: Form, block: int = 16) -> None:
        super().__init__()
        if form not in ("dense", "csr", "bag", "block"):
            raise ValueError(f"`form` must be dense, csr, bag or block, got {form!r}.")
        self.form, self.block = form, block
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.bias: Tensor | None
        self.weight: Tensor
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
        if form == "block" and (weight.shape[0] % block or weight.shape[1] % block):
            raise ValueError(f"Blocks of {block} do not divide a weight of {tuple(weight.shape)}.")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse (CSR|BSR) tensor support is in beta")
            if form == "block":
                weight = weight.to_sparse_bsr((block, block))
            elif form != "dense":
                weight = weight.to_sparse_csr()
        self.register_buffer("weight", weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.form == "dense":
            return F.linear(x, weight, self.bias)
        if x.ndim != 2:
            flat: Tensor = self(x.reshape(-1, x.shape[-1]))
            return flat.reshape(*x.shape[:-1], self.out_features)
        if self.form == "bag":
            # One bag per output, possibly empty.
            rows, columns, values = weight.crow_indices(), weight.col_indices(), weight.values()
            if not len(values):
                out = x.new_zeros(len(x), self.out_features)
            else:
                out = F.embedding_bag(
                    columns, x.t().contiguous(), rows[:-1], mode="sum", per_sample_weights=values
                ).t()
        elif self.form == "block" and x.device.type == "cpu" and not mkl.is_available():
            out = _block_product(x, weight)
        else:
            out = (weight @ x.t()).t()
        return out if self.bias is None else out + self.bias


def _block_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply all stored blocks with their inputs in one batch, and sum by output."""
    first, columns, blocks = weight.crow_indices(), weight.col_indices(), weight.values()
    side = blocks.shape[-1]
    rows = torch.repeat_interleave(torch.arange(len(first) - 1), first.diff())
    inputs = x.unflatten(1, (-1, side)).transpose(0, 1)
    parts = torch.bmm(inputs[columns], blocks.transpose(1, 2))
    sums = x.new_zeros(len(first) - 1, len(x), side).index_add_(0, rows, parts)
    return sums.transpose(0, 1).flatten(1)


def fastest_form(
    linear: nn.Linear, batch_sizes: Sequence[int], block: int = 16
) -> dict[str, float]:
    """Measure the storage forms of a linear layer.

    Returns:
        Speed-up of each form over dense, as a geometric mean over batch sizes; without the forms
        that the device does not support.
    """
    weight = linear.weight
    forms: dict[str, SparseLinear] = {"dense": SparseLinear(linear, "dense")}
    density = float((weight != 0).float().mean())
    if density <= _MAX_DENSITY:
        x = torch.randn(2, linear.in_features, device=weight.device, dtype=weight.dtype)
        sparse: tuple[Form, ...] = ("csr", "bag", "block")
        for form in sparse:
            if form == "block" and not _has_empty_blocks(weight, block):
                continue
            try:
                candidate = SparseLinear(linear, form, block)
                candidate(x)
            except (RuntimeError, NotImplementedError):
                continue  # not supported for this device and dtype
            forms[form] = candidate
    gains: dict[str, float] = dict.fromkeys(forms, 0.0)
    for size in batch_sizes:
        x = torch.randn(size, linear.in_features, device=weight.device, dtype=weight.dtype)
        with torch.inference_mode():
            runs = {name: partial(form, x) for name, form in forms.items()}
            seconds = median_seconds(runs, weight.device, rounds=7)
        for name in gains:
            gains[name] += math.log(seconds["dense"] / seconds[name]) / len(batch_sizes)
    return {name: math.exp(gain) for name, gain in gains.items()}


def with_fast_connections(
    net: nn.Sequential, batch_sizes: Sequence[int], block: int = 16
) -> tuple[nn.Sequential, list[str]]:
    """Return a copy of a net with its linear layers in their fastest form, and notes."""
    fast, notes = copy.deepcopy(net), []
    for index, module in enumerate(net):
        if not isinstance(module, nn.Linear):
            continue
        gains = fastest_form(module, batch_sizes, block)
        best = max(gains, key=lambda form: gains[form])
        density = float((module.weight != 0).float().mean())
        if best != "dense":
            fast[index] = SparseLinear(module, cast(Form, best), block)
            notes.append(
                f"layer {index}, {density:.0%} of its connections: {best}, {gains[best]:.2f} times "
                "as fast as dense"
            )
        elif len(gains) > 1:
            second = max((form for form in gains if form != "dense"), key=lambda form: gains[form])
            notes.append(
                f"layer {index}, {density:.0%} of its connections: slower: using dense "
                f"({second}: {gains[second]:.2f} times as fast)"
            )
    return fast, notes


def _has_empty_blocks(weight: Tensor, block: int) -> bool:
    """Return True if enough blocks of a weight are 0 for the form `block`."""
    if weight.shape[0] % block or weight.shape[1] % block:
        return False
    blocks = (weight != 0).unflatten(0, (-1, block)).unflatten(2, (-1, block))
    return float(blocks.any(3).any(1).float().mean()) <= _MAX_DENSITY
