"""The questions of a check that the steps of one training answer."""

import copy
import pickle
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from torch import nn

from dg_lightning.compute import gate_submodules
from dg_lightning.monitoring.views import watched_gates
from dg_lightning.schedules import Clock, Duration, Schedule

from .copies import Copies, is_ours, taking_part, targets
from .probe import Observed, run_steps
from .report import Report, Status

__all__ = ["add_cost", "add_findings", "add_pickling"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MOST_NAMES = 6
_DURATIONS = ("begin", "until", "landing", "join", "revive_after", "revive_until")


def add_findings(report: Report, given: Sequence[Any], copies: Copies, seen: Observed) -> None:
    """Add all that one training has shown."""
    ours = copies.callbacks
    if seen.batches == 0:
        _callbacks(report, given, ours, seen)
        return
    _steps(report, given, seen)
    _gates(report, ours, seen)
    _callbacks(report, given, ours, seen)
    _dense_layers(report, copies.model, ours)
    if any(_presses(callback) for callback in ours):
        _penalty(report, ours, seen)
    if any(hasattr(callback, "connections") for callback in ours):
        _zeros(report, seen)
    _ledger(report, seen)


def _steps(report: Report, given: Sequence[Any], seen: Observed) -> None:
    """Compare steps that Lightning counts with those that happen, and with those assumed."""
    made = f"{seen.steps} optimizer steps in {seen.batches} batches"
    if seen.optimizer_steps > seen.steps:
        report.add(
            "ERROR",
            "steps",
            f"{made}, by Lightning's count; {seen.optimizer_steps} were made: take optimizers from "
            "`self.optimizers()`, and step in `training_step`.",
        )
        return
    clock, expected = seen.clock, seen.batches * seen.optimizers
    assert clock is not None
    durations = [v for c in given if is_ours(c) for v in _moments(c).values()]
    rests_on_it = any(not isinstance(v, int) and "step" not in str(v) for v in durations)
    if clock.assumed and rests_on_it and seen.steps < 0.9 * expected:
        share = seen.steps / expected
        total = round(share * clock.total_steps) if clock.total_steps else None
        remedy = f"`max_steps={total}`" if total else "`max_steps`"
        report.add(
            "ERROR",
            "steps",
            f"{made}, {share:.0%} of what schedules assume, so they will not arrive: set {remedy} "
            "of the Trainer.",
        )
        return
    end = "no known end" if clock.total_steps is None else f"{clock.total_steps:,} steps in all"
    report.add("OK", "steps", f"{made}; {end}.")


def _gates(report: Report, ours: Sequence[Any], seen: Observed) -> None:
    if not seen.gates:
        report.add(
            "OK" if not any(map(is_ours, ours)) else "warning",
            "gates",
            "The module has none: dg_lightning.GatedLinear is a layer with one.",
        )
        return
    idle = [name for name in seen.gates if name not in seen.ran]
    if seen.untrained:
        report.add(
            "ERROR",
            "gates",
            f"No optimizer holds the parameters of {_names(seen.untrained)}: pass them to it in "
            "`configure_optimizers`.",
        )
    elif idle:
        report.add(
            "warning",
            "gates",
            f"{_names(idle)} did not run in {seen.batches} batches: let the net use them.",
        )
    else:
        units = sum(gate.units for gate in seen.gates.values())
        found = f"{len(seen.gates)} with {units:,} units: {_names(seen.gates)}."
        report.add("OK", "gates", found)
    watched = watched_gates(ours)
    if unwatched := [name for name in seen.gates if name not in watched]:
        report.add(
            "OK",
            "collapse",
            f"Gates are not watched: CollapseDetector says when they fail ({_names(unwatched)}).",
        )


def _callbacks(report: Report, given: Sequence[Any], ours: Sequence[Any], seen: Observed) -> None:
    """Say what each of our callbacks acts on, and when."""
    for callback, copied in zip(taking_part(given), ours, strict=True):
        if not is_ours(callback):
            continue
        name, found = type(callback).__name__, targets(copied)
        if name in seen.dead:
            gone = _names(seen.dead[name])
            report.add("ERROR", name, f"It acts on {gone}, not part of the module any more.")
            continue
        text = f"Acts on {_names(found)}." if found else "Takes part."
        assert seen.clock is not None
        try:
            report.add(*_in_time(name, text, _moments(callback), seen.clock))
        except ValueError as error:
            report.add("ERROR", name, str(error))


def _moments(callback: Any) -> dict[str, Duration]:
    """Return the durations of a callback, by their names."""
    moments: dict[str, Duration] = {}
    holders = [callback, getattr(callback, "schedule", None), getattr(callback, "weight", None)]
    for name, holder in product(_DURATIONS, holders):
        value = getattr(holder, name, None)
        unused = isinstance(holder, Schedule) and (
            holder.start == holder.end or (name == "until" and holder.shape == "step")
        )
        unused = unused or (name == "revive_until" and getattr(holder, "revive_after", 0) is None)
        if isinstance(value, int | float | str) and not unused:
            moments[name] = value
    for index, phase in enumerate(getattr(callback, "phases", [])):
        moments[f"phase {index + 1}"] = phase.begin
    return moments


def _in_time(
    name: str, text: str, moments: dict[str, Duration], clock: Clock
) -> tuple[Status, str, str]:
    """Return a finding on durations, resolved to steps."""
    steps = {moment: clock.steps(value, moment) for moment, value in moments.items()}
    if steps:
        text += f" In steps: {', '.join(f'{moment} {step:,}' for moment, step in steps.items())}."
    late = [m for m, step in steps.items() if clock.total_steps and step > clock.total_steps]
    if late:
        return "ERROR", name, f"{text} Training ends at {clock.total_steps:,}, before {late[0]}."
    return "OK", name, text


def _dense_layers(report: Report, model: Any, ours: Sequence[Any]) -> None:
    """Name the layers that no callback makes sparse, and why."""
    sparse = [callback for callback in ours if hasattr(callback, "connections")]
    if sparse:
        made = {name for callback in sparse for name in targets(callback)}
        in_gates = gate_submodules(model)
        left = {
            name: module.weight.requires_grad
            for name, module in model.named_modules()
            if isinstance(module, _LAYERS) and name not in made and module not in in_gates
        }
        for trained, why in ((True, "no callback names them"), (False, "they are frozen")):
            if names := [name for name, trains in left.items() if trains == trained]:
                report.add("OK", "dense layers", f"{_names(names)}: {why}.")


def _presses(callback: Any) -> bool:
    """Return True if a callback adds a penalty to the loss."""
    return hasattr(callback, "term") and getattr(callback, "method", None) != "shift"


def _penalty(report: Report, ours: Sequence[Any], seen: Observed) -> None:
    if seen.backward_passes == 0:
        report.add(
            "ERROR",
            "penalty",
            "Lightning was given no loss to differentiate, so the penalty cannot act: write "
            "`self.manual_backward(loss)`.",
        )
        return
    if seen.no_gradients is not None:
        report.add("warning", "penalty", f"Not measured: {seen.no_gradients}")
        return
    pressing = [callback for callback in ours if _presses(callback)]
    pressed = {name for callback in pressing for name in callback.term.gates} & seen.ran
    missed = [name for name in pressed if not seen.gradients.get(name, (0, 0))[1] > 0]
    # Nothing has to press on a gate within its target, or of no weight.
    lenient = any(
        str(getattr(c, "usage", "")).startswith("hinge") or getattr(c, "layer_weights", None)
        for c in pressing
    )
    off = all(c.weight.end == 0 for c in pressing if hasattr(c, "weight"))
    if missed and not lenient:
        weightless = off and not any(hasattr(callback, "budget") for callback in pressing)
        why = "its `weight` is 0" if weightless else "no gradient of it comes there"
        report.add("ERROR", "penalty", f"It does not reach {_names(sorted(missed))}: {why}.")
        return
    sizes = [f"{n} {p:.2g} beside {own:.2g}" for n, (own, p) in seen.gradients.items()]
    report.add("OK", "penalty", f"Norm of its gradient, beside the loss's: {_names(sizes)}.")


def _zeros(report: Report, seen: Observed) -> None:
    if seen.not_zero:
        layers = _names([f"{name} (step {step})" for name, step in seen.not_zero.items()])
        report.add(
            "ERROR",
            "missing weights",
            f"Not 0 after a step in {layers}: something replaces the layer or its weight.",
        )
    else:
        count = seen.optimizer_steps
        report.add("OK", "missing weights", f"Exactly 0 after each of {count} steps.")


def _ledger(report: Report, seen: Observed) -> None:
    counted = seen.whole_net
    if counted is None:
        report.add(
            "warning",
            "ledger",
            "MACs are not counted: a linear map at a gate did not run as a module, or the size of "
            "a batch is not known.",
        )
        return
    maps = len(counted.runs)
    text = f"{maps} linear maps and decisions, and {counted.other:,} other MACs a sample."
    if counted.uncounted:
        text += f" Not counted: {', '.join(counted.uncounted)}."
    report.add("warning" if counted.uncounted else "OK", "ledger", text)


def add_pickling(report: Report, ours: Sequence[Any]) -> None:
    """Add the callbacks that cannot be pickled behind a training, as a second one needs."""
    for callback in filter(is_ours, ours):
        alone = copy.copy(callback)
        for name in ("log", "log_dict"):  # of the module, which Lightning has put there
            vars(alone).pop(name, None)
        try:
            pickle.dumps(alone)
        except Exception as error:  # of whatever it holds
            name = type(callback).__name__
            report.add("ERROR", name, f"It cannot be sent to processes: {error}.")


def add_cost(report: Report, model: Any, data: Any, callbacks: Sequence[Any], trainer: Any) -> None:
    """Compare the time of a batch with that of one without our callbacks."""
    times = []
    for without_ours in (False, True):
        seen = Observed()
        try:
            run_steps(Copies(model, callbacks, without_ours), data, trainer, seen)
        except Exception as error:  # as of callbacks that monitor our keys
            report.add("OK", "time", f"Not measured without our callbacks: {error}")
            return
        times.append(1e3 * seen.seconds_per_batch)
    text = f"{times[0]:.2f} ms a batch with our callbacks, {times[1]:.2f} without."
    report.add("OK", "time", text)


def _names(names: Iterable[str]) -> str:
    """Return names as a list, of which only the first are written."""
    every = list(names)
    left = len(every) - _MOST_NAMES
    return ", ".join(every[:_MOST_NAMES]) + (f" and {left} others" if left > 0 else "")
