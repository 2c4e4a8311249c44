"""Which compact net is the fastest, and which units are hardly ever open."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dg_lightning.gates import StaticGate
from dg_lightning.gates.policies import top_k_mask
from dg_lightning.layers import GatedMLP
from dg_lightning.runtime.compaction import Compact, compact
from dg_lightning.runtime.timing import median_seconds

__all__ = [
    "MOST_LOST",
    "OFTEN_ENOUGH",
    "accuracies",
    "fastest_compact",
    "freeze_gates",
    "frozen_where_faster",
    "usage_of",
    "without_gates",
]

OFTEN_ENOUGH = 0.05  # share of samples that open a block which stays open when gates are frozen
MOST_LOST = 0.01  # accuracy that may be lost where gates are frozen because that is faster
_NOISE = 1.03  # two measurements of one net may differ by so much
_WHOLE = 2**31  # rounds every width up to all of it
_VARIANTS: dict[str, dict[str, Any]] = {
    "as small as can be": {},
    "widths rounded to 16": {"multiple": 16},
    "all inputs read": {"selects_inputs": False},
    "all inputs read, widths rounded to 16": {"selects_inputs": False, "multiple": 16},
    "no unit removed: faster here": {"selects_inputs": False, "multiple": _WHOLE},
}


def fastest_compact(
    net: GatedMLP, batch_sizes: Sequence[int] = (1, 32, 1024), **options: Any
) -> Compact:
    """Return the compact net that is fastest here, by measuring, over some batch sizes alike.

    Args:
        net: The net.
        batch_sizes: What it will be used with.
        **options: Further arguments of `compact`.
    """
    made: dict[str, Compact] = {}
    for name, variant in _VARIANTS.items():
        candidate = compact(net, **options, **variant)
        if all(candidate.steps != other.steps for other in made.values()):
            made[name] = candidate
    if len(made) == 1:
        return next(iter(made.values()))
    scores = dict.fromkeys(made, 0.0)
    ways = {name: candidate.net for name, candidate in made.items()}
    for size in batch_sizes:
        for name, seconds in _seconds(ways, size, net).items():
            scores[name] += math.log(seconds)
    best = min(scores, key=lambda name: scores[name])
    made[best].notes.append(f"Fastest of {len(made)} ways to write it down: {best}.")
    return made[best]


def without_gates(net: GatedMLP) -> GatedMLP:
    """Return a copy of a net with all its gates taken out: the dense one to compare with."""
    dense = copy.deepcopy(net)
    dense.input_gate = None
    for layer in dense.layers():
        layer.gate = None
    return dense.eval()


def frozen_where_faster(
    net: GatedMLP,
    data: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    batch_sizes: Sequence[int] = (1, 32, 1024),
    max_loss: float = MOST_LOST,
) -> tuple[GatedMLP, Compact]:
    """Make a net compact; where looking at the input costs more than it saves, with frozen gates.

    Which it is, and why, is in the notes.

    Args:
        net: The net.
        data: Gives batches of inputs and labels, to see which units are open and what freezing
            costs; called twice.
        batch_sizes: What it will be used with.
        max_loss: By how much the accuracy on them may fall.

    Returns:
        The net as it was made compact, gates frozen or not, and what was made of it.
    """
    made = fastest_compact(net, batch_sizes)
    if not any(step["kind"] == "gated" for step in made.steps):
        return net, made
    ways = {"dense": fastest_compact(without_gates(net), batch_sizes).net, "ours": made.net}
    taken = [_seconds(ways, size, net) for size in batch_sizes]
    gains = ", ".join(f"{seconds['dense'] / seconds['ours']:.2f}" for seconds in taken)
    if all(seconds["ours"] <= _NOISE * seconds["dense"] for seconds in taken):
        return net, made
    sizes = ", ".join(map(str, batch_sizes))
    why = f"Gates that look at the input make it {gains} times as fast as dense at batch {sizes}."
    frozen = freeze_gates(net, usage_of(net, (x for x, _ in data())))
    small = fastest_compact(frozen, batch_sizes)
    before, after = accuracies([copy.deepcopy(each).eval() for each in (net, frozen)], data())
    seen = f"{before:.2%} of the validation samples are right with them, {after:.2%} without"
    if before - after > max_loss:
        made.notes.append(f"{why} They stay: {seen}.")
        return net, made
    small.notes.append(f"{why} They are frozen: {seen}.")
    return frozen, small


def _seconds(ways: Mapping[str, Any], size: int, net: GatedMLP) -> dict[str, float]:
    like = net.output.weight
    x = torch.randn(size, net.in_features, device=like.device, dtype=like.dtype)
    with torch.inference_mode():
        runs = {name: partial(way, x) for name, way in ways.items()}
        return median_seconds(runs, like.device, rounds=7)


@torch.inference_mode()
def accuracies(
    runs: Sequence[Callable[[Tensor], Tensor]], data: Iterable[tuple[Tensor, Tensor]]
) -> list[float]:
    """Return the share of right answers of several nets."""
    right, total = [0] * len(runs), 0
    for x, target in data:
        total += len(target)
        for index, run in enumerate(runs):
            right[index] += int((run(x).argmax(-1) == target).sum())
    return [count / total for count in right]


@torch.no_grad()
def freeze_gates(
    net: GatedMLP, usage: Mapping[str, Tensor], least: float = OFTEN_ENOUGH
) -> GatedMLP:
    """Return a copy of a net whose gates look at the input no longer: static ones.

    Another function than the net, and often hardly another: gates that depend on the input are free
    to say the same of every input, and many have learned to.

    Args:
        net: The net.
        usage: How often each block is open, by the name of its hidden layer, see `usage_of`.
        least: Blocks that are open at least that often are open from now on, the others closed. As
            many as a gate always has open (its floor, or k) stay in any case: the most used ones.

    Raises:
        TypeError: If the gate on the inputs depends on them.
    """
    if net.input_gate is not None and net.input_gate.input_dependent:
        raise TypeError("input_gate: only gates of hidden layers can be frozen.")
    frozen = copy.deepcopy(net)
    for index, layer in enumerate(frozen.layers()):
        gate: Any = layer.gate
        if gate is None or not gate.input_dependent:
            continue
        name = f"hidden.{index}"
        shares = usage.get(name)
        if shares is None or len(shares) != gate.blocks:
            raise ValueError(
                f"`usage` must have {gate.blocks} shares for {name}, one a block, got "
                f"{'none' if shares is None else len(shares)}: see `usage_of`."
            )
        fewest = max(gate._floor, gate.k or 0, 1)
        stays = top_k_mask(shares, fewest, into=shares >= least)
        device = layer.linear.weight.device
        static = StaticGate(gate.units, block_size=gate.block_size, device=device)
        static.feeds = gate.feeds
        static.logit.copy_(torch.where(stays, 1.0, -1.0))
        layer.gate = static.requires_grad_(False).train(gate.training)
    return frozen


@torch.no_grad()
def usage_of(net: GatedMLP, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Measure how often each block of the gates that depend on the input is open.

    Args:
        net: The net.
        batches: Inputs.

    Returns:
        By the name of the hidden layer, a fraction for each block.
    """
    net, samples = copy.deepcopy(net).eval(), 0
    layers = {f"hidden.{i}": layer for i, layer in enumerate(net.layers())}
    gates = {n: layer.gate for n, layer in layers.items() if layer.gate is not None}
    gates = {name: gate for name, gate in gates.items() if gate.input_dependent}
    opened: dict[str, Tensor] = {}
    for x in batches:
        net(x)
        samples += len(x)
        for name, gate in gates.items():
            assert isinstance(gate.gate, Tensor)
            count = torch.count_nonzero(gate.gate, 0)
            opened[name] = opened[name] + count if name in opened else count
    if gates and not samples:
        raise ValueError("Usage is measured on data, and there was none: give some batches.")
    return {name: count / samples for name, count in opened.items()}
