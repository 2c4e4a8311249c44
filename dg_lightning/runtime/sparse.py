"""Linear maps with few connections, in the form that is fastest here: sparse, or honestly dense."""

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
_MOST = 0.5  # density above which no sparse form is tried


class SparseLinear(nn.Module):
    """A linear map that skips the connections that do not exist; without gradients.

    Args:
        linear: The map; connections that do not exist have a weight of 0.
        form: `csr`: compressed rows. `bag`: each output adds up its inputs, one row of the
            transposed batch each; suits a constant fan-in. `block`: blocks that are 0 as a whole
            are left out (block-sparse products of torch: Triton on CUDA, MKL on a CPU that has it;
            else our own). `dense`.
        block: Side of the blocks.
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
            # One bag an output; a bag may be empty.
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
    """Multiply each block that exists with its inputs, all at once, and sum by outputs."""
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
    """Measure the forms of a map.

    Returns:
        How many times faster than dense each is, over the batch sizes alike; those that this
        device has no product for are missing.
    """
    weight = linear.weight
    forms: dict[str, SparseLinear] = {"dense": SparseLinear(linear, "dense")}
    density = float((weight != 0).float().mean())
    if density <= _MOST:
        x = torch.randn(2, linear.in_features, device=weight.device, dtype=weight.dtype)
        sparse: tuple[Form, ...] = ("csr", "bag", "block")
        for form in sparse:
            if form == "block" and not _has_blocks(weight, block):
                continue
            try:
                candidate = SparseLinear(linear, form, block)
                candidate(x)
            except (RuntimeError, NotImplementedError):
                continue  # no such product for this device and type
            forms[form] = candidate
    gains: dict[str, float] = dict.fromkeys(forms, 0.0)
    for size in batch_sizes:
        x = torch.randn(size, linear.in_features, device=weight.device, dtype=weight.dtype)
        with torch.inference_mode():
            runs = {name: partial(form, x) for name, form in forms.items()}
            taken = median_seconds(runs, weight.device, rounds=7)
        for name in gains:
            gains[name] += math.log(taken["dense"] / taken[name]) / len(batch_sizes)
    return {name: math.exp(gain) for name, gain in gains.items()}


def with_fast_connections(
    net: nn.Sequential, batch_sizes: Sequence[int], block: int = 16
) -> tuple[nn.Sequential, list[str]]:
    """Return a copy of a net with its linear maps in their fastest form, and what was found."""
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


def _has_blocks(weight: Tensor, block: int) -> bool:
    """Tell whether whole blocks of a weight are 0, enough of them to be worth a try."""
    if weight.shape[0] % block or weight.shape[1] % block:
        return False
    blocks = (weight != 0).unflatten(0, (-1, block)).unflatten(2, (-1, block))
    return float(blocks.any(3).any(1).float().mean()) <= _MOST
