"""Choice of the fastest compact net, and freezing of dynamic gates."""

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torchmetrics.functional import r2_score

from dg_lightning.gates import StaticGate
from dg_lightning.gates.policies import top_k_mask
from dg_lightning.layers.mlp import GatedMLP
from dg_lightning.runtime.compaction import Compact, compact

__all__ = [
    "FREEZE_USAGE",
    "MAX_ACCURACY_LOSS",
    "fastest_compact",
    "freeze_gates",
    "frozen_where_faster",
    "scores",
    "usage_of",
    "without_gates",
]

FREEZE_USAGE = 0.05  # blocks open for at least this share of samples stay open when frozen
MAX_ACCURACY_LOSS = 0.01  # largest drop in accuracy for which gates are frozen automatically
_NOISE = 1.03  # timings within this factor count as equal
_REMOVE_NOTHING = 2**31  # as `multiple`: rounds every width up to its full size
_VARIANTS: dict[str, dict[str, Any]] = {
    "as small as can be": {},
    "widths rounded to 16": {"multiple": 16},
    "all inputs read": {"selects_inputs": False},
    "all inputs read, widths rounded to 16": {"selects_inputs": False, "multiple": 16},
    "no unit removed: faster here": {"selects_inputs": False, "multiple": _REMOVE_NOTHING},
}


def fastest_compact(
    net: GatedMLP, batch_sizes: Sequence[int] = (1, 32, 1024), **options: Any
) -> Compact:
    """Return the compact net with the lowest measured time, as a geometric mean over batch sizes.

    Args:
        net: The net.
        batch_sizes: The batch sizes to measure.
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
    nets = {name: candidate.net for name, candidate in made.items()}
    for size in batch_sizes:
        for name, seconds in _measure(nets, size, net).items():
            scores[name] += math.log(seconds)
    best = min(scores, key=lambda name: scores[name])
    made[best].notes.append(f"Fastest of {len(made)} variants: {best}.")
    return made[best]


def without_gates(net: GatedMLP) -> GatedMLP:
    """Return a copy of the net without gates, as the dense baseline."""
    dense = copy.deepcopy(net)
    dense.input_gate = None
    for layer in dense.layers():
        layer.gate = None
    return dense.eval()


def frozen_where_faster(
    net: GatedMLP,
    data: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    batch_sizes: Sequence[int] = (1, 32, 1024),
    max_loss: float = MAX_ACCURACY_LOSS,
) -> tuple[GatedMLP, Compact]:
    """Make a net compact, and freeze its dynamic gates if they cost more time than they save.

    The notes explain the decision.

    Args:
        net: The net.
        data: Returns batches of inputs and labels, to measure usage and the accuracy lost by
            freezing; called twice.
        batch_sizes: The batch sizes to measure.
        max_loss: Largest acceptable drop in accuracy (R² for numbers) on this data.

    Returns:
        The net, with frozen gates or not, and its compact form.
    """
    made = fastest_compact(net, batch_sizes)
    if not any(step["kind"] == "gated" for step in made.steps):
        return net, made
    nets = {"dense": fastest_compact(without_gates(net), batch_sizes).net, "ours": made.net}
    measured = [_measure(nets, size, net) for size in batch_sizes]
    gains = ", ".join(f"{seconds['dense'] / seconds['ours']:.2f}" for seconds in measured)
    if all(seconds["ours"] <= _NOISE * seconds["dense"] for seconds in measured):
        return net, made
    sizes = ", ".join(map(str, batch_sizes))
    reason = f"Input-dependent gates make it {gains} times as fast as dense at batch size {sizes}."
    gates = [layer.gate for layer in net.layers() if layer.gate is not None]
    if any(gate.input_dependent and gate.scale is not None for gate in gates):
        made.notes.append(f"{reason} They stay: they scale units by p, which varies.")
        return net, made
    frozen = freeze_gates(net, usage_of(net, (x for x, _ in data())))
    small = fastest_compact(frozen, batch_sizes)
    nets_now = [copy.deepcopy(each).eval() for each in (net, frozen)]
    measure, (before, after) = scores(nets_now, data())
    effect = f"validation {measure} is {before:.2%} with them and {after:.2%} without"
    if before - after > max_loss:
        made.notes.append(f"{reason} They stay: {effect}.")
        return net, made
    small.notes.append(f"{reason} They are frozen: {effect}.")
    return frozen, small


def median_seconds(
    runs: Mapping[str, Callable[[], object]], rounds: int = 15, min_seconds: float = 0.01
) -> dict[str, float]:
    """Return the median time per call of each function, measured in turns.

    Args:
        runs: The functions, by name.
        rounds: Number of measurements of each function.
        min_seconds: Minimum duration of a measurement; calls are repeated to reach it.
    """
    threads = torch.get_num_threads()
    timers = {n: Timer("run()", globals={"run": run}, num_threads=threads) for n, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name] += timer.blocked_autorange(min_run_time=min_seconds).times
    return {name: statistics.median(each) for name, each in times.items()}


def _measure(nets: Mapping[str, Any], size: int, net: GatedMLP) -> dict[str, float]:
    like = net.output.weight
    x = torch.randn(size, net.in_features, device=like.device, dtype=like.dtype)
    with torch.inference_mode():
        runs = {name: partial(candidate, x) for name, candidate in nets.items()}
        return median_seconds(runs, rounds=7)


@torch.inference_mode()
def scores(
    runs: Sequence[Callable[[Tensor], Tensor]], data: Iterable[tuple[Tensor, Tensor]]
) -> tuple[str, list[float]]:
    """Return the accuracy of each net, or R² where it has one output, and which of the two."""
    wanted, given = [], []
    for x, target in data:
        wanted.append(target)
        given.append([run(x) for run in runs])
    target, outputs = torch.cat(wanted), [torch.cat(of) for of in zip(*given, strict=True)]
    if outputs[0].shape[-1] == 1:
        target, mean = target.double(), target.double().mean()  # centred: sums of squares are exact
        values = [output.squeeze(-1).double() - mean for output in outputs]
        return "R²", [float(r2_score(value, target - mean)) for value in values]
    return "accuracy", [float((out.argmax(-1) == target).double().mean()) for out in outputs]


@torch.no_grad()
def freeze_gates(
    net: GatedMLP, usage: Mapping[str, Tensor], least: float = FREEZE_USAGE
) -> GatedMLP:
    """Return a copy of the net with its dynamic gates frozen to static ones.

    This changes the function that the net computes, often only slightly: many dynamic gates learn
    to decide alike for every input.

    Args:
        net: The net.
        usage: Fraction of samples that open each block, by hidden layer, see `usage_of`.
        least: Blocks used at least this often stay open, the others are closed. The most used ones
            always stay open, as many as the gate's floor or k requires.

    Raises:
        TypeError: If the input gate is dynamic, or a gate scales units by a p that varies.
    """
    if net.input_gate is not None and net.input_gate.input_dependent:
        raise TypeError("input_gate: only gates of hidden layers can be frozen.")
    frozen = copy.deepcopy(net)
    for index, layer in enumerate(frozen.layers()):
        gate: Any = layer.gate
        if gate is None or not gate.input_dependent:
            continue
        name = f"hidden.{index}"
        if gate.scale is not None:
            raise TypeError(f"{name}: its gate scales units by p, which a frozen gate cannot do.")
        shares = usage.get(name)
        if shares is None or len(shares) != gate.blocks:
            raise ValueError(
                f"`usage` must have {gate.blocks} shares for {name}, one a block, got "
                f"{'none' if shares is None else len(shares)}: see `usage_of`."
            )
        min_open = max(gate._floor, gate.k or 0, 1)
        is_kept = (shares >= least) | top_k_mask(shares, min_open)
        device = layer.linear.weight.device
        static = StaticGate(gate.units, block_size=gate.block_size, device=device)
        static.feeds = gate.feeds
        static.logit.copy_(torch.where(is_kept, 1.0, -1.0))
        layer.gate = static.requires_grad_(False).train(gate.training)
    return frozen


@torch.no_grad()
def usage_of(net: GatedMLP, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Measure how often each block of a dynamic gate is open.

    Args:
        net: The net.
        batches: Inputs.

    Returns:
        The fraction of samples that open each block, by hidden layer name.
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
