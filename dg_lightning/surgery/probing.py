"""Units between linear maps, and the question to autograd which of them go their own ways."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from dg_lightning.compute.maps import as_matrix, unit_axis
from dg_lightning.surgery.recording import Call

__all__ = ["Kind", "Probe", "Units"]

Kind: TypeAlias = Literal["feed_forward", "heads", "channels"]

_MOST = 0.9  # of a map's outputs, which tell the order of the others


@dataclass(frozen=True, eq=False)
class Units:
    """Units between linear maps that can be closed, one by one or in blocks.

    Args:
        kind: What they are.
        producers: For each map that makes them, the block of each of its outputs.
        consumer: The map that reads them.
        size: The number of inputs of the consumer.
        block_size: The number of neighbouring inputs that close together.
        by_position: Whether each position of the consumer's input depends on the same position of
            the producers' alone, as a gate that decides by position needs.
        between: Modules with weights on the way from producers to consumer, such as norms.
        is_known: Whether they are known to go their own ways, so that closed ones need not be made.
    """

    kind: Kind
    producers: dict[str, Tensor]
    consumer: str
    size: int
    block_size: int
    by_position: bool
    between: tuple[str, ...] = ()
    is_known: bool = True

    @property
    def blocks(self) -> int:
        """The number of gates they need."""
        return self.size // self.block_size

    def __str__(self) -> str:
        what = {"feed_forward": "units", "heads": "heads", "channels": "channels"}[self.kind]
        inputs = "" if self.block_size == 1 else f" of {self.block_size}"
        return f"{self.blocks} {what}{inputs}, made by {', '.join(self.producers)}"


class Probe:
    """Asks autograd which outputs of the producers each input of a map depends on.

    Neighbouring inputs are taken in blocks, of one input at first. Every block has a number; for
    each of its binary digits, the outputs behind blocks that have it must not be behind blocks that
    lack it. Then the digits of an output are the number of its block. Otherwise blocks are larger.
    """

    def __init__(self, call: Call, sources: list[Call]) -> None:
        self.consumer = call
        self.sources = sources
        self.inputs = as_matrix(call.module, call.module.weight).shape[1]
        self._sizes = [n for n in range(1, self.inputs) if self.inputs % n == 0]
        self._seen: list[list[tuple[Tensor, Tensor]]] = []  # with and without a digit, by source
        self._by_position = True
        self._changes = False

    def look(self, call: Call, sources: list[Call]) -> None:
        """Look at a recording: smaller blocks that do not fit are given up."""
        if [s.name for s in sources] != [s.name for s in self.sources]:
            self._changes = True  # by another path than before
            return
        while self._sizes and not self._fits(call, sources):
            self._sizes.pop(0)
            self._seen = []
        self._by_position &= _is_by_position(call, sources)

    def _fits(self, call: Call, sources: list[Call]) -> bool:
        block = torch.arange(self.inputs, device="cpu") // self._sizes[0]
        digits = range((self._blocks - 1).bit_length())
        for digit in digits:
            has = (block >> digit) % 2 == 1
            pair = list(zip(_behind(call, sources, has), _behind(call, sources, ~has), strict=True))
            if len(self._seen) == digit:
                self._seen.append(pair)
            else:
                self._seen[digit] = [
                    (old[0] | new[0], old[1] | new[1])
                    for old, new in zip(self._seen[digit], pair, strict=True)
                ]
            if any((one & zero).any() for one, zero in self._seen[digit]):
                return False
        return True

    def _rows(self, source: int) -> Tensor:
        """Return the block of each output of a source, -1 where it is not known."""
        pairs = [digit[source] for digit in self._seen]
        number = torch.stack([one.long() << i for i, (one, _) in enumerate(pairs)]).sum(0)
        known = torch.stack([one | zero for one, zero in pairs]).all(0)
        in_order = torch.arange(len(known), device="cpu") // max(len(known) // self._blocks, 1)
        # A few outputs may be inactive whatever the noise, as behind negative weights and a ReLU.
        if known.float().mean() > _MOST and torch.equal(number[known], in_order[known]):
            return in_order
        return torch.where(known, number, -1)

    @property
    def _blocks(self) -> int:
        return self.inputs // self._sizes[0]

    @property
    def done(self) -> bool:
        """Whether the block of every output is known, or that there are none."""
        if not self._sizes or self._changes:
            return True
        if not self._seen:
            return False
        for source in range(len(self.sources)):
            counts = torch.bincount(self._rows(source) + 1, minlength=self._blocks + 1)
            if counts[0] or len(set(counts[1:].tolist())) > 1:
                return False
        return True

    def why_not(self) -> str | None:
        """Return why the inputs are no units of their own; None if they are."""
        if self._changes:
            return "what it reads depends on the input"
        if not self._sizes:
            return "units are mixed on the way to it, as by a norm or a sum"
        if not self.done:
            return "this example does not tell: some units change nothing, give a longer one"
        return None

    def units(self, between: Mapping[str, nn.Module]) -> Units:
        """Return the units, given the modules with weights on the way to the map."""
        size = self._sizes[0]
        maps = [self.consumer, *self.sources]
        kernels = [as_matrix(m.module, m.module.weight).shape[2] for m in maps]
        convolves = any(unit_axis(m.module) < -1 for m in maps)
        kind: Kind = "feed_forward" if size == 1 else "heads"
        grouped = any(unit_axis(module) < -1 for module in between.values())
        if max(kernels) > 1 or grouped or (convolves and size > 1):
            kind = "channels"
        producers = {s.name: self._rows(i) for i, s in enumerate(self.sources)}
        by_position = self._by_position and not convolves
        return Units(
            kind, producers, self.consumer.name, self.inputs, size, by_position, tuple(between)
        )


def _behind(call: Call, sources: list[Call], chosen: Tensor) -> list[Tensor]:
    """Return which outputs of each source the chosen inputs of a map depend on."""
    assert call.x is not None
    x = call.x.movedim(unit_axis(call.module), -1)
    direction = torch.zeros_like(x)
    generator = torch.Generator(x.device).manual_seed(0)
    weights = torch.rand(x.shape, generator=generator, device=x.device) + 0.5
    direction[..., chosen.to(x.device)] = weights[..., chosen.to(x.device)].to(x.dtype)
    gradients = torch.autograd.grad(
        x, [s.leaf for s in sources], direction, retain_graph=True, materialize_grads=True
    )
    moved = [g.movedim(unit_axis(s.module), -1) for g, s in zip(gradients, sources, strict=True)]
    depends = [(g != 0) & g.isfinite() for g in moved]
    return [d.reshape(-1, d.shape[-1]).any(0).cpu() for d in depends]


def _is_by_position(call: Call, sources: list[Call]) -> bool:
    """Return True if the first and the last position depend on the same of each source alone."""
    assert call.x is not None
    rows = call.x.reshape(-1, call.x.shape[-1])
    if any(s.leaf.shape[:-1] != call.x.shape[:-1] for s in sources):
        return False
    if len(rows) == 1 and call.x.ndim > 2:
        return False  # of a sequence, one position tells nothing
    leaves = [s.leaf for s in sources]
    for position in {0, len(rows) - 1}:
        gradients = torch.autograd.grad(
            rows[position].sum(), leaves, retain_graph=True, materialize_grads=True
        )
        for gradient in gradients:
            by_row = gradient.reshape(len(rows), -1).any(1)
            by_row[position] = False
            if by_row.any():
                return False
    return True
