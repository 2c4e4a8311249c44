"""Choose new masks from scores: which connections to drop and grow, how many, and when."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from dg_lightning.compute.macs import linear_maps
from dg_lightning.gates import top_k_mask
from dg_lightning.gates.protocol import GateLike
from dg_lightning.schedules import Clock, Duration, Schedule, check_duration

_BLOCK = re.compile(r"block:([1-9]\d*)")
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_N_OF_M = re.compile(r"([1-9]\d*):([1-9]\d*)")


@dataclass(frozen=True)
class Structure:
    """Structure of a layer's connections.

    Args:
        kind: `unstructured` keeps single weights, `block:16` keeps blocks of 16 x 16 weights, `2:4`
            keeps two of every four consecutive inputs to an output, and `fan_in` keeps the same
            number of inputs for every output.

    Raises:
        ValueError: If `kind` is not one of these.

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
                "`structure` must be unstructured, fan_in, block:<size> (e.g. block:16) or "
                f"<n>:<m> (e.g. 2:4), got {self.kind!r}."
            )

    @property
    def block(self) -> int:
        """Side length of the blocks."""
        match = _BLOCK.fullmatch(self.kind)
        return 1 if match is None else int(match[1])

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """The numbers N and M for an N:M structure, otherwise None."""
        match = _N_OF_M.fullmatch(self.kind)
        return None if match is None else (int(match[1]), int(match[2]))

    @property
    def density(self) -> float | None:
        """The density that the structure prescribes, or None."""
        return None if self.n_of_m is None else self.n_of_m[0] / self.n_of_m[1]

    def check_layer(self, name: str, layer: nn.Module) -> None:
        """Raise ValueError if a layer does not fit this structure."""
        weight = cast(Tensor, layer.weight)
        rows, columns = weight.shape[0], weight[0].numel()
        transposed = isinstance(layer, TRANSPOSED)
        if transposed and (self.kind == "fan_in" or self.n_of_m is not None):
            raise ValueError(
                f"`structure={self.kind!r}` does not support transposed convolutions, because "
                f"their weights have inputs first, got {name}: exclude the layer with `layers`."
            )
        if self.block > 1 and (rows % self.block or columns % self.block):
            raise ValueError(
                f"`structure={self.kind!r}` needs sizes divisible by {self.block}, but {name} is "
                f"{rows} x {columns}: use another size, or exclude the layer with `layers`."
            )
        if self.n_of_m is not None and columns % self.n_of_m[1]:
            raise ValueError(
                f"`structure={self.kind!r}` requires the number of inputs to be divisible by "
                f"{self.n_of_m[1]}, but {name} has {columns}: use `layers` to exclude this layer."
            )

    def note_on(self, sparsity: object) -> str | None:
        """Return a note if this structure overrides the sparsity, otherwise None."""
        if self.density is None or sparsity == 1 - self.density:
            return None
        return (
            f"removes {1 - self.density:.0%} of the weights because of `structure={self.kind!r}` "
            f"and ignores `sparsity={sparsity}`."
        )

    def has(self, mask: Tensor) -> bool:
        """Return True if a mask has this structure."""
        groups = self.masks(mask)
        counts = groups.sum(-1)
        if not torch.equal(self.ungroup(groups, mask), mask):
            return False
        return bool((counts == (counts[0] if self.n_of_m is None else self.n_of_m[0])).all())

    def groups(self, values: Tensor) -> Tensor:
        """Arrange nonnegative values as ``(groups, members)``. Values in a block are summed."""
        matrix = values.flatten(1)
        if self.block > 1:
            return self._blocks(matrix).sum((1, 3)).reshape(1, -1)
        if self.n_of_m is not None:
            return matrix.reshape(-1, self.n_of_m[1])
        return matrix if self.kind == "fan_in" else matrix.reshape(1, -1)

    def masks(self, mask: Tensor) -> Tensor:
        """Arrange a mask as ``(groups, members)``. A block is set if any weight in it is set."""
        if self.block > 1:
            return self._blocks(mask.flatten(1)).any(3).any(1).reshape(1, -1)
        return self.groups(mask)

    def ungroup(self, mask: Tensor, like: Tensor) -> Tensor:
        """Expand a ``(groups, members)`` mask to the shape of the weight."""
        if self.block > 1:
            rows, columns = like.shape[0] // self.block, like[0].numel() // self.block
            blocks = mask.reshape(rows, 1, columns, 1)
            mask = blocks.expand(rows, self.block, columns, self.block)
        return mask.reshape(like.shape)

    def count(self, weight: Tensor, density: float) -> int:
        """Return how many members each group keeps, at least one."""
        members = self.groups(torch.empty_like(weight, device="meta")).shape[1]
        share = density if self.density is None else self.density
        # Like torch.nn.utils.prune, round the number of removed members.
        return max(1, members - round((1 - share) * members))

    def _blocks(self, matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape
        return matrix.reshape(rows // self.block, self.block, columns // self.block, self.block)


_SAMPLED = 2**14  # number of scores sampled to estimate bounds
_IN_CACHE = 2**17  # number of scores that fit into a CPU cache


def largest(
    scores: Tensor, count: int, among: Tensor | None = None, allowed: int | None = None
) -> Tensor:
    """Mark the `count` largest scores in a tensor. Ties go to the first scores.

    Args:
        scores: Scores of any shape.
        count: Number of scores to mark.
        among: Bool mask of the scores that may be marked, or None for all.
        allowed: Number of scores that may be marked, if known. Counting them synchronises with
            the device.

    Raises:
        ValueError: If more scores are requested than may be marked.

    >>> largest(torch.tensor([0.5, 0.9, 0.5, 0.1]), 2).tolist()
    [True, True, False, False]
    """
    scores = scores.detach()
    if allowed is None:
        allowed = scores.numel() if among is None else int(among.sum())
    if not 0 <= count <= allowed:
        raise ValueError(f"`count` must be from 0 to {allowed}, got {count}.")
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if scores.device.type == "cpu":
        return _largest_on_cpu(scores, count, among, count / allowed)
    candidates = scores if among is None else torch.where(among, scores, -torch.inf)
    return top_k_mask(candidates.flatten(), count).view(scores.shape)


def _largest_on_cpu(scores: Tensor, count: int, among: Tensor | None, share: float) -> Tensor:
    """Mark the largest scores with numpy, without a full sort.

    A sample of the scores gives bounds for the smallest marked score, so that only scores between
    the bounds are partitioned. If the bounds turn out to be wrong, all scores are partitioned.
    """
    halves = scores.dtype in (torch.bfloat16, torch.float16)  # unsupported or slow in numpy
    values = (scores.float() if halves else scores).flatten().numpy()
    allowed = None if among is None else among.flatten().numpy()
    low, high = _bounds(values, allowed, share)
    mask = np.empty(len(values), bool)
    parts = []
    for start in range(0, len(values), _IN_CACHE):
        here = slice(start, start + _IN_CACHE)
        some = values[here]
        reach = some >= low
        np.greater(some, high, out=mask[here])
        if allowed is not None:
            reach &= allowed[here]
            mask[here] &= allowed[here]
        parts.append(start + np.flatnonzero(reach ^ mask[here]))
    close = np.concatenate(parts)
    left = count - int(np.count_nonzero(mask))
    if not 0 <= left <= len(close):
        mask, left = np.zeros_like(mask), count
        close = np.arange(len(values)) if allowed is None else np.flatnonzero(allowed)
    if left:
        candidates = values[close]
        last = np.partition(candidates, len(close) - left)[len(close) - left]
        better = candidates > last
        mask[close[better]] = True
        mask[close[candidates == last][: left - np.count_nonzero(better)]] = True
    return torch.from_numpy(mask).view(scores.shape)


def _bounds(values: Any, allowed: Any, share: float) -> tuple[float, float]:
    """Estimate bounds on the smallest value in the given share of largest values."""
    step = len(values) // _SAMPLED | 1
    sample = values[::step] if allowed is None else values[::step][allowed[::step]]
    sample = np.sort(sample)
    place = (1 - share) * len(sample)
    room = 4 * math.sqrt(share * (1 - share) * len(sample)) + 2  # four standard deviations
    first, last = int(place - room), int(place + room)
    return (
        -math.inf if step == 1 or first < 0 else float(sample[first]),
        math.inf if step == 1 or last >= len(sample) else float(sample[last]),
    )


def largest_in_rows(scores: Tensor, counts: Tensor) -> Tensor:
    """Mark the `counts` largest scores in each row. Ties go to the first scores.

    >>> largest_in_rows(torch.tensor([[1, 3, 2], [5, 5, 4]]), torch.tensor([2, 1])).tolist()
    [[False, True, True], [True, False, False]]
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    wanted = torch.arange(scores.shape[-1], device=scores.device) < counts.unsqueeze(-1)
    return torch.zeros_like(wanted).scatter_(-1, order, wanted)


DropShape: TypeAlias = Literal["cosine", "linear", "constant"]


@dataclass
class DropSchedule:
    """Schedule for rewiring updates, which drop a decreasing share of connections.

    Args:
        every_n_steps: Optimizer steps between updates.
        drop_fraction: The initial share of connections to drop.
        drop_shape: How the share decreases until the last update.
        until: When updates end.

    >>> schedule = DropSchedule(100, drop_fraction=0.3, drop_shape="cosine", until="50%")
    >>> schedule.resolve(Clock(1000)) is None  # no warning
    True
    >>> [step for step in range(1, 600) if schedule.is_due(step, step - 1)], schedule.fraction(0)
    ([100, 200, 300, 400], 0.3)
    """

    every_n_steps: int
    drop_fraction: float
    drop_shape: DropShape
    until: Duration

    def __post_init__(self) -> None:
        if self.every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {self.every_n_steps}.")
        if not 0 < self.drop_fraction <= 1:
            raise ValueError(f"`drop_fraction` must be in (0, 1], got {self.drop_fraction}.")
        if self.drop_shape not in ("cosine", "linear", "constant"):
            raise ValueError(
                f"`drop_shape` must be cosine, linear or constant, got {self.drop_shape!r}."
            )
        check_duration("until", self.until)

    def resolve(self, clock: Clock, name: str = "It") -> str | None:
        """Resolve durations at the start of training. Return a warning if no update will happen."""
        self.last_step = clock.steps(self.until, "until")
        end = self.drop_fraction if self.drop_shape == "constant" else 0.0
        shape = "linear" if self.drop_shape == "constant" else self.drop_shape
        schedule = Schedule(self.drop_fraction, end, shape, until=max(self.last_step, 1))
        self.fraction = schedule.resolve(clock)
        if self.last_step > self.every_n_steps:
            return None
        return (
            f"{name} never rewires: the interval is {self.every_n_steps} steps, but updates end "
            f"before step {self.last_step}. Lower `every_n_steps` or raise `until`."
        )

    def is_due(self, step: int, last: int) -> bool:
        """Return True if an update is due after `step`. The previous check was after `last`."""
        due = step // self.every_n_steps > last // self.every_n_steps
        return due and step < self.last_step


class OpenRates:
    """Open rates for the inputs and outputs of each layer, over the micro-batches in a step.

    Args:
        module: The module.
        layers: The layers to track. Layers without gates are skipped.
    """

    def __init__(self, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        wanted = set(layers)
        maps = [m for m in linear_maps(module) if m.linear in wanted]
        self.gates = {m.linear: m for m in maps if m.is_gated}
        self._step: int | None = None
        self._sums: dict[nn.Module, tuple[Tensor, int]] = {}  # (sum of shares, micro-batches)

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Include the last forward pass in the rates of this step. A new step resets them."""
        if step != self._step:
            self._step, self._sums = step, {}
        for linear, linear_map in self.gates.items():
            outputs, inputs = linear_map.expand_to_units(_open_units, every_output=True)
            if outputs is not None or inputs is not None:
                kernel = (None,) * (linear.weight.ndim - 2)
                share, (total, count) = _share(outputs, inputs), self._sums.get(linear, (0.0, 0))
                self._sums[linear] = (share[..., *kernel] + total, count + 1)

    def shares(self, mean: Callable[[Tensor], Tensor]) -> dict[nn.Module, Tensor]:
        """Return how often each layer's connections have both ends open, as shares of samples.

        Each share can be broadcast to the layer's weight. `mean` averages a tensor over ranks.
        """
        return {linear: mean(total / count) for linear, (total, count) in self._sums.items()}


def _share(outputs: Tensor | None, inputs: Tensor | None) -> Tensor:
    """Return the share of samples that open both ends, given ``(samples, units)`` for each end."""
    if outputs is None:
        assert inputs is not None
        return inputs.mean(0)
    if inputs is None:
        return outputs.mean(0).unsqueeze(-1)
    if min(len(outputs), len(inputs)) == 1 or len(outputs) != len(inputs):
        # One end is the same for all samples, or the rows belong to different samples.
        return outputs.mean(0).unsqueeze(-1) * inputs.mean(0)
    return outputs.T @ inputs / len(inputs)


def _open_units(gate: GateLike) -> Tensor | None:
    if gate.gate is None:
        return None
    is_open = (gate.gate.detach() != 0).float()
    return is_open.flatten(0, -2) if is_open.ndim > 1 else is_open.unsqueeze(0)


def largest_mask(scores: Tensor, density: float, structure: Structure | None = None) -> Tensor:
    """Return a mask of a layer's largest scores, with the given density in each group.

    >>> largest_mask(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), 0.5).tolist()
    [[True, True, False, False]]
    """
    structure = structure or Structure()
    grouped = structure.groups(scores)
    count = structure.count(scores, density)
    if len(grouped) == 1:
        return structure.ungroup(largest(grouped, count), scores)
    counts = torch.full((len(grouped),), count, device=scores.device)
    return structure.ungroup(largest_in_rows(grouped, counts), scores)


def drop_and_grow(
    mask: Tensor,
    keep_scores: Tensor,
    grow_scores: Tensor,
    drop_fraction: float,
    structure: Structure | None = None,
    exclude_just_dropped: bool = False,
    total: int | None = None,
) -> Tensor:
    """Drop the connections with the smallest scores, and grow the same number of others.

    Connections are dropped across the whole layer, and each group grows as many as it has lost.
    Dropped connections may grow again immediately and then count as kept, so a layer that already
    has its best connections does not change.

    Args:
        mask: Bool mask of the connections.
        keep_scores: Nonnegative scores of existing connections.
        grow_scores: Nonnegative scores of candidates.
        drop_fraction: The share of connections to drop.
        structure: The structure of the connections.
        exclude_just_dropped: Whether dropped connections may not grow back in the same update.
        total: Number of connections or blocks, if known. Counting them synchronises with the
            device.

    >>> mask = torch.tensor([[True, True, False, False]])
    >>> weights, gradients = torch.tensor([[1.0, 9, 0, 0]]), torch.tensor([[0.0, 0, 5, 7]])
    >>> drop_and_grow(mask, weights, gradients, 0.5).tolist()
    [[False, True, False, True]]
    """
    structure = structure or Structure()
    old = structure.masks(mask)
    total = int(old.sum()) if total is None else total
    dropped = int(drop_fraction * total + 1e-9)
    if exclude_just_dropped:
        dropped = min(dropped, old.numel() - total)
    if dropped == 0:
        return mask.clone()
    keep, grow = structure.groups(keep_scores), structure.groups(grow_scores)
    kept = largest(keep, total - dropped, old, total)
    candidates = ~(old if exclude_just_dropped else kept)
    if len(old) == 1:
        left = old.numel() - (total if exclude_just_dropped else total - dropped)
        return structure.ungroup(kept | largest(grow, dropped, candidates, left), mask)
    lost = old.sum(-1) - kept.sum(-1)
    grown = largest_in_rows(grow.masked_fill(~candidates, -torch.inf), lost) & candidates
    if exclude_just_dropped:  # a group may have fewer candidates than it has lost
        back = keep.masked_fill(~(old & ~kept), -torch.inf)
        grown |= largest_in_rows(back, lost - grown.sum(-1))
    return structure.ungroup(kept | grown, mask)
