"""Structures: which weights form a connection, and within which groups connections move.

A layer's weight is viewed as a matrix ``(out, in)``; a kernel belongs to the inputs. A structure
arranges the matrix as ``(groups, members)``, and each group keeps its number of connections.
"""

import re
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

__all__ = ["TRANSPOSED", "Structure"]

_BLOCK = re.compile(r"block:([1-9]\d*)")
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_N_OF_M = re.compile(r"([1-9]\d*):([1-9]\d*)")


@dataclass(frozen=True)
class Structure:
    """The structure of a layer's connections.

    Args:
        kind: `unstructured`: single weights, one group. `block:16`: squares of 16 x 16 weights, one
            group. `2:4`: 2 of every 4 consecutive inputs of an output. `fan_in`: the same number of
            inputs for every output.

    >>> Structure("2:4").density
    0.5
    """

    kind: str = "unstructured"

    def __post_init__(self) -> None:
        match = _N_OF_M.fullmatch(self.kind)
        if match is None and _BLOCK.fullmatch(self.kind) is None:
            valid = self.kind in ("unstructured", "fan_in")
        else:
            valid = match is None or int(match[1]) <= int(match[2])
        if not valid:
            raise ValueError(
                "`structure` must be unstructured, fan_in, block:<size> as in block:16, or "
                f"<n>:<m> as in 2:4, got {self.kind!r}."
            )

    @property
    def block(self) -> int:
        """Side of the blocks."""
        match = _BLOCK.fullmatch(self.kind)
        return 1 if match is None else int(match[1])

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """N and M."""
        match = _N_OF_M.fullmatch(self.kind)
        return None if match is None else (int(match[1]), int(match[2]))

    @property
    def density(self) -> float | None:
        """The density that it prescribes, if any."""
        return None if self.n_of_m is None else self.n_of_m[0] / self.n_of_m[1]

    def refuse_if_unfit(self, name: str, layer: nn.Module) -> None:
        """Raise if a layer does not fit this structure."""
        weight = cast(Tensor, layer.weight)
        rows, columns = weight.shape[0], weight[0].numel()
        transposed = isinstance(layer, TRANSPOSED)
        if transposed and (self.kind == "fan_in" or self.n_of_m is not None):
            raise ValueError(
                f"`structure={self.kind!r}` is by outputs, and the weight of {name}, a transposed "
                "convolution, is laid out by inputs: leave the layer out with `layers`."
            )
        if self.block > 1 and (rows % self.block or columns % self.block):
            raise ValueError(
                f"`structure={self.kind!r}` needs sizes that {self.block} divides, {name} has "
                f"{rows} x {columns}: choose another size, or leave the layer out with `layers`."
            )
        if self.n_of_m is not None and columns % self.n_of_m[1]:
            raise ValueError(
                f"`structure={self.kind!r}` needs a number of inputs that {self.n_of_m[1]} "
                f"divides, {name} has {columns}: leave the layer out with `layers`."
            )

    def note_on(self, sparsity: object) -> str | None:
        """Return a note if this structure prescribes another sparsity."""
        if self.density is None or sparsity == 1 - self.density:
            return None
        return (
            f"leaves out {1 - self.density:.0%} of the weights, as `structure={self.kind!r}` says; "
            f"`sparsity={sparsity}` is not used."
        )

    def has(self, mask: Tensor) -> bool:
        """Return True if a mask has this structure."""
        groups = self.masks(mask)
        counts = groups.sum(-1)
        if not torch.equal(self.ungroup(groups, mask), mask):
            return False
        return bool((counts == (counts[0] if self.n_of_m is None else self.n_of_m[0])).all())

    def groups(self, values: Tensor) -> Tensor:
        """Arrange values of at least 0 as ``(groups, members)``; a block has their sum."""
        matrix = values.flatten(1)
        if self.block > 1:
            return self._blocks(matrix).sum((1, 3)).reshape(1, -1)
        if self.n_of_m is not None:
            return matrix.reshape(-1, self.n_of_m[1])
        return matrix if self.kind == "fan_in" else matrix.reshape(1, -1)

    def masks(self, mask: Tensor) -> Tensor:
        """Arrange a mask as ``(groups, members)``; a block is set if any of its weights is."""
        if self.block > 1:
            return self._blocks(mask.flatten(1)).any(3).any(1).reshape(1, -1)
        return self.groups(mask)

    def ungroup(self, mask: Tensor, like: Tensor) -> Tensor:
        """Return a mask ``(groups, members)`` in the shape of the weight."""
        if self.block > 1:
            rows, columns = like.shape[0] // self.block, like[0].numel() // self.block
            blocks = mask.reshape(rows, 1, columns, 1)
            mask = blocks.expand(rows, self.block, columns, self.block)
        return mask.reshape(like.shape)

    def count(self, weight: Tensor, density: float) -> int:
        """Return the number of members that each group keeps, at least one."""
        members = self.groups(torch.empty_like(weight, device="meta")).shape[1]
        share = density if self.density is None else self.density
        # As torch.nn.utils.prune rounds: what goes, not what stays.
        return max(1, members - round((1 - share) * members))

    def _blocks(self, matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape
        return matrix.reshape(rows // self.block, self.block, columns // self.block, self.block)
